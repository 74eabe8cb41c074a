"""Ranks that did nothing for a long time."""

import math
from functools import partial

import pytest
import traces
from sampled_jobs import MakeJob, Row, change, finding_of, without
from traces import FULL, Gpu

from manygpus.monitor import samples
from manygpus.monitor.findings import paused_ranks
from manygpus.monitor.findings.paused_ranks import PauseCause
from manygpus.monitor.sample_tables import RankId
from manygpus.monitor.verdict import judge


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
