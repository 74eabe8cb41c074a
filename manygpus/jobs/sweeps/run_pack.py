"""Do the runs of a pack in its job (pack.py): `python run_pack.py FILE`, which srun starts once.

Each run is a job on this machine (submit/submission.py), in a folder that is the same in every start of the
job, so that it resumes from its checkpoints there when the job comes back.
"""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from manygpus import job_folder, launchers
from manygpus.errors import UserError, entrypoint, print_line
from manygpus.job_folder import Outcome
from manygpus.jobs.inside.run_plain import PROCTRACK, SIGNALS_ALL
from manygpus.jobs.submit import executor, job_script
from manygpus.jobs.submit.request import Request
from manygpus.jobs.sweeps import progress_table
from manygpus.jobs.sweeps.pack import Pack, ended
from manygpus.jobs.sweeps.places import run_in_places
from manygpus.jobs.watch import job_status
from manygpus.jobs.watch.job_status import Handle, LocalHandle, State


class PackRun:
    """The runs of a pack, by their names, in one start of their job."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self.requests = {request.run_name: request for request in pack.requests}
        self.restarts: dict[str, int] = {}
        # Whether this start was worth it.
        self.some_ended_or_saved = False
        # The signals by which the job is asked to stop, and those of them that the ranks have.
        self.asked: set[int] = set()
        self.handed_on: set[int] = set()

    def run(self) -> None:
        """Do what has not ended.

        Raises:
            UserError: if runs have failed, or could not save at the time limit.
        """
        # Ranks inherit that it is blocked, and let it through when they can save (signals.py).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        signal.signal(signal.SIGTERM, lambda number, _: self.asked.add(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        unfinished = [name for name, request in self.requests.items() if not ended(request.folder)]
        print_line(f"{len(self.requests)} runs, {len(self.requests) - len(unfinished)} of them have ended")
        run_in_places(
            unfinished,
            self.pack.places,
            self.pack.gpus,
            start=self._start,
            next_ends=self._next_ends,
            goes_on=lambda: not self.asked,
        )
        outcomes = {name: ended(request.folder) for name, request in self.requests.items()}
        if not all(outcomes.values()):
            # At the time limit it would come back without end.
            if signal.SIGUSR2 in self.asked and not self.some_ended_or_saved:
                raise UserError("no run has ended or saved before the time limit: give more --time.")
            # All that it resumes from is in the folder of the sweep.
            job_folder.note_stop(_run_folder(self.pack.requests[0]).parent)
            return
        failed = [name for name, outcome in outcomes.items() if not outcome.well]
        if failed:
            raise UserError(f"{len(failed)} of {len(outcomes)} runs failed: {', '.join(failed)}.")

    def _start(self, name: str) -> Handle:
        """Start a run.

        Raises:
            UserError: if it cannot be started.
        """
        request = self.requests[name]
        earlier = job_folder.earlier_outcome(request.folder)
        if earlier:
            self.restarts[name] = earlier.restart + 1
            with suppress(FileNotFoundError):
                (request.folder / job_folder.OUTCOME).rename(request.folder / job_folder.EARLIER_OUTCOME)
        else:
            # It may have been killed with its node.
            self.restarts[name] = int(request.folder.exists())
        for submitted in request.folder.glob("*_submitted.pkl"):
            # Its number there is that of a process of the earlier start.
            submitted.unlink()
        handle = executor.submitter(request.stage)(
            replace(
                request,
                in_job=f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}",
                restart=self.restarts[name],
                threads=_threads(request),
            )
        )
        run_folder = _run_folder(request)
        for link, target in ((job_script.JOB, request.folder), (job_script.LOG, handle.log)):
            (run_folder / link).unlink(missing_ok=True)
            (run_folder / link).symlink_to(target)
        print_line(f"{name} begins, restart {self.restarts[name]}: {handle.log}")
        return handle

    def _next_ends(self, active: Mapping[str, Handle]) -> list[str]:
        """Wait until one or more runs have ended, keep how, and return their names."""
        while True:
            states = job_status.states([*active.values()])
            final = {name: state for name, state in zip(active, states, strict=True) if state.is_final}
            for name, state in final.items():
                self._keep_end(name, state)
            if final:
                return [*final]
            if signal.sigtimedwait({signal.SIGUSR2}, LocalHandle.poll_seconds):
                self.asked.add(signal.SIGUSR2)
            for number in self.asked - self.handed_on:
                self.handed_on.add(number)
                _hand_on(number, active)

    def _keep_end(self, name: str, state: State) -> None:
        """Keep how a run has ended; if the job was asked to stop before that, the run is to be resumed."""
        request = self.requests[name]
        well = state.name == "done"
        saved = job_folder.stopped(request.folder)
        comes_back = bool(self.asked) and not well
        self.some_ended_or_saved |= not comes_back or saved is not None
        outcome = Outcome(
            restart=self.restarts[name],
            exit_code=0 if well else progress_table.exit_code_here(_run_folder(request)) or 1,
            why=[] if well else [state.detail],
            failed_rank=next(iter(job_folder.notes(request.folder, "failed")), None),
            saved=saved,
            requeued=comes_back,
            seconds=round(progress_table.seconds_here(request.folder) or 0),
            said=[],
        )
        job_folder.keep_outcome(request.folder, outcome)
        if comes_back:
            print_line(f"{name} has stopped, and resumes when this job comes back")
        else:
            print_line(f"{name} {state.name}: {state.detail}")


def _hand_on(number: int, active: Mapping[str, Handle]) -> None:
    """Send the ranks a signal, unless Slurm has sent it to all processes of the job."""
    if os.environ.get(PROCTRACK) == SIGNALS_ALL:
        return
    for handle in active.values():
        with suppress(psutil.Error):  # it has just ended
            for rank in psutil.Process(int(handle.job_id)).children():
                rank.send_signal(number)


def _threads(request: Request) -> int:
    """Return the threads of each rank: as many as its cores, or as the site or the user wants, if fewer."""
    shape, program = request.resources, request.stage.program
    starts_its_ranks = program is not None and program.one_process_per_node
    cores = shape.cpus_per_task // (shape.gpus if starts_its_ranks else 1)
    # The job script has set it, for all cores of the job if nobody wants another number.
    return min(cores, int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))


def _run_folder(request: Request) -> Path:
    return request.site.results_dir


@entrypoint
def main() -> None:
    # It is true of this process, and not of those that it starts.
    os.environ.pop(launchers.STARTED_BY, None)
    PackRun(Pack.read(Path(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
