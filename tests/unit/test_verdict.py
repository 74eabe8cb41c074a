"""What a job wastes: recorded and synthetic traces of every kind, and what may be odd about samples.

The kinds of what is found and their evidence; the words are those of test_wording.py.
"""

import csv
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import traces
from traces import (
    FROM_LOADERS,
    FULL,
    H100,
    STARVED,
    TRACES,
    UNUSED,
    Gpu,
    SyntheticJob,
    Throttling,
    folder_of,
)

from trainkit.errors import UserError
from trainkit.monitor import device_rules, rank_rules, sample_tables, verdict_file, wording
from trainkit.monitor.issues import Evidence, Grade, Issue, PauseCause, ThrottlingCause
from trainkit.monitor.requests import CORES, MEMORY
from trainkit.monitor.sample_tables import GpuId, RankId
from trainkit.monitor.sampled_job import SampledJob
from trainkit.monitor.verdict import NothingSeen, StartedByScripts, TooShort, Verdict, judge
from trainkit.record import records, samples

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
# A third of its power, and of its time without a kernel.
HALF_BUSY = Gpu(power_w=175, utilisation=70)
Row = dict[str, str]
Change = Callable[[Row], Row | None]
MakeJob = Callable[..., Path]


def kinds(folder: Path) -> list[str]:
    return [issue.kind for issue in judge(folder).findings]


def only_issue(folder: Path) -> Issue:
    (issue,) = judge(folder).findings
    return issue


def evidence_of(folder: Path, kind: str) -> Evidence:
    (evidence,) = (issue.evidence for issue in judge(folder).findings if issue.kind == kind)
    return evidence


def change(folder: Path, change_row: Change) -> None:
    """Write every sample again as `change_row` returns it, or leave it out where that is None."""
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            rows = [change_row(row) for row in csv.DictReader(file)]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, samples.COLUMNS)
            writer.writeheader()
            writer.writerows(row for row in rows if row)


def with_cells(cells: Row, what: str) -> Change:
    """Return a change that puts these cells into the rows of one kind."""
    return lambda row: row | cells if row["what"] == what else row


def without(*kinds_of_rows: str) -> Change:
    return lambda row: None if row["what"] in kinds_of_rows else row


def before(seconds: float) -> Change:
    """Return a change that keeps the first seconds of a job."""
    return lambda row: row if float(row["time"]) < traces.BEGAN_AT_SECONDS + seconds else None


def has_asked(folder: Path, asked: str, ended: str = "0") -> None:
    """Write what a job script would have written: what it asked for, and its exit code."""
    (folder / samples.ASKED).write_text(asked)
    (folder / samples.ENDED).write_text(ended)


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """Return a function that makes a job of these GPUs; `record=False`: of a training that left none."""

    def make(gpus: list[Gpu], record: bool = True, **fields: object) -> Path:
        folder = tmp_path / "monitor"
        traces.write(folder, SyntheticJob(gpus, **fields))
        if not record:
            shutil.rmtree(folder / "training")
        return folder

    return make


# --- the traces -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORST)
def test_each_trace_has_its_verdict(name: str) -> None:
    verdict = judge(folder_of(name))
    found = [(issue.kind, issue.grade) for issue in verdict.findings]
    expected = [WORST[name]] if WORST[name] else []
    if name.startswith("gpu"):
        # Nothing beside what is written into them.
        assert found == expected
        assert verdict.energy_kwh > 0
    else:
        assert found[:1] == expected
        assert math.isnan(verdict.energy_kwh)
    assert verdict.not_judged is None


@pytest.mark.parametrize("name", WORST_ON_AN_H100)
def test_the_verdict_on_a_real_gpu(name: str) -> None:
    found = [(issue.kind, issue.grade) for issue in judge(H100 / name).findings]
    assert found == ([WORST_ON_AN_H100[name]] if WORST_ON_AN_H100[name] else [])


def test_the_evidence_on_a_real_gpu() -> None:
    evidence = only_issue(H100 / "batch_1024_bf16").evidence
    assert evidence.gap_share == pytest.approx(0.32, abs=0.01)
    assert evidence.load == pytest.approx(0.35, abs=0.01)
    assert evidence.step_seconds == pytest.approx(0.00299, abs=0.00002)
    assert evidence.has_gaps and not evidence.is_captured and not evidence.is_data_parallel
    evidence = only_issue(H100 / "captured_64_tf32").evidence
    assert evidence.is_captured and not evidence.has_gaps
    assert (round(evidence.power.power_w), round(evidence.power.limit_w)) == (227, 700)


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


def test_every_rule_is_applied() -> None:
    for module in (rank_rules, device_rules):
        rules = {function for name, function in vars(module).items() if name.startswith("find_")}
        assert rules == {*module.RULES}


# --- GPUs -------------------------------------------------------------------------------------------


def test_utilisation_alone_decides_nothing(make_job: MakeJob) -> None:
    """Half of the time without a kernel, at a power that says it is busy; and then the other way round."""
    assert kinds(make_job([Gpu(utilisation=50)] * 2)) == []
    assert kinds(make_job([Gpu(utilisation=50, power_w=100)] * 2)) == ["launch_bound"]
    assert kinds(make_job([Gpu(utilisation=100, power_w=100)] * 2)) == ["launch_bound"]


def test_without_the_power_of_the_gpus_nothing_is_said_of_their_load(make_job: MakeJob) -> None:
    folder = make_job([Gpu(utilisation=3, power_w=60)])
    assert not judge(folder).is_gpu_power_unknown
    change(folder, lambda row: row | {"power_w": ""})
    verdict = judge(folder)
    assert verdict.findings == [] and verdict.is_gpu_power_unknown


def test_without_the_utilisation_the_power_is_enough(make_job: MakeJob) -> None:
    folder = make_job([Gpu(utilisation=100, power_w=100)])
    change(folder, lambda row: row | {"utilisation": ""})
    power = evidence_of(folder, "launch_bound").power
    assert power.power_w == pytest.approx(100, abs=3) and math.isnan(power.utilisation_percent)


def test_what_could_be_faster_is_told_apart_from_waste(make_job: MakeJob) -> None:
    issue = only_issue(make_job([HALF_BUSY] * 2))
    assert (issue.kind, issue.grade) == ("launch_bound", Grade.FASTER)
    assert issue.evidence.gap_share == pytest.approx(0.3, abs=0.01)
    assert issue.lost_share == pytest.approx(0.3, abs=0.01)
    waste_first = judge(make_job([replace(HALF_BUSY, utilisation=30), UNUSED, UNUSED], ranks=1)).findings
    assert [issue.grade for issue in waste_first] == [Grade.WASTE, Grade.FASTER]


def test_the_remedy_against_gaps_fits_the_training(make_job: MakeJob) -> None:
    """DataParallel's step cannot be captured, and one that is captured already needs no graph."""
    assert evidence_of(make_job([HALF_BUSY], record=False), "launch_bound").may_lack_batches
    for stage, is_data_parallel, is_captured in (
        ("ddp", False, False),
        ("ddp-captured", False, True),
        ("dp", True, False),
    ):
        evidence = evidence_of(make_job([HALF_BUSY] * 2, facts={"stage": stage}), "launch_bound")
        assert (evidence.is_data_parallel, evidence.is_captured) == (is_data_parallel, is_captured)
        assert not evidence.may_lack_batches


def test_what_is_as_fast_as_it_can_be(make_job: MakeJob) -> None:
    """Kernels all the time, or power; gaps that are for want of batches, or of an evaluation in between."""
    assert kinds(make_job([replace(HALF_BUSY, utilisation=97)] * 2)) == []
    assert kinds(make_job([replace(HALF_BUSY, power_w=290)] * 2)) == []
    assert kinds(make_job([replace(HALF_BUSY, data_share=0.15)] * 2, facts=FROM_LOADERS)) == []
    # Nobody knows.
    assert kinds(make_job([replace(HALF_BUSY, data_share=math.nan)] * 2, facts=FROM_LOADERS)) == []
    assert kinds(make_job([HALF_BUSY] * 2, epochs=8, train_seconds=2)) == []


def test_why_a_clock_is_low(make_job: MakeJob) -> None:
    other = Gpu(power_w=148, clock_mhz=690, throttling=Throttling("other", 1))
    evidence = evidence_of(make_job([other] * 2), "throttled")
    assert evidence.cause is ThrottlingCause.OTHER
    assert (evidence.clock_mhz, evidence.clock_limit_mhz) == (690, traces.CLOCK_MHZ)
    capped = Gpu(clock_mhz=690, throttling=Throttling("power+other", 1))
    assert evidence_of(make_job([capped]), "throttled").cause is ThrottlingCause.POWER
    hot = Gpu(clock_mhz=690, throttling=Throttling("heat", 1), celsius=math.nan)
    evidence = evidence_of(make_job([hot]), "throttled")
    assert evidence.cause is ThrottlingCause.HEAT and math.isnan(evidence.temperature_c)


def test_a_gpu_at_its_power_limit_is_not_throttled(make_job: MakeJob) -> None:
    """It has a lower clock, and full power."""
    at_limit = Gpu(power_w=399, clock_mhz=1_050, throttling=Throttling("power", 1))
    assert kinds(make_job([at_limit] * 2)) == []


def test_a_gpu_is_unused_without_a_rank(make_job: MakeJob) -> None:
    issue = only_issue(make_job([FULL, UNUSED], ranks=1, nodes=2))
    assert issue.locations == [GpuId("n1", 1), GpuId("n2", 1)]
    assert (issue.evidence.gpus, issue.evidence.used_gpus) == (2, 2)
    issue = only_issue(make_job([FULL, *[UNUSED] * 5], ranks=1, nodes=3))
    assert (issue.evidence.gpus, issue.evidence.used_gpus) == (15, 3)


# --- the order of issues ----------------------------------------------------------------------------


def test_the_worst_comes_first(make_job: MakeJob) -> None:
    crowded = replace(STARVED, waiting_share=0.4)
    hot = replace(crowded, memory_share=0.99, throttling=Throttling("heat", 0.2), clock_mhz=1_300)
    folder = make_job([hot, crowded, UNUSED], ranks=2, host_memory_share=0.93, facts=FROM_LOADERS)
    findings = judge(folder).findings
    shares = [issue.lost_share for issue in findings]
    assert shares == sorted(shares, reverse=True)
    assert [issue.kind for issue in findings] == [
        "waiting_for_loader",
        "no_rank",
        "shared_cores",
        "throttled",
        "memory_full",
        "host_memory",
    ]


def test_nothing_is_said_beside_what_explains_it(make_job: MakeJob) -> None:
    """GPUs at low power, and a rank that waits: what follows from the loader is not repeated."""
    assert kinds(make_job([STARVED, FULL], facts=FROM_LOADERS)) == ["waiting_for_loader"]
    assert kinds(make_job([STARVED] * 2, facts=FROM_LOADERS)) == ["waiting_for_loader"]
    hardly_waits = replace(STARVED, data_share=0.1)
    assert kinds(make_job([hardly_waits] * 2, facts=FROM_LOADERS)) == ["launch_bound"]


# --- batches ----------------------------------------------------------------------------------------


def test_a_resident_loader_works_itself(make_job: MakeJob) -> None:
    resident = replace(STARVED, loaders=0, loader_cores=0, data_share=0.3)
    assert kinds(make_job([resident])) == ["launch_bound"]
    evidence = evidence_of(make_job([replace(resident, data_share=0.5)]), "waiting_for_loader")
    assert evidence.is_resident


@pytest.mark.parametrize(
    ("loaders", "loader_cores", "cores_per_worker", "all_cores_in_use"),
    [(0, 0, math.nan, False), (2, 1.98, 0.99, False), (2, 3.6, 1.8, True), (2, 0.5, 0.25, False)],
)
def test_the_evidence_on_a_waiting_loader(
    make_job: MakeJob, loaders: int, loader_cores: float, cores_per_worker: float, all_cores_in_use: bool
) -> None:
    gpu = replace(STARVED, loaders=loaders, loader_cores=loader_cores)
    facts = FROM_LOADERS | {"workers_per_loader": loaders}
    evidence = evidence_of(make_job([gpu] * 2, facts=facts), "waiting_for_loader")
    assert evidence.loader_workers == loaders and not evidence.is_resident
    assert evidence.cores_per_worker == pytest.approx(cores_per_worker, nan_ok=True)
    assert evidence.all_cores_in_use == all_cores_in_use


def test_a_training_without_a_record(make_job: MakeJob) -> None:
    """What shows from outside."""
    assert kinds(make_job([FULL] * 2, record=False)) == []
    assert kinds(make_job([STARVED] * 2, record=False)) == ["waiting_for_loader"]
    short_kernels = Gpu(power_w=110, utilisation=95)
    assert kinds(make_job([short_kernels] * 2, record=False)) == ["launch_bound"]


@pytest.mark.parametrize(
    ("loader_cores", "kind"),
    [("1.98", "waiting_for_loader"), ("0.6", "waiting_for_loader"), ("0", "stalled_rank")],
)
def test_a_loader_that_starves_its_rank_is_one_issue(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, loader_cores: str, kind: str
) -> None:
    """Also where its workers get a part of a core each; where they rest, too, it just does nothing."""
    monkeypatch.setattr(rank_rules, "PAUSE_SECONDS", 10)
    folder = make_job([FULL], record=False)
    change(folder, without(samples.GPU))
    starved = {"name": "S", "cores": "0.01", "loaders": "2", "loader_cores": loader_cores}
    change(folder, lambda row: row | starved)
    assert kinds(folder) == [kind]


def test_a_record_without_samples_of_its_ranks(make_job: MakeJob) -> None:
    folder = make_job([STARVED] * 2, facts=FROM_LOADERS)
    change(folder, without(samples.RANK))
    assert kinds(folder) == ["waiting_for_loader"]


# --- ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "numbers", "cause"),
    [
        ({"name": "T"}, "1", PauseCause.STOPPED),
        ({"name": "D", "cores": "0"}, "1", PauseCause.FILE_SYSTEM),
        ({"name": "S", "cores": "0.01"}, "1", PauseCause.UNKNOWN),
        ({"name": "S", "cores": "0"}, "01", PauseCause.UNKNOWN),
    ],
)
def test_a_rank_that_does_nothing(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, cells: Row, numbers: str, cause: PauseCause
) -> None:
    """While the GPU of the other one is full of kernels that wait for it; or no rank does anything."""
    monkeypatch.setattr(rank_rules, "PAUSE_SECONDS", 15)
    folder = make_job([Gpu(power_w=110, utilisation=100), FULL], record=False)

    def stall(row: Row) -> Row:
        if float(row["time"]) < traces.BEGAN_AT_SECONDS + 25 or row["what"] == samples.NODE:
            return row
        if row["number"] not in numbers:
            return row
        if row["what"] == samples.GPU:
            return row | {"power_w": "70", "utilisation": "0"}
        return row | cells

    change(folder, stall)
    issue = judge(folder).findings[0]
    assert issue.kind == "stalled_rank" and issue.evidence.cause is cause
    assert 20 <= issue.evidence.seconds < 30
    assert issue.locations == [RankId("n1", int(number)) for number in numbers]


def test_processes_that_the_script_starts_itself(make_job: MakeJob) -> None:
    """They are counted, and of the rank that waits for them nothing is said."""
    folder = make_job([FULL], record=False)
    waits_for_two = {"cores": "0.01", "others": "2", "other_cores": "1.9", "name": "S"}
    change(folder, without(samples.GPU))
    change(folder, lambda row: row | waits_for_two)
    has_asked(folder, "8 1 61440")
    verdict = judge(folder)
    # They may wait for cores.
    assert [request.option for request in verdict.too_much] == [MEMORY]
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


@pytest.mark.parametrize(
    ("met", "nodes", "ended", "train_seconds", "never_met"),
    [
        ("-", 1, "0", 12, True),
        ("host", 1, "0", 12, True),
        ("-", 2, "0", 12, True),
        # Another host may be that of a rank.
        ("host", 2, "0", 12, False),
        ("rank", 1, "0", 12, False),
        ("", 1, "0", 12, False),
        ("-", 1, "137", 12, False),
        # Its time limit, after minutes of work.
        ("-", 1, "143", 150, True),
    ],
)
def test_ranks_that_never_met(
    make_job: MakeJob, met: str, nodes: int, ended: str, train_seconds: float, never_met: bool
) -> None:
    """Found where it can be told."""
    gpus = [FULL] if nodes > 1 else [FULL, FULL]
    folder = make_job(gpus, record=False, nodes=nodes, train_seconds=train_seconds)
    change(folder, with_cells({"met": met}, samples.RANK))
    (folder / samples.ENDED).write_text(ended)
    assert kinds(folder) == (["never_met"] if never_met else [])


def test_ranks_never_met_only_after_some_samples(make_job: MakeJob) -> None:
    folder = make_job([FULL] * 2, record=False)
    change(folder, lambda row: row | {"met": "-"})
    (folder / samples.ENDED).write_text("0\n")
    assert kinds(folder) == ["never_met"]
    change(folder, before(9))
    assert kinds(folder) == []


def test_that_ranks_never_met_comes_before_anything_else(make_job: MakeJob) -> None:
    folder = make_job([FULL, UNUSED], ranks=2, record=False)
    change(folder, lambda row: row | {"met": "-"})
    (folder / samples.ENDED).write_text("0\n")
    assert kinds(folder)[0] == "never_met" and len(kinds(folder)) > 1
    # One is alone.
    folder = make_job([FULL], record=False)
    change(folder, lambda row: row | {"met": "-"})
    (folder / samples.ENDED).write_text("0\n")
    assert kinds(folder) == []


def test_other_programs_on_the_cores(make_job: MakeJob) -> None:
    folder = make_job([Gpu(power_w=120, waiting_share=0.4)] * 2)
    evidence = evidence_of(folder, "shared_cores")
    assert evidence.used_by_others and evidence.cores == 8 and not evidence.by_job_script
    (folder / samples.ASKED).touch()
    assert evidence_of(folder, "shared_cores").by_job_script


def test_a_wait_for_a_core_that_costs_nothing(make_job: MakeJob) -> None:
    """It hides behind the work of the GPU, or hardly wants one."""
    assert kinds(make_job([Gpu(power_w=300, waiting_share=0.4)] * 2)) == []
    assert kinds(make_job([Gpu(power_w=120, waiting_share=0.7, cores=0.03)] * 2)) == ["launch_bound"]


def test_ranks_on_cpus_that_hardly_compute(make_job: MakeJob) -> None:
    """For no reason that shows."""
    folder = make_job([FULL] * 2, record=False)
    change(folder, without(samples.GPU))
    change(folder, lambda row: row | {"cores": "0.08"})
    issue = only_issue(folder)
    assert issue.kind == "idle_cpu" and issue.evidence.computing_share == pytest.approx(0.08)
    change(folder, lambda row: row | {"cores": "0.5"})
    assert kinds(folder) == []


# --- what can be judged -----------------------------------------------------------------------------


def test_a_short_job(make_job: MakeJob) -> None:
    """What holds at any moment is reported; for the rest there is too little."""
    assert isinstance(judge(make_job([STARVED] * 2, epochs=2, train_seconds=4)).not_judged, TooShort)
    folder = make_job([Gpu(memory_share=0.99)], epochs=1, train_seconds=2)
    assert kinds(folder) == ["memory_full"]
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
    assert kinds(low_power) == ["launch_bound"]


def test_a_job_without_pytorch(make_job: MakeJob) -> None:
    folder = make_job([FULL], record=False)
    change(folder, without(samples.GPU, samples.RANK))
    assert judge(folder).not_judged == NothingSeen()
    folder = make_job([FULL] * 2, record=False)
    change(folder, without(samples.RANK))
    change(folder, lambda row: row | {"ranks": "-"})
    issue = only_issue(folder)
    assert issue.kind == "no_rank" and issue.evidence.used_gpus == 0


def test_a_damaged_file_of_a_node_takes_nothing_from_the_others(
    make_job: MakeJob, capsys: pytest.CaptureFixture
) -> None:
    folder = make_job([FULL, UNUSED], ranks=1, nodes=2)
    (folder / "n2.csv").write_text("time,what,num")
    assert only_issue(folder).locations == [GpuId("n1", 1)]
    assert f"warning: {folder / 'n2.csv'} is left out" in capsys.readouterr().err
    (folder / "n1.csv").write_text("time,what,num")
    with pytest.raises(UserError):
        judge(folder)


def test_a_line_that_is_half_written_is_left_out(make_job: MakeJob) -> None:
    folder = make_job([FULL] * 2)
    number_of_rows = len(samples.read(folder))
    with (folder / "n1.csv").open("a") as file:
        file.write(f"{traces.BEGAN_AT_SECONDS + 99},node,,,10")
    assert len(samples.read(folder)) == number_of_rows


def test_a_day_is_judged_by_some_of_its_moments(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_job([STARVED, STARVED, UNUSED], ranks=2, epochs=20, facts=FROM_LOADERS)
    whole = judge(folder)
    monkeypatch.setattr(sample_tables, "MOST_ROWS", 300)
    thinned = judge(folder)
    assert [issue.kind for issue in thinned.findings] == [issue.kind for issue in whole.findings]
    assert thinned.seconds == pytest.approx(whole.seconds, rel=0.03)
    assert thinned.energy_kwh == pytest.approx(whole.energy_kwh, rel=0.03)
    assert len(SampledJob.read(folder).sampled.nodes["n1"]) < 70


def test_a_job_that_was_requeued_to_another_node(make_job: MakeJob) -> None:
    """It had one node at a time, and is judged where it was trained past the warm-up."""

    def moved(*gpus: Gpu, after_seconds: float = 17, **fields: object) -> Verdict:
        folder = make_job(list(gpus), **fields)
        moved_at = traces.BEGAN_AT_SECONDS + after_seconds
        lines = (folder / "n1.csv").read_text().splitlines(keepends=True)
        header, rows = lines[0], lines[1:]
        first = [row for row in rows if float(row.split(",")[0]) < moved_at - 1]
        second = [row for row in rows if float(row.split(",")[0]) > moved_at + 1]
        (folder / "n1.csv").write_text("".join([header, *first]))
        (folder / "n2.csv").write_text("".join([header, *second]))
        return judge(folder)

    verdict = moved(STARVED, facts=FROM_LOADERS)
    assert verdict.findings[0].locations == [RankId("n2", 0)]
    assert (verdict.devices.gpus, verdict.devices.nodes) == (1, 1)
    # Both nodes are judged.
    verdict = moved(STARVED, after_seconds=30, facts=FROM_LOADERS)
    assert verdict.findings[0].locations == [RankId("n2", 0)]
    # The last one only evaluated.
    verdict = moved(STARVED, after_seconds=45, facts=FROM_LOADERS)
    assert verdict.findings[0].locations == [RankId("n1", 0)]
    (issue,) = moved(traces.SPREAD_OUT, traces.SPREAD_OUT, network_mb_s=231).findings
    assert (issue.kind, issue.locations) == ("network_bound", ["n2"])
    assert math.isnan(issue.evidence.network_mb_s)


def test_a_start_that_was_stopped_after_its_warm_up_is_not_judged(make_job: MakeJob) -> None:
    """Each start has its own record, and this one did not wait for batches."""
    folder = make_job([STARVED], facts=FROM_LOADERS)
    alone = judge(folder)
    (run,) = samples.runs(folder)
    warmup = records.read(run)[0]
    rank_rows = [row | {"data_seconds": 0.0} for row in records.read_ranks(run) if row["epoch"] == 1]
    stopped = run.with_name("stopped.csv")
    records.put_table(stopped, records.COLUMNS, [warmup])
    records.put_table(records.beside(stopped), records.RANK_COLUMNS, rank_rows, delimiter="\t")
    verdict = judge(folder)
    assert verdict.records == [run, stopped]
    assert verdict.findings == alone.findings


# --- energy, and the next request -------------------------------------------------------------------


def test_the_energy_is_summed_up_while_there_are_samples(make_job: MakeJob) -> None:
    """Not over the gap of a requeued job, nor past a counter that was reset."""
    folder = make_job([FULL] * 2)
    whole = judge(folder)
    joules_of_a_gpu = 36 * 290 + 4 * 150 + 6 * 58
    assert whole.energy_kwh == pytest.approx(2 * joules_of_a_gpu / 3.6e6, rel=0.03)

    def requeue(row: Row) -> Row:
        if float(row["time"]) < traces.BEGAN_AT_SECONDS + 20:
            return row
        energy_j = str(float(row["energy_j"]) - 7e6) if row["energy_j"] else ""
        return row | {"time": str(float(row["time"]) + 500), "energy_j": energy_j}

    change(folder, requeue)
    requeued = judge(folder)
    assert requeued.seconds == whole.seconds - 1
    assert requeued.energy_kwh == pytest.approx(whole.energy_kwh, rel=0.03)


def test_energy_without_a_counter_is_from_the_power(make_job: MakeJob) -> None:
    folder = make_job([FULL] * 2)
    counted = judge(folder)
    change(folder, lambda row: row | {"energy_j": ""})
    assert judge(folder).energy_kwh == pytest.approx(counted.energy_kwh, rel=0.02)
    change(folder, lambda row: row | {"power_w": "" if row["number"] == "1" else row["power_w"]})
    assert math.isnan(judge(folder).energy_kwh)


LOADING = Gpu(loaders=2, loader_cores=1.98)


@pytest.mark.parametrize(
    ("gpu", "asked", "enough"),
    [
        (LOADING, "8 2 61440", {MEMORY: 10, CORES: 4}),
        # With torchrun, one task has all ranks of its node.
        (LOADING, "8 1 61440", {MEMORY: 10}),
        (LOADING, "4 2 61440", {MEMORY: 10}),
        # Where batches are late, a remedy takes cores.
        (STARVED, "8 2 61440", {MEMORY: 10}),
        # No --mem was given.
        (LOADING, "8 2 0", {CORES: 4}),
        (LOADING, "", {}),
    ],
)
def test_the_next_request_is_the_peak_and_a_margin(
    make_job: MakeJob, gpu: Gpu, asked: str, enough: dict[str, int]
) -> None:
    """Only what saves something, of a job script that asked for it."""
    folder = make_job([gpu] * 2, host_memory_share=0.13, facts=FROM_LOADERS)
    has_asked(folder, asked)
    requests = judge(folder).too_much
    assert {request.option: request.enough for request in requests} == enough
    used = {MEMORY: 7.7, CORES: 2.98}
    assert all(request.used == pytest.approx(used[request.option], abs=0.05) for request in requests)


@pytest.mark.parametrize("ended", ["137", "1", ""])
def test_what_is_enough_is_unknown_of_a_job_that_did_not_end_well(make_job: MakeJob, ended: str) -> None:
    """It may have been killed for want of memory; or it still runs."""
    folder = make_job([LOADING] * 2)
    has_asked(folder, "8 2 61440", ended=ended)
    assert judge(folder).too_much == []


def test_what_is_enough_is_unknown_of_a_job_too_short(make_job: MakeJob) -> None:
    folder = make_job([LOADING] * 2, epochs=1, train_seconds=1, record=False)
    has_asked(folder, "8 2 61440")
    assert judge(folder).too_much == []


def test_a_resume_and_shared_files_need_memory(make_job: MakeJob) -> None:
    folder = make_job([LOADING] * 2, host_memory_share=0.13)
    has_asked(folder, "4 2 61440")
    change(folder, with_cells({"checkpoint_mb": "2000"}, samples.NODE))
    (request,) = judge(folder).too_much
    assert request.enough == 14 and request.resume == pytest.approx(3.7, abs=0.05)
    change(folder, with_cells({"checkpoint_mb": "", "shared_files_mb": "3000"}, samples.NODE))
    (request,) = judge(folder).too_much
    assert request.enough == 13 and request.used == pytest.approx(10.5, abs=0.05)


# --- what is kept -----------------------------------------------------------------------------------


def test_the_verdict_is_kept_as_json(make_job: MakeJob) -> None:
    folder = make_job([STARVED, STARVED, UNUSED], ranks=2, facts=FROM_LOADERS)
    verdict = judge(folder)
    verdict_file.keep(folder, verdict)
    kept = json.loads((folder / verdict_file.NAME).read_text())
    assert kept["schema_version"] == verdict_file.SCHEMA_VERSION
    assert kept["devices"] == f"3 x {traces.GPU_NAME}"
    assert kept["energy_kwh"] == verdict.energy_kwh
    waiting, unused = kept["findings"]
    assert (waiting["kind"], waiting["grade"]) == ("waiting_for_loader", "waste")
    assert waiting["evidence"]["loader_workers"] == 2 and waiting["evidence"]["is_resident"] is False
    assert unused["evidence"] == {"gpus": 1, "used_gpus": 2}
    assert waiting["sentence"] == wording.sentences(verdict)[0]
    (run,) = samples.runs(folder)
    assert json.loads(records.verdict_file(run).read_text()) == kept


@pytest.mark.parametrize("name", WORST)
def test_every_evidence_can_be_kept(name: str) -> None:
    """As JSON, in which there is no NaN."""
    verdict = judge(folder_of(name))
    text = json.dumps(verdict_file.as_json(verdict), allow_nan=False)
    assert [issue["kind"] for issue in json.loads(text)["findings"]] == [
        issue.kind for issue in verdict.findings
    ]


def test_records_that_are_not_there_or_no_records(make_job: MakeJob, tmp_path: Path) -> None:
    folder = make_job([FULL] * 2)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "a folder").mkdir()
    paths = [tmp_path / "gone.csv", tmp_path / "other.csv", tmp_path / "a folder"]
    (folder / samples.RUNS).write_text("\n".join(map(str, paths)))
    verdict = judge(folder)
    assert verdict.findings == [] and len(verdict.notes) == 3
    verdict_file.keep(folder, verdict)
    assert not list(tmp_path.glob("*.monitor.json"))
