"""The worked trainings: two ranks train as one, and a stop within an epoch changes no digit."""

from pathlib import Path

import numpy as np
import pytest
from conftest import BEYOND, COMPLETE, STOPS, Script, one_error, places, rows_of, succeeded
from PIL import Image

from manygpus.record import records

# Each with its options, and the metrics that it gives to `run.log`.
WORKED = {
    "lstm": (("--train-size", 40, "--width", 4, "--loader", "workers"), ["gradient_norm"]),
    "resnet": (("--size", 32, "--lr", 0.001, "--loader", "workers", "--num-workers", 1), []),
    "gan": (("--train-size", 40, "--width", 4, "--dataset", "synthetic"), ["critic_loss"]),
    # SGD, as to Adadelta gradients that are twice as large are nearly the same.
    "vae_counts": (
        ("--train-size", 110, "--width", 4, "--recipe", "sgd", "--lr", 1e-4, "--lr-warmup-images", 40),
        [],
    ),
}
SMALL = ("--batch-size", 20, "--test-size", 11, "--epochs", 2, "--timeout", 60)
# So many layers of BatchNorm make the rounding errors of float32 visible.
PRECISE = f"""
import runpy, sys, torch
torch.set_default_dtype(torch.float64)
sys.path[0] = "{COMPLETE}"
runpy.run_path("{COMPLETE / "resnet.py"}", run_name="__main__")
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of noise, brighter in one class than in the other: two batches, and twelve to test on."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(1)
    for part, count in (("train", 20), ("val", 6)):
        for name, level in (("dark", 0), ("light", 100)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(level, level + 150, (40, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def numbers_of(folder: Path, metrics: list[str]) -> list[float]:
    """The losses of two epochs, and these metrics."""
    (path,) = (folder / "runs").glob("*.csv")
    of_metrics = (
        [metric["value"] for metric in records.read_metrics(path) if metric["metric"] in metrics]
        if metrics
        else []
    )
    losses = [row[name] for row in rows_of(folder) for name in ("train_loss", "test_loss")]
    assert (len(losses), len(of_metrics)) == (4, 2 * len(metrics))
    assert {row["test_images"] for row in rows_of(folder)} <= {0, 11}  # a GAN has no test
    return losses + of_metrics


@pytest.mark.parametrize("name", WORKED)
def test_a_worked_training_is_the_same_on_two_ranks_and_after_a_stop(
    name: str, images: Path, script: Script, tmp_path: Path
) -> None:
    arguments, metrics = WORKED[name]
    command = (next(BEYOND.glob(f"*/{name}.py")), *SMALL, *arguments)
    if name == "resnet":
        (tmp_path / "precise.py").write_text(PRECISE)
        command = (tmp_path / "precise.py", *SMALL, *arguments, "--images", images)
    for ranks in (1, 2):
        succeeded(script(*command, "--results-dir", tmp_path / str(ranks), ranks=ranks))
    for before, sentence in (((*STOPS, 1), "stopped after step 1 of epoch 1"), ((), "resumed from")):
        done = succeeded(script(*before, *command, *places(tmp_path / "stopped"), ranks=2))
        assert sentence in done.stdout
    one, two, stopped = (numbers_of(tmp_path / which, metrics) for which in ("1", "2", "stopped"))
    assert two == pytest.approx(one, rel=1e-5, nan_ok=True)
    np.testing.assert_array_equal(stopped, two)


def test_a_folder_without_images_is_one_sentence(images: Path, script: Script) -> None:
    (images / "val" / "light").rename(images / "val" / "white")
    for folder, sentence in ((images / "none", "is not to be used"), (images, "need folders of the same")):
        assert sentence in one_error(script(COMPLETE / "resnet.py", "--images", folder))
