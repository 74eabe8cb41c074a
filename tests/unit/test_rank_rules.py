"""What makes ranks wait: the evidence of the rules on how they spend their time."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import traces
from sampled_jobs import (
    MakeJob,
    Row,
    change,
    finding_of,
    first_seconds,
    has_asked,
    kinds_of,
    only_finding,
    with_cells,
    without,
    write_job,
)
from traces import (
    FROM_LOADERS,
    FULL,
    STARVED,
    UNUSED,
    Gpu,
)

from trainkit.monitor import samples
from trainkit.monitor.findings import paused_ranks
from trainkit.monitor.findings.paused_ranks import PauseCause
from trainkit.monitor.resource_use import MEMORY
from trainkit.monitor.sample_tables import RankId
from trainkit.monitor.verdict import StartedByScripts, judge


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    return partial(write_job, tmp_path / "monitor")


def test_a_resident_loader_works_itself(make_job: MakeJob) -> None:
    resident = replace(STARVED, loaders=0, loader_cores=0, data_share=0.3)
    assert kinds_of(make_job([resident])) == ["launch_bound"]
    finding = finding_of(make_job([replace(resident, data_share=0.5)]), "waiting_for_loader")
    assert finding.is_resident


@pytest.mark.parametrize(
    ("loaders", "loader_cores", "cores_per_worker", "all_cores_in_use"),
    [(0, 0, math.nan, False), (2, 1.98, 0.99, False), (2, 3.6, 1.8, True), (2, 0.5, 0.25, False)],
)
def test_the_evidence_on_a_waiting_loader(
    make_job: MakeJob, loaders: int, loader_cores: float, cores_per_worker: float, all_cores_in_use: bool
) -> None:
    gpu = replace(STARVED, loaders=loaders, loader_cores=loader_cores)
    facts = FROM_LOADERS | {"workers_per_loader": loaders}
    finding = finding_of(make_job([gpu] * 2, facts=facts), "waiting_for_loader")
    assert finding.loader_workers == loaders and not finding.is_resident
    assert finding.cores_per_worker == pytest.approx(cores_per_worker, nan_ok=True)
    assert finding.all_cores_in_use == all_cores_in_use


def test_a_training_without_a_record(make_job: MakeJob) -> None:
    """What shows from outside."""
    assert kinds_of(make_job([FULL] * 2, record=False)) == []
    assert kinds_of(make_job([STARVED] * 2, record=False)) == ["waiting_for_loader"]
    short_kernels = Gpu(power_w=110, utilisation=95)
    assert kinds_of(make_job([short_kernels] * 2, record=False)) == ["launch_bound"]


@pytest.mark.parametrize(
    ("loader_cores", "kind"),
    [("1.98", "waiting_for_loader"), ("0.6", "waiting_for_loader"), ("0", "stalled_rank")],
)
def test_a_loader_that_starves_its_rank_is_one_finding(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, loader_cores: str, kind: str
) -> None:
    """Also where its workers get a part of a core each; where they rest, too, it just does nothing."""
    monkeypatch.setattr(paused_ranks, "PAUSE_SECONDS", 10)
    folder = make_job([FULL], record=False)
    change(folder, without(samples.GPU))
    starved = {"name": "S", "cores": "0.01", "loaders": "2", "loader_cores": loader_cores}
    change(folder, lambda row: row | starved)
    assert kinds_of(folder) == [kind]


def test_a_record_without_samples_of_its_ranks(make_job: MakeJob) -> None:
    folder = make_job([STARVED] * 2, facts=FROM_LOADERS)
    change(folder, without(samples.RANK))
    assert kinds_of(folder) == ["waiting_for_loader"]


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
    """While the GPU of the other one is full of kernels that wait for it; or no rank does anything.

    First it goes on after a while, and then it does nothing until the end, as in a job that hangs.
    """
    monkeypatch.setattr(paused_ranks, "PAUSE_SECONDS", 12)
    folder = make_job([Gpu(power_w=110, utilisation=100), FULL], record=False)

    def stall(row: Row, last_second: float) -> Row:
        is_over = not 25 <= float(row["time"]) - traces.BEGAN_AT_SECONDS <= last_second
        if is_over or row["what"] == samples.NODE:
            return row
        if row["number"] not in numbers:
            return row
        if row["what"] == samples.GPU:
            return row | {"power_w": "70", "utilisation": "0"}
        return row | cells

    change(folder, partial(stall, last_second=38))
    assert not finding_of(folder, "stalled_rank").until_the_end
    change(folder, partial(stall, last_second=math.inf))
    finding = judge(folder).findings[0]
    assert finding.kind == "stalled_rank" and finding.cause is cause
    assert 20 <= finding.seconds < 30 and finding.until_the_end
    assert finding.locations == [RankId("n1", int(number)) for number in numbers]


def test_a_pause_loses_no_more_than_all_of_the_time(make_job: MakeJob) -> None:
    """A rank that comes when the file system, and with it the samples, begin to hang: most are of before."""
    folder = make_job([FULL], record=False)
    change(folder, without(samples.GPU))

    def hang(row: Row) -> Row | None:
        second = float(row["time"]) - traces.BEGAN_AT_SECONDS
        if second < 30:
            return row if row["what"] == samples.NODE else None
        return row | {
            "time": str(traces.BEGAN_AT_SECONDS + 30 + 20 * (second - 30)),
            "name": "D",
            "cores": "0",
        }

    change(folder, hang)
    verdict = judge(folder)
    (finding,) = verdict.findings
    assert finding.kind == "stalled_rank" and finding.seconds > verdict.seconds
    assert finding.lost_share == 1


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
    assert kinds_of(folder) == (["never_met"] if never_met else [])


@pytest.mark.parametrize(("world_size", "never_met"), [(1, True), (2, False)])
def test_a_record_tells_whether_ranks_met(make_job: MakeJob, world_size: int, never_met: bool) -> None:
    """Its ranks did, if it has several; one of a single rank says nothing of the others."""
    folder = make_job([FULL] * 2)
    change(folder, with_cells({"met": "-"}, samples.RANK))
    (folder / samples.ENDED).write_text("0")
    (path,) = (folder / "training").glob("*.csv")
    record = pd.read_csv(path, dtype=str, keep_default_na=False)
    record.assign(world_size=world_size).to_csv(path, index=False)
    assert ("never_met" in kinds_of(folder)) == never_met


def test_ranks_never_met_only_after_some_samples(make_job: MakeJob) -> None:
    folder = make_job([FULL] * 2, record=False)
    change(folder, lambda row: row | {"met": "-"})
    (folder / samples.ENDED).write_text("0\n")
    assert kinds_of(folder) == ["never_met"]
    change(folder, first_seconds(9))
    assert kinds_of(folder) == []


def test_that_ranks_never_met_comes_before_anything_else(make_job: MakeJob) -> None:
    folder = make_job([FULL, UNUSED], ranks=2, record=False)
    change(folder, lambda row: row | {"met": "-"})
    (folder / samples.ENDED).write_text("0\n")
    assert kinds_of(folder)[0] == "never_met" and len(kinds_of(folder)) > 1
    # One is alone.
    folder = make_job([FULL], record=False)
    change(folder, lambda row: row | {"met": "-"})
    (folder / samples.ENDED).write_text("0\n")
    assert kinds_of(folder) == []


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


def test_ranks_on_cpus_that_hardly_compute(make_job: MakeJob) -> None:
    """For no reason that shows."""
    folder = make_job([FULL] * 2, record=False)
    change(folder, without(samples.GPU))
    change(folder, lambda row: row | {"cores": "0.08"})
    finding = only_finding(folder)
    assert finding.kind == "idle_cpu" and finding.computing_share == pytest.approx(0.08)
    change(folder, lambda row: row | {"cores": "0.5"})
    assert kinds_of(folder) == []
