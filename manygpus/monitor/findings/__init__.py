"""What a verdict may find: one file for each finding, with its evidence, its rule and its sentence."""

from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.findings.full_memory import FullGpuMemory, FullHostMemory
from manygpus.monitor.findings.idle_cpus import IdleCpus
from manygpus.monitor.findings.idle_gpus import IdleGpus
from manygpus.monitor.findings.launch_bound_gpus import LaunchBoundGpus
from manygpus.monitor.findings.paused_ranks import PausedRanks
from manygpus.monitor.findings.ranks_never_met import RanksNeverMet
from manygpus.monitor.findings.shared_cores import SharedCores
from manygpus.monitor.findings.slow_communication import SlowCommunication
from manygpus.monitor.findings.slow_rank import SlowRank
from manygpus.monitor.findings.throttled_gpus import ThrottledGpus
from manygpus.monitor.findings.unused_gpus import UnusedGpus
from manygpus.monitor.findings.waiting_for_batches import WaitingForBatches

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
