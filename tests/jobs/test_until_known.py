"""`sweep.py --until-known`: which runs it makes, when it stops, and what it says."""

import re
import runpy
from pathlib import Path

import pytest
from conftest import REPOSITORY
from test_sweep import SweepCheckout, pretend

from trainkit.jobs import until_known
from trainkit.jobs.stages import STAGES, resources
from trainkit.jobs.sweep import PlannedRun

REPLAY = runpy.run_path(str(REPOSITORY / "tools" / "bench" / "until_known.py"))


@pytest.mark.full
def test_a_sweep_until_known(tmp_path: Path) -> None:
    """Batch 4096 does not fit on these devices: it is tried once."""
    checkout = SweepCheckout(tmp_path / "a checkout")
    pretend(checkout)
    lists = ("--stages", "single,ddp", "--gpus", "1,2", "--batch-size", "1024,4096")
    goal = ("--until-known", "--target", 0.5, "--epochs", 3, "--precision", "fp32", "--no-cuda")
    done = checkout.start_sweep(*lists, *goal)
    failed, *others = [
        f"{shape}-r1" for shape in ("single-1gpu-batch4096", "single-1gpu-batch1024", "ddp-2gpu-batch1024")
    ]
    assert f"failed: {failed}. The same command runs them again." in done.stderr
    assert done.returncode == 1
    tried = re.findall(r"^known .*; next ([-\w]+)", done.stdout, re.MULTILINE)
    assert tried == [failed, *others]
    assert re.search(r"^done     single x1, batch 1024, .* \(2 of 4 runs, ", done.stdout, re.MULTILINE)
    assert checkout.compared() == [("ddp", 2), ("single", 1)]
    assert "Ask for 1 " in done.stdout  # a few seconds, of which most go into the start
    assert (checkout.sweep / "how_many_gpus.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--spend 1", "--spend is the limit of --until-known"),
        ("--until-known", "--until-known needs a goal"),
        ("--until-known --target 97 --gpus 2 --no-cuda", "--until-known starts on 1 GPU: add 1 to --gpus"),
        ("--until-known --target 97 --stages dp --no-cuda", "--until-known starts on 1 GPU"),
        ("--until-known --target 97 --scaling weak", "leave out --scaling"),
        ("--until-known --target 97 --num-workers 0,2", "give one --train-size and one loader"),
        ("--until-known --target 197", "197 must be more than 0 and at most 100"),
        ("--deadline soon", "'soon' is neither HH:MM:SS nor a number of minutes"),
    ],
)
def test_bad_input(arguments: str, sentence: str, tmp_path: Path) -> None:
    checkout = SweepCheckout(tmp_path / "a checkout")
    done = checkout.start_sweep(*arguments.split())
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*\n", done.stderr)
    assert sentence in done.stderr
    assert not checkout.sweep.exists()


def test_the_choice_is_that_of_all_runs_for_less_device_time() -> None:
    """On a recorded sweep of two numbers of workers, six batches, and two repeats."""
    folder = REPLAY["SAMPLES"] / "scaling" / "w8.csv"
    rows, _ = REPLAY["comparison"].load([folder])
    found = REPLAY["Replay"](rows, REPLAY["Constraints"](target=94.0)).row({})
    assert found["all_sure"] > 0.9
    assert found["dearer"] <= 0.05
    assert found["hours"] < 0.35 * found["all_hours"]


# --- what it does next, with answers that are made up -----------------------------------------------------


class MadeUp:
    """A sweep whose runs take an hour. Up to twice the largest count that has run there are predictions."""

    def __init__(self, counts: tuple[int, ...], best: int, spend: float = 1000) -> None:
        self.planned, self._best, self.ran = {}, best, []
        for count in counts:
            for batch in (256, 1024):
                stage = STAGES["single" if count == 1 else "ddp"]
                run = PlannedRun(stage, resources(stage, count), batch, None, None, 1)
                self.planned[run.name] = run
        until_known.search(list(self.planned.values()), self._ask, self._finish, spend)

    def _ask(self, _: list[PlannedRun]) -> tuple[set[str], float, dict]:
        counts = [run.shape.gpus for run in self.ran]
        known = [count for count in (1, 2, 4, 8, 16) if self.ran and count <= 2 * max(counts)]
        alike = {"stage": "ddp", "nodes": 1, "global_batch": 1024, "basis": "measured"}
        options = [alike | {"devices": count, "images_per_s": [0, count, 0]} for count in known]
        best = options[min(len(known), self._best.bit_length()) - 1] if options else None
        answer = {"best": best, "sure": 0.95, "options": options, "probes": [], "sentence": ""}
        return {run.name for run in self.ran}, float(sum(counts)), answer

    def _finish(self, run: PlannedRun) -> bool:
        self.ran.append(run)
        return True

    @property
    def names(self) -> list[str]:
        return [run.name for run in self.ran]


FIRST = ["single-1gpu-batch1024-r1", "single-1gpu-batch256-r1", "ddp-2gpu-batch256-r1"]


def test_it_does_not_stop_at_the_largest_count_that_can_be_predicted() -> None:
    """Where 8 are the best of 16, after 1 and 2, with predictions up to 4, it looks further."""
    found = MadeUp((1, 2, 4, 8, 16), best=8)
    assert found.names == [*FIRST, "ddp-8gpu-batch1024-r1"]
    assert MadeUp((1, 2, 4, 8, 16), best=2).names == FIRST


def test_it_spends_no_more_than_it_may(capsys: pytest.CaptureFixture[str]) -> None:
    assert MadeUp((1, 2, 4, 8), best=8, spend=2).names == FIRST[:2]
    *_, last = capsys.readouterr().out.splitlines()
    assert "ddp-2gpu-batch256-r1 would take more than is left of --spend (2 of 8 runs, 2 GPU-hours)" in last
