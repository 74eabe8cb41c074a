"""The kinds of findings that make ranks wait."""

from trainkit.monitor.findings.paused_ranks import PausedRanks
from trainkit.monitor.findings.shared_cores import SharedCores
from trainkit.monitor.findings.slow_communication import SlowCommunication
from trainkit.monitor.findings.slow_rank import SlowRank
from trainkit.monitor.findings.throttled_gpus import ThrottledGpus
from trainkit.monitor.findings.waiting_for_batches import WaitingForBatches

# What makes ranks wait leaves their GPUs and cores without work, too, and is the better explanation.
WHAT_MAKES_RANKS_WAIT = frozenset(
    {
        WaitingForBatches.kind,
        PausedRanks.kind,
        SlowRank.kind,
        SlowCommunication.kind,
        SharedCores.kind,
        ThrottledGpus.kind,
    }
)
