"""What is read of a job, and which time of it is judged."""

import math

import pytest
import traces
from sampled_jobs import MakeJob, Row, change, only_finding
from traces import FROM_LOADERS, FULL, STARVED, UNUSED, Gpu

from manygpus.errors import UserError
from manygpus.monitor import sample_tables, samples
from manygpus.monitor.sample_tables import GpuId, RankId
from manygpus.monitor.sampled_job import SampledJob
from manygpus.monitor.verdict import Verdict, judge
from manygpus.record import records


def test_a_damaged_file_of_a_node_takes_nothing_from_the_others(
    make_job: MakeJob, capsys: pytest.CaptureFixture
) -> None:
    folder = make_job([FULL, UNUSED], ranks=1, nodes=2)
    (folder / "n2.csv").write_text("time,what,num")
    assert only_finding(folder).locations == [GpuId("n1", 1)]
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
    assert math.isnan(issue.network_mb_s)


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
