"""What a verdict may find: one file for each finding, with its evidence, its rule and its sentence.

A file is called as the kind of its finding; only paused_ranks.py and slow_rank.py share one, `stalled_rank`.
"""

from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.findings.host_memory import HostMemory
from manygpus.monitor.findings.idle_cpu import IdleCpu
from manygpus.monitor.findings.idle_gpu import IdleGpu
from manygpus.monitor.findings.launch_bound import LaunchBound
from manygpus.monitor.findings.memory_full import MemoryFull
from manygpus.monitor.findings.network_bound import NetworkBound
from manygpus.monitor.findings.never_met import NeverMet
from manygpus.monitor.findings.no_rank import NoRank
from manygpus.monitor.findings.paused_ranks import PausedRanks
from manygpus.monitor.findings.shared_cores import SharedCores
from manygpus.monitor.findings.slow_rank import SlowRank
from manygpus.monitor.findings.throttled import Throttled
from manygpus.monitor.findings.waiting_for_loader import WaitingForLoader

# In the order in which they are looked for: of two with the same kind the first says more.
FINDINGS: tuple[type[Finding], ...] = (
    NoRank,
    Throttled,
    MemoryFull,
    HostMemory,
    IdleGpu,
    LaunchBound,
    NeverMet,
    PausedRanks,
    WaitingForLoader,
    NetworkBound,
    SharedCores,
    SlowRank,
    IdleCpu,
)
