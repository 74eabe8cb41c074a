"""Ranks whose threads wait for a core."""

from sampled_jobs import MakeJob, finding_of, has_asked, kinds_of
from traces import Gpu


def test_other_programs_on_the_cores(make_job: MakeJob) -> None:
    folder = make_job([Gpu(power_w=120, waiting_share=0.4)] * 2)
    finding = finding_of(folder, "shared_cores")
    assert finding.used_by_others and finding.cores == 8 and not finding.exclusive_helps
    for exclusive_helps in (1, 0):
        has_asked(folder, f"8 2 61440 {exclusive_helps}")
        assert finding_of(folder, "shared_cores").exclusive_helps == exclusive_helps


def test_a_wait_for_a_core_that_costs_nothing(make_job: MakeJob) -> None:
    """It hides behind the work of the GPU, or hardly wants one."""
    assert kinds_of(make_job([Gpu(power_w=300, waiting_share=0.4)] * 2)) == []
    assert kinds_of(make_job([Gpu(power_w=120, waiting_share=0.7, cores=0.03)] * 2)) == ["launch_bound"]
