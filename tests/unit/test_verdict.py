"""What a job wastes, the worst first: recorded and synthetic traces of every kind.

Its kinds and grades; the evidence of each finding is in the test of its module, and the sentences of all are
in test_findings.py.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import traces
from sampled_jobs import MakeJob, change, has_asked, kinds_of, only_finding, without
from traces import FROM_LOADERS, FULL, H100, STARVED, TRACES, UNUSED, Gpu, Throttling, folder_of

from manygpus.monitor import samples
from manygpus.monitor.findings.finding import Grade
from manygpus.monitor.resource_use import MEMORY
from manygpus.monitor.sample_tables import RankId
from manygpus.monitor.verdict import NothingSeen, StartedByScripts, TooShort, judge

# The kind and the grade of what is worst, of all traces, and of jobs on one H100; None: no waste.
WORST: dict[str, tuple[str, Grade] | None] = {
    "cpu_healthy": None,
    "cpu_waiting_for_loader": ("waiting_for_loader", Grade.WASTE),
    "cpu_shared_cores": ("shared_cores", Grade.WASTE),
    "cpu_stalled_rank": ("stalled_rank", Grade.WASTE),
    "cpu_network_bound": ("network_bound", Grade.WASTE),
    "gpu_no_rank": ("no_rank", Grade.WASTE),
    "gpu_idle": ("idle_gpu", Grade.WASTE),
    "gpu_memory_full": ("memory_full", Grade.DANGER),
    "gpu_throttled_by_heat": ("throttled", Grade.WASTE),
    "gpu_throttled_by_cap": ("throttled", Grade.WASTE),
    "gpu_network_bound": ("network_bound", Grade.WASTE),
    "gpu_slow_rank": ("stalled_rank", Grade.WASTE),
}
WORST_ON_AN_H100: dict[str, tuple[str, Grade] | None] = {
    "batch_1024_bf16": ("launch_bound", Grade.FASTER),
    "launch_bound_64_tf32": ("launch_bound", Grade.WASTE),
    "input_bound": ("waiting_for_loader", Grade.WASTE),
    # As busy as can be, with little to do for each kernel.
    "captured_64_tf32": ("launch_bound", Grade.WASTE),
    "captured_1024_bf16": None,
    "healthy_4096_bf16_short": None,
}


@pytest.mark.parametrize("name", WORST)
def test_each_trace_has_its_verdict(name: str) -> None:
    verdict = judge(folder_of(name))
    grades = [(finding.kind, finding.grade) for finding in verdict.findings]
    expected = [WORST[name]] if WORST[name] else []
    if name.startswith("gpu"):
        # Nothing beside what is written into them.
        assert grades == expected
        assert verdict.energy_kwh > 0
    else:
        assert grades[:1] == expected
        assert math.isnan(verdict.energy_kwh)
    assert verdict.not_judged is None


@pytest.mark.parametrize("name", WORST_ON_AN_H100)
def test_the_verdict_on_a_real_gpu(name: str) -> None:
    grades = [(finding.kind, finding.grade) for finding in judge(H100 / name).findings]
    assert grades == ([WORST_ON_AN_H100[name]] if WORST_ON_AN_H100[name] else [])


def test_the_evidence_on_a_real_gpu() -> None:
    finding = only_finding(H100 / "batch_1024_bf16")
    assert finding.gap_share == pytest.approx(0.32, abs=0.01)
    assert finding.load == pytest.approx(0.35, abs=0.01)
    assert finding.step_seconds == pytest.approx(0.00299, abs=0.00002)
    assert finding.has_gaps and not finding.is_captured and not finding.is_data_parallel
    finding = only_finding(H100 / "captured_64_tf32")
    assert finding.is_captured and not finding.has_gaps
    assert (round(finding.power.power_w), round(finding.power.limit_w)) == (227, 700)


def test_every_trace_is_judged_and_told_of() -> None:
    there = {folder.name for folder in [*traces.recorded(), *TRACES.glob("gpu_*")]}
    assert WORST.keys() == traces.SYNTHETIC.keys() | there
    assert {*traces.COMMITTED} == traces.SYNTHETIC.keys() & there
    assert all(f"`{name}`" in (TRACES / "README.md").read_text() for name in there)


def test_a_synthetic_trace_is_the_one_that_the_tool_writes(tmp_path: Path) -> None:
    for name in traces.COMMITTED:
        traces.write(tmp_path / name, traces.SYNTHETIC[name])
        for path in (tmp_path / name).rglob("*.csv"):
            assert path.read_text() == (TRACES / path.relative_to(tmp_path)).read_text()


def test_the_worst_comes_first(make_job: MakeJob) -> None:
    crowded = replace(STARVED, waiting_share=0.4)
    hot = replace(crowded, memory_share=0.99, throttling=Throttling("heat", 0.2), clock_mhz=1_300)
    folder = make_job([hot, crowded, UNUSED], ranks=2, host_memory_share=0.93, facts=FROM_LOADERS)
    findings = judge(folder).findings
    shares = [finding.lost_share for finding in findings]
    assert shares == sorted(shares, reverse=True)
    assert [finding.kind for finding in findings] == [
        "waiting_for_loader",
        "no_rank",
        "shared_cores",
        "throttled",
        "memory_full",
        "host_memory",
    ]


def test_what_could_be_faster_comes_last(make_job: MakeJob) -> None:
    """Also after a danger, which is no loss yet."""
    could_be_faster = Gpu(power_w=175, utilisation=70, memory_share=0.99)
    assert kinds_of(make_job([could_be_faster])) == ["memory_full", "launch_bound"]


def test_nothing_is_said_beside_what_explains_it(make_job: MakeJob) -> None:
    """GPUs at low power, and a rank that waits: what follows from the loader is not repeated."""
    assert kinds_of(make_job([STARVED, FULL], facts=FROM_LOADERS)) == ["waiting_for_loader"]
    assert kinds_of(make_job([STARVED] * 2, facts=FROM_LOADERS)) == ["waiting_for_loader"]
    hardly_waits = replace(STARVED, data_share=0.1)
    assert kinds_of(make_job([hardly_waits] * 2, facts=FROM_LOADERS)) == ["launch_bound"]


def test_a_short_job(make_job: MakeJob) -> None:
    """What holds at any moment is reported; for the rest there is too little."""
    assert isinstance(judge(make_job([STARVED] * 2, epochs=2, train_seconds=4)).not_judged, TooShort)
    folder = make_job([Gpu(memory_share=0.99)], epochs=1, train_seconds=2)
    assert kinds_of(folder) == ["memory_full"]
    first_lines = (folder / "n1.csv").read_text().splitlines()[:4]
    (folder / "n1.csv").write_text("\n".join(first_lines) + "\n")
    verdict = judge(folder)
    assert verdict.not_judged == TooShort(samples=0) and verdict.seconds == 0
    assert (verdict.devices.gpus, verdict.devices.gpu_name) == (1, traces.GPU_NAME)


@pytest.mark.parametrize(("epochs", "train_seconds"), [(1, 15), (2, 7.5), (3, 5), (5, 3), (15, 1)])
def test_a_training_of_fifteen_seconds_has_a_verdict(
    make_job: MakeJob, epochs: int, train_seconds: float
) -> None:
    verdict = judge(make_job([FULL] * 2, epochs=epochs, train_seconds=train_seconds))
    assert verdict.findings == [] and verdict.not_judged is None
    low_power = make_job([Gpu(power_w=100)] * 2, epochs=epochs, train_seconds=train_seconds)
    assert kinds_of(low_power) == ["launch_bound"]


def test_a_job_without_pytorch(make_job: MakeJob) -> None:
    folder = make_job([FULL], record=False)
    change(folder, without(samples.GPU, samples.RANK))
    assert judge(folder).not_judged == NothingSeen()
    folder = make_job([FULL] * 2, record=False)
    change(folder, without(samples.RANK))
    change(folder, lambda row: row | {"ranks": "-"})
    finding = only_finding(folder)
    assert finding.kind == "no_rank" and finding.used_gpus == 0


def test_processes_that_the_script_starts_itself(make_job: MakeJob) -> None:
    """They are counted, and of the rank that waits for them nothing is said."""
    folder = make_job([FULL], record=False)
    waits_for_two = {"cores": "0.01", "others": "2", "other_cores": "1.9", "name": "S"}
    change(folder, without(samples.GPU))
    change(folder, lambda row: row | waits_for_two)
    has_asked(folder, "8 1 61440 1")
    verdict = judge(folder)
    # They may wait for cores.
    assert [resource.option for resource in verdict.too_much] == [MEMORY]
    assert verdict.findings == []
    assert verdict.not_judged == StartedByScripts(processes=2, ranks=[RankId("n1", 0)], share_a_node=False)
    assert verdict.devices.cpu_workers == 2
    # As where the script is the first rank itself.
    change(folder, lambda row: row | {"cores": "0.95"})
    verdict = judge(folder)
    assert verdict.not_judged.processes == 2 and verdict.devices.cpu_workers == 3
    change(folder, lambda row: row | {"others": "0", "other_cores": "0"})
    verdict = judge(folder)
    assert verdict.not_judged is None and verdict.devices.cpu_workers == 1


def test_each_task_of_a_node_may_start_as_many_processes_as_there_are_gpus(make_job: MakeJob) -> None:
    folder = make_job([FULL] * 2, record=False)
    change(folder, without(samples.GPU))
    change(folder, lambda row: row | {"cores": "0.01", "others": "2", "other_cores": "1.9", "name": "S"})
    assert judge(folder).not_judged.share_a_node
