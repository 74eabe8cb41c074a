"""Ranks that did nothing for a long time."""

from dataclasses import dataclass
from enum import Enum

from manygpus.monitor import samples
from manygpus.monitor.findings.finding import LEAST_LOST_SHARE, Finding
from manygpus.monitor.findings.gpu_power import IDLE_UTILISATION_PERCENT
from manygpus.monitor.findings.waiting_for_loader import batch_wait_shares
from manygpus.monitor.findings.words import debugger, name_locations
from manygpus.monitor.sampled_job import IDLE_PROCESS_CORES, SampledJob

# A process that does nothing for so long is paused.
PAUSE_SECONDS = 30.0
# When a job is ended, its processes may use a core once more.
END_SECONDS = 5.0


class PauseCause(str, Enum):
    """Why a rank did nothing, by the state of its process in /proc."""

    STOPPED = "T"
    FILE_SYSTEM = "D"
    UNKNOWN = "S"


@dataclass(frozen=True, kw_only=True)
class PausedRanks(Finding):
    """Ranks that did nothing for a long time, one of them perhaps until the end of the job."""

    kind = samples.STALLED_RANK
    makes_ranks_wait = True
    seconds: float
    cause: PauseCause
    until_the_end: bool = False

    @classmethod
    def find(cls, job: SampledJob) -> "PausedRanks | None":
        """Find ranks that did nothing for a long time: stopped, stuck in a file system, or waiting for one.

        Waiting for batches is another finding.
        """
        ranks = sorted(job.sampled.ranks.keys() - batch_wait_shares(job).keys())
        pauses = {
            rank: job.longest_pause(rank, IDLE_PROCESS_CORES, IDLE_UTILISATION_PERCENT) for rank in ranks
        }
        seconds = {rank: rows.seconds[1:].sum() for rank, rows in pauses.items()}
        least_seconds = max(PAUSE_SECONDS, LEAST_LOST_SHARE * job.seconds)
        paused = [rank for rank in ranks if seconds[rank] >= least_seconds]
        if not paused:
            return None
        states = {rank: pauses[rank]["name"].mode()[0] for rank in paused}
        cause = PauseCause.UNKNOWN
        for known in (PauseCause.STOPPED, PauseCause.FILE_SYSTEM):
            with_cause = [rank for rank in paused if states[rank] == known.value]
            if with_cause:
                cause = known
                paused = with_cause
                break
        longest = max(seconds[rank] for rank in paused)
        silent_at_the_end = [
            rank
            for rank in paused
            if job.sampled.ranks[rank].time.iloc[-1] - pauses[rank].time.iloc[-1] <= END_SECONDS
        ]
        return cls(
            seconds=longest,
            cause=cause,
            until_the_end=bool(silent_at_the_end),
            locations=paused,
            # Samples that come late, as on a file system that hangs, may count as the time of a rank without
            # others, and as gaps in that of its node.
            lost_share=longest / max(job.seconds, longest),
        )

    def sentence(self, is_plain: bool) -> str:
        ranks = name_locations(self.locations)
        time = f"{self.seconds:.0f} s"
        if self.cause is PauseCause.STOPPED:
            return f"SIGSTOP paused {ranks} for {time}: find out who sent it, and resume with kill -CONT."
        if self.cause is PauseCause.FILE_SYSTEM:
            return f"{ranks} waited {time} for a file system: stage the data on the node's own disk."
        return f"{ranks} did nothing for {time}: {debugger(is_plain)} shows where each rank waits."
