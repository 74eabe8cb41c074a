"""Ranks that each trained by itself."""

import pandas as pd
import pytest
from sampled_jobs import MakeJob, change, first_seconds, kinds_of, with_cells
from traces import FULL, UNUSED

from manygpus.monitor import samples


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
