"""What a verdict may find: one file for each finding, with its evidence, its rule and its sentence."""

from trainkit.monitor.findings.finding import Finding
from trainkit.monitor.findings.full_memory import FullGpuMemory, FullHostMemory
from trainkit.monitor.findings.idle_cpus import IdleCpus
from trainkit.monitor.findings.idle_gpus import IdleGpus
from trainkit.monitor.findings.launch_bound_gpus import LaunchBoundGpus
from trainkit.monitor.findings.paused_ranks import PausedRanks
from trainkit.monitor.findings.ranks_never_met import RanksNeverMet
from trainkit.monitor.findings.shared_cores import SharedCores
from trainkit.monitor.findings.slow_communication import SlowCommunication
from trainkit.monitor.findings.slow_rank import SlowRank
from trainkit.monitor.findings.throttled_gpus import ThrottledGpus
from trainkit.monitor.findings.unused_gpus import UnusedGpus
from trainkit.monitor.findings.waiting_for_batches import WaitingForBatches

# In the order in which they are looked for: of two with the same kind the first says more.
FINDINGS: tuple[type[Finding], ...] = (
    UnusedGpus,
    ThrottledGpus,
    FullGpuMemory,
    FullHostMemory,
    IdleGpus,
    LaunchBoundGpus,
    RanksNeverMet,
    PausedRanks,
    WaitingForBatches,
    SlowCommunication,
    SharedCores,
    SlowRank,
    IdleCpus,
)
