"""Weights that a run has saved classify as it did, on another machine, and image files."""

import csv
import math
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import BEYOND, STAGES, Script, one_error, rows_of, succeeded
from PIL import Image

from trainkit.rank import data

PREDICT = BEYOND / "predict.py"
SMALL = ("--train-size", 2000, "--epochs", 1, "--save-model", "--no-cuda")
COUNT = 1001  # odd: a rank more would be padded


def train(script: Script, folder: Path, path: Path, *options: object, ranks: int | None = None) -> Path:
    succeeded(script(path, *SMALL, *options, "--results-dir", folder, ranks=ranks))
    (weights,) = (folder / "models").glob("*.pt")
    return weights


@pytest.fixture(scope="module")
def weights(script: Script, mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    precise = ("--precision", "fp32", "--test-size", COUNT)
    checkpoints = ("--checkpoint-dir", folder / "checkpoints")
    return train(script, folder, STAGES["ddp"], *precise, *checkpoints, ranks=2)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def correct_in_the_run(weights: Path) -> int:
    (row,) = rows_of(weights.parents[1])
    count = row["test_accuracy"] * row["test_images"] / 100
    assert count == pytest.approx(round(count), abs=1e-3)  # the record has six digits of it
    return round(count)


def test_one_process_classifies_as_two_ranks_did(weights: Path, tmp_path: Path, script: Script) -> None:
    out = tmp_path / "out.csv"
    done = succeeded(script(PREDICT, weights, "--test-size", COUNT, "--out", out))
    correct = correct_in_the_run(weights)
    assert 300 < correct < 1000
    percent = f"{100 * correct / COUNT:.2f} %"
    assert done.stdout.splitlines() == [
        "network of width 32, fp32, on cpu",
        f"accuracy {percent}: {correct} of {COUNT} test images",
        f"at the end of the run, in fp32: {percent}",
        f"predictions: {out}",
    ]
    rows = table(out)
    assert [int(row["index"]) for row in rows] == list(range(COUNT))
    assert sum(row["label"] == row["predicted"] for row in rows) == correct
    for row in rows:
        chances = [float(row[f"p{digit}"]) for digit in range(10)]
        assert sum(chances) == pytest.approx(1, abs=1e-5)  # ten numbers of six digits
        assert float(row["probability"]) == max(chances) == chances[int(row["predicted"])]


@pytest.mark.parametrize(
    ("variant", "options", "precision"),
    [
        ("../mnist_ddp.py", ("--precision", "bf16", "--train-size", 256), "bf16"),
        ("accumulate.py", ("--precision", "fp32"), "fp32"),
    ],
)
def test_weights_of_any_width_precision_and_variant(
    variant: str, options: tuple, precision: str, tmp_path: Path, script: Script
) -> None:
    weights = train(script, tmp_path, BEYOND / variant, *options, "--width", 4, "--test-size", 500)
    done = script(PREDICT, weights, "--test-size", 500, "--out", tmp_path / "out.csv")
    assert f"network of width 4, {precision}, on cpu\n" in done.stdout, done.stderr
    counted = int(re.search(r"(\d+) of 500 test images", done.stdout)[1])
    # In bf16 two digits may be nearly equal, and 250 images at a time are added up in another order.
    assert abs(counted - correct_in_the_run(weights)) <= (5 if precision == "bf16" else 0)


def test_without_the_record_it_says_so(weights: Path, tmp_path: Path, script: Script) -> None:
    alone = tmp_path / "weights.pt"
    shutil.copy(weights, alone)
    done = script(PREDICT, alone, "--test-size", COUNT, "--out", tmp_path / "out.csv")
    assert "fp32, on cpu, without a record of its run\n" in done.stdout, done.stderr
    assert f"{correct_in_the_run(weights)} of {COUNT} test images" in done.stdout
    assert "at the end of the run" not in done.stdout


def test_image_files_are_classified_as_the_test_images_that_they_show(
    weights: Path, mnist_dir: Path, tmp_path: Path, script: Script
) -> None:
    _, test = data.load("mnist", mnist_dir)
    images = [Image.fromarray(pixels.numpy()) for pixels in test.inputs[:3, 0]]
    images[0].save(tmp_path / "0.png")
    images[1].convert("RGB").save(tmp_path / "1, one.png")
    # Twice as large, and wider than high.
    wide = Image.new("L", (80, 56))
    wide.paste(images[2].resize((56, 56), Image.NEAREST), (12, 0))
    wide.save(tmp_path / "2.jpg", quality=95)
    files = [tmp_path / name for name in ("0.png", "1, one.png", "2.jpg")]
    dark = [path.with_name(f"dark {path.name}") for path in files]
    for path, inverted in zip(files, dark, strict=True):
        with Image.open(path) as image:
            image.point(lambda value: 255 - value).save(
                inverted, **({"quality": 95} if ".jpg" in path.name else {})
            )

    out = tmp_path / "out.csv"
    done = script(PREDICT, weights, "--test-size", 3, "--out", out)
    expected = [row["predicted"] for row in table(out)]
    certain = table(out)[:2]
    assert done.returncode == 0, done.stderr
    done = script(PREDICT, weights, *files, "--out", out)
    rows = table(out)
    assert [row["file"] for row in rows] == list(map(str, files))
    assert [row["predicted"] for row in rows] == expected
    # Those that lost nothing, to the last digit.
    for row, same in zip(rows[:2], certain, strict=True):
        assert [row[f"p{digit}"] for digit in range(10)] == [same[f"p{digit}"] for digit in range(10)]
    assert "warning" not in done.stdout
    lines = done.stdout.splitlines()[1:4]
    assert [line.rpartition(" (")[0] for line in lines] == [
        f"{path}: {digit}" for path, digit in zip(files, expected, strict=True)
    ]

    done = script(PREDICT, weights, *dark, "--invert", "--out", out)
    assert [row["predicted"] for row in table(out)] == expected
    done = script(PREDICT, weights, *dark, "--out", out)
    assert "warning: 3 of 3 images are mostly bright, and MNIST is not: add --invert" in done.stdout


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("none.pt",), "none.pt cannot be read (there is no such file)"),
        (("text",), "text cannot be read (File is not a zip file)"),
        (("bit.pt",), "bit.pt cannot be read (wrong checksum of"),
        (("other.pt",), "conv1.bias, conv2.weight and 5 more missing or of another shape, more"),
        (("hollow.pt",), "hollow.pt: conv1.bias are not tensors of numbers"),
        (("nan.pt",), "nan.pt: conv1.bias are not tensors of numbers"),
        (
            ("program.pt",),
            "cannot be read (it holds more than tensors and numbers, and that is never loaded)",
        ),
        (("good.pt", "text"), "give PNG or JPEG files"),
        (("good.pt", "eps.png"), "give PNG or JPEG files"),
        (("good.pt", "--out", "good.pt"), "good.pt would overwrite what is read: give another --out"),
        (("good.pt", "--out", "pipe"), "it is not a regular file"),
        (("good.pt", "--epochs", 3), "unrecognized arguments: --epochs"),
    ],
)
def test_a_mistake_is_one_sentence(
    given: tuple, sentence: str, weights: Path, tmp_path: Path, script: Script
) -> None:
    content = bytearray(weights.read_bytes())
    (tmp_path / "good.pt").write_bytes(content)
    content[len(content) // 2] ^= 1  # within a weight: the file still opens
    (tmp_path / "bit.pt").write_bytes(content)
    (tmp_path / "text").write_text("neither weights nor an image")
    torch.save({"conv1.weight": torch.zeros(4, 3, 3, 3), "more": 1}, tmp_path / "other.pt")
    good = torch.load(weights)
    hollow = torch.zeros(1).expand(32)  # one number, however many its shape says
    for name, bias in {"hollow.pt": hollow, "nan.pt": torch.full((32,), math.nan)}.items():
        torch.save(good | {"conv1.bias": bias}, tmp_path / name)
    torch.save(good | {"more": Path("a program, as far as pickle knows")}, tmp_path / "program.pt")
    Image.new("RGB", (28, 28)).save(tmp_path / "eps.png", "EPS")  # for which Pillow would start `gs`
    os.mkfifo(tmp_path / "pipe")
    out = tmp_path / "out.csv"
    out.write_text("precious")
    files = {path.name: path for path in (*tmp_path.iterdir(), tmp_path / "none.pt")}
    told = one_error(script(PREDICT, "--out", out, *(files.get(word, word) for word in given)))
    assert told.startswith("error: ") and sentence in told
    assert out.read_text() == "precious"


@pytest.mark.full
def test_the_commands_of_its_page(weights: Path, tmp_path: Path, script: Script) -> None:
    page = (BEYOND / "PREDICT.md").read_text()
    commands = re.findall(r"^python predict\.py (.*)$", page, re.MULTILINE)
    assert len(commands) >= 3
    Image.new("L", (28, 28)).save(tmp_path / "digit.png")
    for command in commands:
        words = [
            re.sub(r"^\w+\.(png|jpg)$", str(tmp_path / "digit.png"), word) for word in shlex.split(command)
        ]
        assert re.fullmatch(r"\.\./\.\./results/models/[\w-]+\.pt", words[0])
        out = tmp_path / "predictions.csv"
        succeeded(script(PREDICT, weights, *words[1:], "--out", out))
        assert table(out)
