"""What a verdict may find: one file for each finding, with its evidence, its rule and its sentence."""

from collections.abc import Callable

from trainkit.monitor.findings.finding import Issue
from trainkit.monitor.findings.full_memory import find_full_gpu_memory, find_full_host_memory
from trainkit.monitor.findings.idle_cpus import find_idle_cpus
from trainkit.monitor.findings.idle_gpus import find_idle_gpus
from trainkit.monitor.findings.launch_bound_gpus import find_launch_bound_gpus
from trainkit.monitor.findings.paused_ranks import find_paused_ranks
from trainkit.monitor.findings.ranks_never_met import find_ranks_that_never_met
from trainkit.monitor.findings.shared_cores import find_shared_cores
from trainkit.monitor.findings.slow_communication import find_slow_communication
from trainkit.monitor.findings.slow_rank import find_slow_rank
from trainkit.monitor.findings.throttled_gpus import find_throttled_gpus
from trainkit.monitor.findings.unused_gpus import find_unused_gpus
from trainkit.monitor.findings.waiting_for_batches import find_waiting_for_batches
from trainkit.monitor.sampled_job import SampledJob

# Each finds an issue of its kind, or None. If two find the same kind, the first says more.
FINDERS: tuple[Callable[[SampledJob], Issue | None], ...] = (
    find_unused_gpus,
    find_throttled_gpus,
    find_full_gpu_memory,
    find_full_host_memory,
    find_idle_gpus,
    find_launch_bound_gpus,
    find_ranks_that_never_met,
    find_paused_ranks,
    find_waiting_for_batches,
    find_slow_communication,
    find_shared_cores,
    find_slow_rank,
    find_idle_cpus,
)
