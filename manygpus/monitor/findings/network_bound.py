"""Ranks that wait for the averaging of their gradients."""

import math
from dataclasses import dataclass

from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.findings.words import percent
from manygpus.monitor.sample_tables import mean
from manygpus.monitor.sampled_job import SampledJob

# Of the training time. From 0.5 on two devices are no faster than one.
COMMUNICATION_SHARE = 0.4
# In a shorter epoch, what comes once in an epoch would be taken for communication.
LONG_EPOCH_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class NetworkBound(Finding):
    """Averaging the gradients, as a share of the training time, and what each of several nodes moves."""

    kind = "network_bound"
    makes_ranks_wait = True
    communication_share: float
    network_mb_s: float

    @classmethod
    def find(cls, job: SampledJob) -> "NetworkBound | None":
        """Find that the ranks wait for communication, by the times that each has measured itself."""
        communication_share = 1 - job.own_shares.max()
        if (
            not communication_share >= COMMUNICATION_SHARE
            or not job.epochs.train_seconds.mean() >= LONG_EPOCH_SECONDS
        ):
            return None
        network_mb_s = math.nan
        if len(job.last_nodes) > 1:
            network_mb_s = mean(job.judged.nodes.values(), "network_mb_s")
        return cls(
            communication_share=communication_share,
            network_mb_s=network_mb_s,
            locations=job.last_nodes,
            lost_share=communication_share,
        )

    def sentence(self, is_plain: bool) -> str:
        remedy = "use a larger batch per device, or accumulate several micro-batches (03_multigpu_ddp/beyond)"
        if self.network_mb_s >= 0:
            remedy += (
                f"; each node sends and receives {self.network_mb_s:.0f} MB/s: check with `manygpus "
                "doctor --job` whether its network can do more"
            )
        share = percent(self.communication_share)
        return f"averaging the gradients takes {share} of the training time: {remedy}."
