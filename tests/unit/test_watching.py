"""The live view of a job (trainkit/jobs/watching.py)."""

from pathlib import Path

import pytest
from traces import TRACES

from trainkit.errors import UserError
from trainkit.jobs import watching


def test_it_shows_what_is_there_until_the_job_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Before the first sample, at two moments of three GPUs, and when one of them has gone."""
    lines = (TRACES / "gpu_no_rank" / "n1.csv").read_text().splitlines(keepends=True)
    early, late = lines[:121], lines[:241]
    looks = [[], early, late, [*late, *(line for line in lines[241:] if ",gpu,2," not in line), "179000"]]

    def ended() -> bool:
        (tmp_path / "n1\x1b[2J.csv").write_text("".join(looks.pop(0)))
        return not looks

    monkeypatch.setattr(watching, "PAUSE", 0)
    watching.watch(tmp_path, "job 12", ended)
    nothing, *views = capsys.readouterr().out.split("node  ")
    assert "there are no samples in" in nothing and len(views) == 3
    gpus = [view.split("throttled\n")[1].split("\n\n")[0].splitlines() for view in views]
    assert [[line.split()[1] for line in view] for view in gpus] == [list("012"), list("012"), list("01")]
    assert gpus[0] != gpus[1]
    assert all("no rank uses GPU 2" in view and "job 12 was watched for" in view for view in views[1:])
    assert "\x1b" not in views[-1] and r"n1\x1b[2J 0" in views[-1]


def test_a_job_that_has_ended_without_a_sample(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^there are no samples in .*: give a job that was sampled"):
        watching.watch(tmp_path, "job 12", lambda: True)
