"""GPUs that no rank uses."""

from sampled_jobs import MakeJob, only_finding
from traces import FULL, UNUSED

from manygpus.monitor.sample_tables import GpuId


def test_a_gpu_is_unused_without_a_rank(make_job: MakeJob) -> None:
    finding = only_finding(make_job([FULL, UNUSED], ranks=1, nodes=2))
    assert finding.locations == [GpuId("n1", 1), GpuId("n2", 1)]
    assert (finding.gpus, finding.used_gpus) == (2, 2)
    finding = only_finding(make_job([FULL, *[UNUSED] * 5], ranks=1, nodes=3))
    assert (finding.gpus, finding.used_gpus) == (15, 3)
