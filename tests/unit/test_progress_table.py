"""Whether the run of a plain script has finished, by what its job has left: a sweep runs all others again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from manygpus import job_folder
from manygpus.job_folder import Outcome
from manygpus.jobs.sweeps import progress_table

WELL = Outcome(
    restart=0, exit_code=0, why=[], failed_rank=None, saved=None, requeued=False, seconds=9, said=[]
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of two processes, which has been sent."""
    (tmp_path / "job").mkdir()
    (tmp_path / progress_table.RUN).write_text(json.dumps({"tasks": 2}))
    return tmp_path


@pytest.mark.parametrize(
    ("notes", "finished"),
    [
        ((), False),
        (("rank-0.finished",), False),
        (("rank-0.finished", "rank-1.finished"), True),
        (("rank-0.finished", "rank-1.failed"), False),
        # It has saved and ended by itself, as it was asked to.
        (("rank-0.finished", "rank-1.finished", job_folder.STOPPED), False),
    ],
)
def test_by_the_notes_of_a_job_on_this_machine(notes: tuple[str, ...], finished: bool, run: Path) -> None:
    for note in notes:
        (run / "job" / note).touch()
    assert progress_table.has_finished(run) == finished


@pytest.mark.parametrize(
    ("changed", "finished"), [({}, True), ({"exit_code": 1}, False), ({"saved": "x"}, False)]
)
def test_by_the_outcome_of_a_job_of_slurm(changed: dict, finished: bool, run: Path) -> None:
    (run / "job" / "rank-0.finished").touch()
    job_folder.keep_outcome(run / "job", replace(WELL, **changed))
    assert progress_table.has_finished(run) == finished
