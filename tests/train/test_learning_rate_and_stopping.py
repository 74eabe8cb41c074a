"""The options that a growing batch asks for: how they train, what is recorded, and when a run ends early."""

import re
from pathlib import Path

import pytest
import torch
from conftest import (
    BY_FEATURE,
    REPOSITORY,
    STAGES,
    WITHOUT_DROPOUT,
    Script,
    furthest,
    one_error,
    places,
    rows_of,
    succeeded,
    weights_of,
)

from manygpus.config.options import parse_options
from manygpus.data.datasets import InMemoryDataset
from manygpus.data.loaders import hold_out
from manygpus.errors import UserError
from manygpus.network.optim import build_optimizer
from manygpus.reports import comparison

SMALL = ("--train-size", 640, "--test-size", 100, "--width", 4, "--precision", "fp32")
STILL = ("--lr", 1e-30)  # no weight changes, so no epoch is better than the first


def learning_rates(*arguments: object, steps_per_epoch: int, steps: int) -> list[float]:
    opts = parse_options("", arguments=list(map(str, arguments)))
    optimizer, lr_scheduler = build_optimizer(opts, torch.nn.Linear(2, 2), steps_per_epoch)
    used = []
    for _ in range(steps):
        used += lr_scheduler.get_last_lr()
        optimizer.step()
        lr_scheduler.step()
    return used


# --- the learning rate and the batch ----------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["classic", "sgd"])
def test_a_warm_up_is_counted_in_images_at_any_batch(recipe: str) -> None:
    """It lasts 1,024 images, in epochs of 1,536; the step decay after that is as without it."""
    same = ("--recipe", recipe, "--lr", 0.1, "--gamma", 0.5)
    for batch in (64, 256):
        steps = 3 * 1536 // batch
        plain, warm = (
            learning_rates(*same, "--batch-size", batch, *more, steps_per_epoch=steps // 3, steps=steps)
            for more in ((), ("--lr-warmup-images", 1024))
        )
        for step, (expected, used) in enumerate(zip(plain, warm, strict=True), start=1):
            assert used == pytest.approx(expected * min(1, step * batch / 1024))
        assert [plain[step] for step in (0, steps // 3, steps - 1)] == pytest.approx([0.1, 0.05, 0.025])


@pytest.mark.parametrize("recipe", ["classic", "sgd", "fast"])
@pytest.mark.parametrize(("rule", "lr"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rules_scale_the_learning_rate_of_batch_64(recipe: str, rule: str, lr: float) -> None:
    options = ("--recipe", recipe, "--lr", 0.1, "--lr-scale", rule, "--batch-size", 256)
    used = learning_rates(*options, steps_per_epoch=50, steps=14 * 50)
    assert max(used) == pytest.approx(lr)


def test_the_rate_is_printed_and_recorded_and_a_warm_up_continues_after_a_resume(
    script: Script, tmp_path: Path
) -> None:
    """The first process ends within the warm-up, which the second one continues."""
    rule = ("--recipe", "sgd", "--lr", 0.02, "--lr-scale", "linear", "--batch-size", 128)
    rows = {}
    for name, *limits in (("resumed", ("--stop-at", 1), ()), ("in one go", ())):
        place = ("--results-dir", tmp_path / name, "--checkpoint-dir", tmp_path / name / "checkpoints")
        for limit in limits:
            training = (*SMALL, *rule, "--lr-warmup-images", 1280, "--epochs", 3, *limit)
            done = succeeded(script("single", *training, *place, "--resume", "auto"))
        rows[name] = rows_of(tmp_path / name)
    assert (
        "nodes 1 · ranks 1 (python) · batch 128 per device · learning rate 0.04 (linear: 0.02 at batch 64) "
        "after 1280 images of warm-up\n" in done.stdout
    )
    asked = {"recipe": "sgd", "lr": 0.04, "gamma": 0.7, "lr_scale": "linear", "lr_warmup_images": 1280}
    for row, learning_rate in zip(rows["in one go"], (0.004, 0.6 * 0.7 * 0.04, 0.49 * 0.04), strict=True):
        assert asked.items() <= row.items()
        assert row["learning_rate"] == pytest.approx(learning_rate)
    for resumed, row in zip(rows["resumed"], rows["in one go"], strict=True):
        assert resumed["ended"] == row["ended"] == ("all epochs" if row["epoch"] == 3 else "")
        for column in ("learning_rate", "train_loss", "test_loss"):
            assert resumed[column] == pytest.approx(row[column], rel=1e-5)


# --- when a run ends --------------------------------------------------------------------------------


def test_all_ranks_end_together_and_patience_counts_over_a_resume(script: Script, tmp_path: Path) -> None:
    checkpoints = ("--checkpoint-dir", tmp_path / "checkpoints", "--resume", "auto")
    training = (*SMALL, *STILL, "--batch-size-per-gpu", 40, "--patience", 2, "--timeout", 60, *checkpoints)
    for epochs in (2, 9):
        done = succeeded(script("ddp", *training, "--epochs", epochs, "--results-dir", tmp_path, ranks=2))
    assert "nodes 1 · ranks 2 (env, gloo) · batch 40 per device · learning rate 1e-30\n" in done.stdout
    assert "ended before its last epoch: no better for 2 epochs\n" in done.stdout
    rows = rows_of(tmp_path)
    assert [(row["epoch"], row["ended"]) for row in rows] == [(1, ""), (2, ""), (3, "no better for 2 epochs")]
    assert {(row["global_batch"], row["batch_per_device"]) for row in rows} == {(80, 40)}


def test_a_run_that_has_ended_stays_so_until_its_limit_is_another(script: Script, tmp_path: Path) -> None:
    """Also with more epochs than it had. Of the checkpoints in a job's own folder it keeps the newest."""
    job = {"MANYGPUS_JOB_DIR": str(tmp_path)}
    for limit, epochs, env, last_epoch, ended in (
        (1, 3, {}, 1, "accuracy 1.0 reached"),
        (1, 3, {}, 1, "accuracy 1.0 reached"),
        (100, 3, job, 3, "all epochs"),
        (100, 3, job, 3, "all epochs"),
        (100, 5, job, 5, "all epochs"),
    ):
        arguments = (*SMALL, *places(tmp_path), "--stop-at", limit, "--epochs", epochs)
        succeeded(script("single", *arguments, env=env))
        rows = [(row["epoch"], row["ended"]) for row in rows_of(tmp_path)]
        assert rows == [*((epoch, "") for epoch in range(1, last_epoch)), (last_epoch, ended)]
        (kept,) = (tmp_path / "checkpoints").glob("*.pt")
        assert kept.name == f"epoch-{last_epoch + 1}-step-0.pt"
    # A start that has nothing left to do writes none.
    assert len(list((tmp_path / "runs").glob("*.csv"))) == 3

    in_one_go = tmp_path / "in one go"
    succeeded(script("single", *SMALL, "--epochs", 5, "--results-dir", in_one_go))
    losses, expected = ([row["train_loss"] for row in rows_of(folder)] for folder in (tmp_path, in_one_go))
    assert losses == expected


def test_a_run_that_its_script_ends_early_says_so(script: Script, tmp_path: Path) -> None:
    text = (STAGES["single"]).read_text()
    last_line = "        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss, autocast))\n"
    assert last_line in text
    copy = tmp_path / "ends_early.py"
    copy.write_text(text.replace(last_line, f"{last_line}        break\n"))
    succeeded(script(copy, *SMALL, "--epochs", 3, "--results-dir", tmp_path))
    assert [(row["epoch"], row["ended"]) for row in rows_of(tmp_path)] == [(1, "its loop ended")]


# Spoils the weights after the steps of the third epoch.
SPOILED = """\
        if epoch == 3:
            model.module.fc2.weight.data.neg_()
        tested = evaluate("""


def test_the_best_epoch_by_validation_is_the_result_on_any_ranks_and_after_a_stop(
    script: Script, tmp_path: Path
) -> None:
    copy = tmp_path / "spoiled.py"
    script_of_it = (BY_FEATURE / "best_epoch.py").read_text()
    copy.write_text(script_of_it.replace("        tested = evaluate(", SPOILED))
    training = (*SMALL, "--recipe", "sgd", "--validation", 300, "--save-model", "--patience", 1)
    kept, other = tmp_path / "kept", tmp_path / "other"
    succeeded(script(*WITHOUT_DROPOUT, copy, *training, *places(kept), "--epochs", 2, ranks=2))
    taken = "validation=300"
    for folder, ranks in ((kept, 2), (other, 1)):
        place = places(folder)
        done = succeeded(script(*WITHOUT_DROPOUT, copy, *training, *place, "--epochs", 4, ranks=ranks))
        assert "the weights are those of epoch 2, which has the lowest validation loss\n" in done.stdout
        best = [(row["best_epoch"], row["settings"], row["ended"]) for row in rows_of(folder)]
        assert best == [(1, taken, ""), (2, taken, ""), (2, taken, "no better for 1 epoch")]
    assert furthest(weights_of(kept), weights_of(other)) < 1e-4
    # The weights of epoch 2, and its accuracy, as of a training that ended there.
    whole = tmp_path / "whole"
    succeeded(script(*WITHOUT_DROPOUT, copy, *training, *places(whole), "--epochs", 2, ranks=2))
    assert furthest(weights_of(kept), weights_of(whole)) == 0
    weights = max((kept / "models").glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)
    # As the page reads them; the run was tested on fewer images.
    page = (REPOSITORY / "03_multigpu_ddp" / "OUR_LOOP.md").read_text()
    *_, code = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for of_page, here in {"results/models/RUN_ID.pt": str(weights), "width=32": "width=4"}.items():
        assert of_page in code
        code = code.replace(of_page, here)
    code = re.sub(r"test_set\.(inputs|targets)", r"test_set.\1[:100]", code)
    (tmp_path / "own.py").write_text(code)
    of_best = f"{rows_of(kept)[1]['test_accuracy']:.2f} %"
    assert f"accuracy {of_best}; the first image shows a " in succeeded(script(tmp_path / "own.py")).stdout
    rows, _ = comparison.load([kept])
    table = comparison.summarize(rows)
    assert table.test_accuracy.item() == pytest.approx(rows_of(whole)[1]["test_accuracy"])


def test_images_to_validate_on_are_not_trained_on() -> None:
    numbers = torch.arange(100)
    split = InMemoryDataset("numbers", numbers, numbers)
    left, taken = hold_out(split, 30)
    assert sorted([*left.inputs.tolist(), *taken.inputs.tolist()]) == list(range(100))
    assert len(taken) == 30 and taken.inputs.max() > 60  # from all over
    again, _ = hold_out(split, 30)
    assert torch.equal(again.inputs, left.inputs)
    with pytest.raises(UserError, match="leave none of the 100 to train on"):
        hold_out(split, 100)


# --- the width, and the batch of a device -----------------------------------------------------------


def test_a_script_that_does_not_know_its_devices_refuses_the_batch_of_each(
    script: Script, tmp_path: Path
) -> None:
    own_script = tmp_path / "own.py"
    own_script.write_text(
        STAGES["ddp"].read_text().replace("    opts = opts.resolve_batch_size(dist_env.world_size)\n", "")
    )
    done = script(own_script, *SMALL, "--batch-size-per-gpu", 64, "--results-dir", tmp_path)
    expected = "this script takes no --batch-size-per-gpu: give --batch-size, or have the script"
    assert expected in one_error(done)
