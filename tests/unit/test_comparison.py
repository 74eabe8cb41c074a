"""The comparison of runs, on small CSVs whose right answers are known; now and then as a user starts it."""

import base64
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import BinaryIO, NamedTuple

import matplotlib.image
import pandas as pd
import pytest
from conftest import ENVIRONMENT, succeeded
from forking import Forking
from matplotlib.figure import Figure

from manygpus.errors import UserError
from manygpus.record import records
from manygpus.record.records import RecordWriter
from manygpus.reports import variants
from manygpus.reports.comparison_report import report, report_each

pytestmark = pytest.mark.filterwarnings("error")  # a user would see them among the sentences
ROOT = Path(__file__).resolve().parents[2]
GPU, CPU = "NVIDIA H200", "CPU: AMD EPYC 9V74"
FIGURES = ("throughput.png", "speedup.png", "accuracy.png")


# Columns that differ from epoch to epoch.
OF_EPOCHS = (
    "warmup",
    "train_seconds",
    "images_per_s",
    "eval_seconds",
    "test_accuracy",
    "peak_memory_mb",
    "elapsed_s",
)


def write_run(folder: Path, run_id: str, speeds: list[float], **columns: object) -> Path:
    """A run whose epochs had these images/s. The first one is the warm-up; `columns` are of its record."""
    of_run = {
        "stage": "single",
        "run_id": run_id,
        "launcher": "",
        "model": "Net",
        "lr": 1.0,
        "gamma": 0.7,
        "world_size": 1,
        "nodes": 1,
        "devices": 1,
        "device_name": GPU,
        "threads_per_worker": 1,
        "global_batch": 256,
        "batch_per_device": 256,
        "precision": "fp32",
        "steps": 234,
        "images": 59904,
        "test_images": 10_000,
        "train_loss": 0.1,
        "test_loss": 0.1,
        "learning_rate": 1.0,
        "recorded_at": "",
        "job_id": "",
        "node_list": "",
        "torch_version": "2.15.0",
        "cuda_version": "",
        "git_commit": "",
        "started_at": "",
    }
    of_run |= {name: value for name, value in columns.items() if name not in OF_EPOCHS}
    of_each_epoch = {name: value for name, value in columns.items() if name in OF_EPOCHS}
    recorder = RecordWriter(folder / "runs", of_run)
    for i, speed in enumerate(speeds):
        epoch = {
            "epoch": i + 1,
            "warmup": i == 0,
            "train_seconds": 59904 / speed,
            "images_per_s": speed,
            "eval_seconds": 0.5,
            "test_accuracy": 98.0 + 0.25 * i,
            "peak_memory_mb": 300.0,
            "elapsed_s": 10.0 * (i + 1),
        }
        recorder.add(epoch | of_each_epoch)
    return recorder.path


def ddp(devices: int, **columns: object) -> dict[str, object]:
    return {"stage": "ddp", "devices": devices, "world_size": devices} | columns


def dp(devices: int, **columns: object) -> dict[str, object]:
    return {"stage": "dp", "devices": devices} | columns


def own(devices: int, **columns: object) -> dict[str, object]:
    """Somebody's copy of stage 03 with another name, network and data."""
    return ddp(devices, stage="depth", model="UNet", dataset="rooms") | columns


class Seen(NamedTuple):
    """What the terminal shows, wrapped lines joined; comparison.csv; and the figures by their names."""

    text: str
    table: pd.DataFrame
    figures: dict[str, Figure]

    def titles(self, name: str) -> list[str]:
        """Of every panel of a figure, on one line each."""
        figure = self.figures[name]
        titles = [text.get_text() for part in figure.subfigs for text in part.texts]
        return [title.replace("\n", " ") for title in titles or [axes.get_title() for axes in figure.axes]]

    def legend(self, name: str) -> list[str]:
        return [text.get_text() for text in self.figures[name].legends[0].get_texts()]


def unpadded(page: Path) -> str:
    """A page of Markdown whose cells are not as wide as their column."""
    return re.sub(r" +\|", " |", page.read_text())


def conclusion_of(text: str) -> str:
    """The last line of what a comparison prints."""
    return text.splitlines()[-1]


def numbers_in(sentence: str) -> list[str]:
    """For each clause: devices, speedup, efficiency, batch."""
    return re.findall(r"\d+(?:\.\d+)?", sentence)


Compared = Callable[..., Seen]


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Compared:
    """Compares the runs in the test's folder, or those given. The figures are made, but not as pixels."""

    def compare(*paths: Path, target: float | None = None) -> Seen:
        figures, out = {}, tmp_path / "out"

        def save(figure: Figure, file: BinaryIO, **_: object) -> None:
            figures[Path(file.name).name.removeprefix(".").partition(".png")[0] + ".png"] = figure

        monkeypatch.setattr(Figure, "savefig", save)
        conclusion = report(list(paths) or [tmp_path], out, target)
        assert sorted(figures) == sorted(name for name in FIGURES if (out / name).exists())
        text = f"{capsys.readouterr().out}{conclusion}\n".replace("\n    ", " ")
        return Seen(text, pd.read_csv(out / "comparison.csv"), figures)

    return compare


def cells(text: str, stage: str, devices: int) -> list[str]:
    """The one row of this stage and device count in the terminal's table, without the first two cells."""
    (line,) = re.findall(rf"^{stage} +{devices} .*$", text, re.MULTILINE)
    return line.split()[2:]


def test_speed_and_efficiency_leave_the_warm_up_out(tmp_path: Path, compared: Compared) -> None:
    """Medians leave the warm-up out and take in the repeats; speedup and efficiency follow."""
    write_run(tmp_path, "one", [10, 1000, 1100])
    write_run(tmp_path, "one-again", [10, 1200])
    write_run(tmp_path, "two", [9000, 1750, 1650, 1850], **ddp(2))
    write_run(tmp_path, "dp", [10, 550, 550], **dp(2))
    write_run(tmp_path, "ddp-one", [10, 1000, 1000], **ddp(1))
    text, table, _ = compared()

    # batch, images/s, min..max speedup, efficiency, accuracy, wall, memory, runs, epochs
    assert " ".join(cells(text, "single", 1)) == "256 1100 1000..1200 1.00 100 98.38 25.0 300 2 2..3"
    assert " ".join(cells(text, "ddp", 2)) == "256 1750 1650..1850 1.59 80 98.75 40.0 300 1 4"
    assert " ".join(cells(text, "dp", 2)) == "256 550 550..550 0.50 25 98.50 30.0 300 1 3"
    assert cells(text, "ddp", 1)[3:5] == ["0.91", "91"]  # its own row is no baseline beside a single run
    row = table[table.devices == 2].iloc[-1]
    assert (row.images_per_s, row.slowest, row.fastest) == (1750, 1650, 1850)
    assert row.speedup == pytest.approx(1750 / 1100) and row.efficiency == pytest.approx(1750 / 2200)
    assert (row.baseline, row.steady_epochs, row.eval_seconds) == ("single", 3, 0.5)
    assert numbers_in(conclusion_of(text)) == ["2", "1.59", "80", "256", "2", "0.50", "25", "256"]
    assert "| ddp | 2 | 256 | 1750 | 1650..1850 | 1.59 | 80 |" in unpadded(tmp_path / "out" / "comparison.md")


def test_the_wording_of_a_comparison(tmp_path: Path, compared: Compared) -> None:
    """All that it says, on runs of every kind; other tests hold the numbers. See `assert_is_snapshot`."""
    runs = tmp_path / "runs"
    steady = [10, 1000, 1000]
    write_run(runs, "one", steady)
    write_run(runs, "two", [10, 1600, 1650], **ddp(2))
    write_run(runs, "dp", [10, 550, 550], **dp(2), torch_version="2.14.0")
    write_run(runs, "dp-one", steady, **dp(1))
    write_run(runs, "weak", [10, 1900, 1900], **ddp(2, global_batch=512))
    write_run(runs, "bf16", [10, 1900, 1900], **ddp(2, precision="bf16", width=64))
    write_run(runs, "warm-up", [10], **ddp(4))
    write_run(runs, "loud", [10, 2200], **ddp(2, global_batch=384, nodes=2))
    write_run(runs, "loud-one", [10, 900, 1100], global_batch=384)
    write_run(runs, "synthetic", steady, dataset="synthetic", device_name=CPU)
    trained = own(1, optimizer="SGD momentum=0", arguments="--dropout=0.1", script="train.py 12345678")
    changed = {"learning_rate": 0.5, "arguments": "--dropout=0.2", "script": "train.py 87654321"}
    write_run(runs, "own-one", steady, **trained)
    write_run(runs, "own-two", [10, 700, 700], **trained | own(2) | changed)
    (runs / "broken.csv").touch()
    text = compared(runs, target=98.5).text.replace(f"{tmp_path}/", "")
    assert_is_snapshot(text, tmp_path / "comparison.txt")


def assert_is_snapshot(text: str, written: Path) -> None:
    """Compare with the file of this name in `snapshots`; if other words are meant, `written` replaces it."""
    expected = Path(__file__).parent / "snapshots" / written.name
    written.write_text(text)
    assert text == expected.read_text(), f"if these words are meant: cp {written} {expected}"


def test_weak_scaling(tmp_path: Path, compared: Compared) -> None:
    """The batch of one device on each: no run on one device with the large batch is needed, nor asked for."""
    write_run(tmp_path, "one", [10, 1000, 1000], global_batch=128)
    for devices, speed, images in ((2, 1800, 59904), (4, 3200, 59904), (8, 5600, 59392)):
        columns = ddp(devices, global_batch=128 * devices, images=images)
        write_run(tmp_path, f"weak-{devices}", [10, speed, speed], **columns)
    seen = compared()
    weak = seen.table.set_index("devices").weak_efficiency
    assert list(weak) == pytest.approx([1, 0.9, 0.8, 0.7]) and seen.table.speedup.notna().sum() == 1
    # batch, images/s, min..max, speedup, efficiency, weak efficiency
    assert cells(seen.text, "ddp", 8)[:6] == ["1024", "5600", "5600..5600", "-", "-", "70"]
    assert numbers_in(conclusion_of(seen.text)) == ["8", "5.60", "70", "128"]
    assert seen.legend("speedup.png") == ["ideal", "DDP, batch 128 each (weak)"]
    (speedups, efficiencies) = seen.figures["speedup.png"].axes
    assert [text.get_text() for text in (*speedups.texts, *efficiencies.texts)] == ["5.60", "70"]
    bars = seen.figures["throughput.png"].axes[0]
    assert [text.get_text() for text in bars.texts] == ["1,000", "1,800", "3,200", "5,600"]
    assert list(speedups.lines[-1].get_ydata()) == pytest.approx([1, 1.8, 3.2, 5.6])
    assert list(efficiencies.lines[-1].get_ydata()) == pytest.approx([100, 90, 80, 70])

    write_run(tmp_path, "large", [10, 1400, 1400], global_batch=1024, images=59392)
    text, _, figures = compared()
    assert numbers_in(conclusion_of(text)) == ["8", "4.00", "50", "1024"]
    assert len(figures["speedup.png"].axes[0].lines) == 3  # the ideal one, and strict and weak


def test_weak_scaling_of_equal_training_only(tmp_path: Path, compared: Compared) -> None:
    """A learning rate may differ by the rule that all runs follow; with nothing else is it weak scaling."""
    write_run(tmp_path, "one", [10, 1000, 1000], global_batch=128, lr=2.0, lr_scale="linear")
    linear = {"lr": 4.0}
    others = ({"lr": 2.0}, *(linear | other for other in (
        {"precision": "bf16"}, {"images": 20480}, {"global_batch": 512}, {"lr_scale": "none"},
    )))  # fmt: skip
    for i, columns in enumerate((linear, *others)):
        columns = {"global_batch": 256, "lr_scale": "linear"} | columns
        write_run(tmp_path, f"two-{i}", [10, 1900, 1900], **ddp(2, **columns))
    _, table, _ = compared()
    (weak,) = table[(table.devices == 2) & table.weak_efficiency.notna()].itertuples()
    assert (weak.weak_efficiency, weak.lr, weak.precision, weak.weak_baseline) == (0.95, 4, "fp32", "single")


def test_what_was_trained_is_part_of_the_configuration(tmp_path: Path, compared: Compared) -> None:
    """Seeds are repeats; another learning rate, decay, warm-up, rule, width or accumulation is none."""
    different = (
        {"lr": 0.5},
        {"gamma": 0.9},
        {"lr_scale": "linear"},
        {"lr_warmup_images": 6000},
        {"width": 64},
        {"settings": "optimizer=SGD lr=0.1"},
    )
    for i, columns in enumerate(({}, {"seed": 2}, *different, {"accumulate": 2})):
        write_run(tmp_path, f"run-{i}", [10, 1000, 1000], **columns)
    text, table, _ = compared()
    assert sorted(table.runs) == [1, 1, 1, 1, 1, 1, 1, 2]
    for words in ("lr 0.5", "gamma 0.9", "linear lr scale", "lr warm-up 6000", "width 64", "accumulate 2"):
        assert words in text
    assert "optimizer=SGD lr=0.1" in text
    assert "nan" not in text.lower()
    # Each recipe has its own learning rate, fast has no gamma, and a rule gives each batch its rate.
    for i, gamma in enumerate((0.7, 0.9)):
        write_run(tmp_path / "few", f"fast-{i}", [10, 1000], recipe="fast", lr=0.003, gamma=gamma)
    for batch, lr, rule in ((256, 1.0, "none"), (256, 4.0, "linear"), (512, 8.0, "linear")):
        columns = {"lr": lr, "lr_scale": rule, "global_batch": batch}
        write_run(tmp_path / "few", f"classic-{lr:g}", [10, 1000], **columns)
    _, table, _ = compared(tmp_path / "few")
    assert sorted(table.variant) == ["classic", *["classic, linear lr scale"] * 2, "fast"]
    assert sorted(table.runs) == [1, 1, 1, 2]


def test_a_network_with_other_weights_is_another_training(tmp_path: Path, compared: Compared) -> None:
    """Also under the same name."""
    write_run(tmp_path, "small", [10, 1000, 1000], parameters=1_199_882)
    write_run(tmp_path, "large", [10, 40, 40], parameters=29_997_050)
    text = compared().text
    for speed, weights in (("1000", "1,199,882 weights"), ("40", "29,997,050 weights")):
        (row,) = (line.split() for line in text.splitlines() if weights in line)
        assert row[5:7] == [speed, f"{speed}..{speed}"]


def test_a_network_of_ones_own_may_be_called_net(tmp_path: Path, compared: Compared) -> None:
    """Nothing goes by the name of its class: it is another training, with rows and a baseline of its own."""
    tutorial = "Conv2d=2 Linear=2 structure=1111aaaa"
    layers = "Conv2d=5 Linear=1 structure=2222bbbb"
    write_run(tmp_path, "one", [10, 1000, 1000], network=tutorial)
    write_run(tmp_path, "two", [10, 1600, 1600], **ddp(2, network=tutorial))
    write_run(tmp_path, "own-one", [10, 50, 50], stage="mine", network=layers, parameters=5_000_000)
    write_run(tmp_path, "own-two", [10, 90, 90], **ddp(2, stage="mine", network=layers, parameters=5_000_000))
    table = compared().table
    assert list(table[table.stage == "ddp"].speedup) == [1.6]
    of_own = table[table.stage == "mine"]
    assert list(of_own.speedup) == [1, 1.8] and set(of_own.baseline) == {"mine"}


def test_what_cannot_be_relied_on_is_marked(tmp_path: Path, compared: Compared) -> None:
    """Each batch size is one case: images/s of single and of another run, and the mark of the latter."""
    cases = {
        300: ([1000, 1000], ddp(2), [1600, 1650], ""),
        320: ([1000, 1000], ddp(2), [2090, 2090], ""),
        340: ([1000, 1000], ddp(2), [2110, 2110], "q"),
        360: ([1000, 1000], ddp(1), [905, 905], ""),
        380: ([1000, 1000], ddp(1), [890, 890], "q"),
        400: ([1000, 1000], ddp(1), [1110, 1110], "q"),
        420: ([1000, 1000], ddp(2), [1600], "e"),
        440: ([1000], ddp(2), [1600, 1600], "e"),
        460: ([1000, 1000], ddp(2), [1200, 1600], ""),
        480: ([1000, 1000], ddp(2), [1000, 1500], "s"),
        500: ([800, 1200], ddp(2), [1300, 1300], "s"),
        520: ([1000, 1000], dp(2), [1100, 1000], "s"),
        540: ([1000, 1000], ddp(4), [4400], "qe"),
    }
    for batch, (single, other, speeds, _) in cases.items():
        write_run(tmp_path, f"single-{batch}", [10, *single], global_batch=batch)
        write_run(tmp_path, f"other-{batch}", [10, *speeds], **other, global_batch=batch)
    text, table, _ = compared()
    marks = table[table.stage != "single"].set_index("global_batch").doubt.fillna("")
    assert dict(marks) == {batch: mark for batch, (*_, mark) in cases.items()}
    assert cells(text, "ddp", 4)[5] == "qe"
    for mark in "qes":
        assert f"doubt {mark}: " in text and f"{mark} (" in conclusion_of(text)
    assert "doubt qe" in conclusion_of(text)
    assert all(len(line) <= 120 for line in text.splitlines() if line.startswith(("stage", "single", "ddp")))


def test_other_arguments_rates_and_scripts_make_a_speedup_doubtful(
    tmp_path: Path, compared: Compared
) -> None:
    """Each batch size is one case: what the run on two devices has in place of these, and its mark."""
    one = own(1, optimizer="SGD momentum=0", arguments="--dropout=0.1", script="train.py 12345678")
    cases = {
        300: ({}, ""),
        320: ({"learning_rate": 0.5}, "r"),
        340: ({"arguments": "--dropout=0.2"}, "a"),
        360: ({"script": "train.py 87654321"}, "c"),
        380: ({"schedule": "StepLR step_size=9"}, ""),  # whose rates are the same
        400: ({"schedule": "ReduceLROnPlateau", "learning_rate": 0.5}, ""),  # by its losses
    }
    for batch, (other, _) in cases.items():
        write_run(tmp_path, f"one-{batch}", [10, 1000, 1000], **one, global_batch=batch)
        columns = one | own(2, global_batch=batch) | other
        write_run(tmp_path, f"two-{batch}", [10, 1600, 1650], **columns)
    text, table, _ = compared()
    two = table[table.devices == 2].set_index("global_batch")
    assert dict(two.doubt.fillna("")) == {batch: mark for batch, (_, mark) in cases.items()}
    assert two.speedup.notna().all()
    assert "r (the learning rates differ)" in conclusion_of(text)
    # The run on one device whose arguments are the same is the one to compare with.
    write_run(tmp_path, "nearer", [10, 800, 800], **one | {"arguments": "--dropout=0.2"}, global_batch=340)
    _, table, _ = compared()
    two = table[(table.devices == 2) & (table.global_batch == 340)].iloc[0]
    assert two.speedup > 2 and pd.isna(two.doubt)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--dropout 0.1 --lr=0.3 -v", "--dropout=0.1 --lr=0.3 -v"),
        ("--drop-out 0.1 --warmup_epochs 5", "--drop-out=0.1 --warmup_epochs=5"),
        ("--seed 3 --manual_seed=4 --run-id a --run_name b --resume --resume_from_checkpoint x", ""),
        ("--out a --output=b --output_dir c --logdir d --save-folder e", ""),
        ("/scratch/7 --data ./images --config /home/me/a.yaml", "--config=a.yaml"),
        ("--genes A B 'C D'", "--genes=A,B,C_D"),
        ("model.layers=2 hydra.run.dir=x seed=3", "model.layers=2"),
        ("student teacher --fast", "student teacher --fast"),
        ("--how=eager --compile", "--compile --how=eager"),
    ],
)
def test_what_a_command_line_says_of_a_training(line: str, words: str) -> None:
    """Neither which repeat it is, nor where its files are; the last one is of an earlier record."""
    assert variants.arguments_in_words(line) == words
    assert variants.arguments_in_words(words) == words


def test_arguments_that_give_a_recorded_number_raise_no_doubt(tmp_path: Path, compared: Compared) -> None:
    """As those of the number of devices and of the batch of each do; others are named."""
    one = own(1, arguments="--gpus 1 --batch-size 256 --dropout 0.1")
    write_run(tmp_path, "one", [10, 1000, 1000], **one)
    write_run(
        tmp_path, "two", [10, 1600, 1650], **one | own(2, arguments="--gpus 2 --batch-size 128 --dropout 0.1")
    )
    write_run(tmp_path, "four", [10, 3000, 3000], **one | own(4, arguments="--gpus 4 --batch-size 64 --fast"))
    text, table, _ = compared()
    assert list(table.doubt.fillna("")) == ["", "", "a"]
    assert table.other_arguments.iloc[-1] == "--dropout 0.1, --fast" and "--dropout 0.1, --fast" in text


def test_the_first_epoch_of_a_warm_up_makes_no_other_rates() -> None:
    """Its first step depends on the number of steps; but it counts where both have trained for no other."""
    assert not variants.other_rates("1:0.1 2:1", "1:0.2 2:1 3:1")
    assert variants.other_rates("1:0.1 2:1", "1:0.1 2:0.9")
    assert variants.other_rates("1:0.1", "1:0.2 2:1")


def test_schedules_that_differ_within_a_long_training_are_rows(tmp_path: Path, compared: Compared) -> None:
    """Though they begin and end alike."""
    for name, lowered_in in (("early", 5), ("late", 7), ("again", 7)):
        path = write_run(tmp_path, name, [10] + [1000] * 7, **own(1, optimizer="SGD momentum=0"))
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        rows["learning_rate"] = ["0.01" if int(epoch) >= lowered_in else "0.1" for epoch in rows.epoch]
        rows.to_csv(path, index=False)
    table = compared().table.set_index("variant")
    assert dict(table.runs) == {"rates epoch-1:0.1,epoch-5:0.01": 1, "rates epoch-1:0.1,epoch-5:0.1": 2}


def test_what_forbids_a_speedup_is_told_in_the_words_that_differ(tmp_path: Path, compared: Compared) -> None:
    write_run(tmp_path, "one", [10, 1000], **own(1, optimizer="SGD momentum=0 weight_decay=0.1"))
    write_run(tmp_path, "two", [10, 1600], **own(2, optimizer="SGD momentum=0.9 weight_decay=0.1"))
    assert "optimizer (momentum 0.9, momentum 0)" in compared().text


def test_the_time_to_an_accuracy(tmp_path: Path, compared: Compared) -> None:
    """To the first epoch of each run that had it: the median of the repeats that did, and how many did."""
    slow = {"train_seconds": 8.0}
    write_run(tmp_path, "one", [10] * 5, **slow)  # 98.5 % after 30 s, 24 of them training, and more later
    write_run(tmp_path, "one-again", [10] * 3, **slow)
    write_run(tmp_path, "one-short", [10] * 2, **slow)
    write_run(tmp_path, "two", [10] * 2, **ddp(2))
    write_run(tmp_path, "own", [10] * 3, **own(1, test_accuracy=float("nan")))
    text, table, _ = compared(target=98.5)
    assert "s to 98.5 %" in text
    assert " ".join(cells(text, "single", 1)).endswith("30.0 (2 of 3)")
    for stage, devices in (("ddp", 2), ("depth", 1)):
        assert " ".join(cells(text, stage, devices)).endswith("not reached")
    row = table[table.stage == "single"].iloc[0]
    assert (row.target_s, row.target_train_s, row.target_runs) == (30, 24, 2)
    assert "| 24.0 |" in unpadded(tmp_path / "out" / "comparison.md")
    text, table, _ = compared(target=98)
    assert cells(text, "ddp", 2)[-1] == "10.0" and cells(text, "single", 1)[-1] == "10.0"
    text, table, _ = compared()
    assert "not reached" not in text and "target_s" not in table


def test_each_folder_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The speedup in a folder is against its own run on one device; equal configurations are neighbours."""
    for name, factor in {"ada": 1, "bob": 2}.items():
        runs = tmp_path / name / "runs"
        write_run(runs, f"one-{name}", [50, 100 * factor, 100 * factor])
        write_run(runs, f"two-{name}", [90, 180, 180], stage="ddp", world_size=2, devices=2)
        (tmp_path / name / "comparison.csv").write_text("not a run")
    (tmp_path / "eve" / "runs").mkdir(parents=True)
    folders = [tmp_path / name / "runs" for name in ("ada", "bob", "eve")]
    assert report_each(folders, tmp_path / "out", target=98).endswith("each.md, each.csv")
    assert "s to 98 %" in (tmp_path / "out" / "each.md").read_text()
    table = pd.read_csv(tmp_path / "out" / "each.csv")
    rows = list(zip(table.folder, table.devices, table.speedup, strict=True))
    ada, bob, _ = map(str, folders)
    assert rows == [(ada, 1, 1), (bob, 1, 1), (ada, 2, 1.8), (bob, 2, 0.9)]
    printed = capsys.readouterr().out
    assert printed.count("Skipped: ") == 1 and f"Skipped: {folders[2]} has no runs." in printed
    assert f"| {ada} | ddp | 2 | 256 |" in unpadded(tmp_path / "out" / "each.md")
    assert "dataset" not in printed
    write_run(tmp_path / "eve" / "runs", "three", [50, 100], dataset="synthetic")
    report_each(folders, tmp_path / "out")
    printed = capsys.readouterr().out
    assert "SYNTHETIC DATA" in printed and f"{folders[2]}  synthetic  single" in printed
    shutil.rmtree(folders[2])
    folders[2].mkdir()
    with pytest.raises(UserError, match="no runs found in .*eve"):
        report_each(folders[2:], tmp_path / "out")


def test_own_baseline_is_named(tmp_path: Path, compared: Compared) -> None:
    write_run(tmp_path, "two", [10, 1500], **ddp(2))
    assert "cannot be judged" in conclusion_of(compared().text)
    write_run(tmp_path, "one", [10, 1000], **ddp(1))
    text, table, _ = compared()
    assert list(table.speedup) == [1, 1.5] and set(table.baseline) == {"ddp"}
    assert "[1] speedup against ddp" in text
    assert "as fast as DDP on one" in conclusion_of(text)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"global_batch": 768}, "global batch 768"),
        ({"global_batch": 1024, "images": 59392}, "global batch 1024"),
        ({"precision": "bf16"}, "precision (bf16, fp32)"),
        ({"images": 20480}, "images per epoch (20480, 59904)"),
        ({"dataset": "synthetic"}, "dataset (synthetic, mnist)"),
        ({"model": "UNet"}, "model (UNet, Net)"),
        ({"loader": "workers", "workers_per_loader": 4}, "loader workers (4, 0)"),
        ({"recipe": "fast"}, "recipe (fast, classic)"),
        ({"accumulate": 4}, "micro-batches per step (4, 1)"),
        ({"debug": True}, "--debug (True, False)"),
        ({"lr": 0.5}, "learning rate (0.5, 1)"),
        ({"lr": float("nan")}, "learning rate (unknown, 1)"),
        ({"gamma": 0.9}, "gamma (0.9, 0.7)"),
        ({"lr_scale": "sqrt"}, "--lr-scale (sqrt, none)"),
        ({"lr_warmup_images": 6000}, "--lr-warmup-images (6000, 0)"),
        ({"width": 64}, "width (64, 32)"),
        ({"device_name": "NVIDIA A100"}, "device (NVIDIA A100, NVIDIA H200)"),
        ({"recipe": "fast", "global_batch": 512}, "recipe (fast, classic) and global batch (512, 256)"),
    ],
)  # fmt: skip
def test_unequal_runs_are_not_compared(
    tmp_path: Path, compared: Compared, columns: dict[str, object], reason: str
) -> None:
    write_run(tmp_path, "one", [10, 1000])
    write_run(tmp_path, "two", [10, 1500], **ddp(2, **columns))
    text, table, _ = compared()
    two = table[table.stage == "ddp"].iloc[0]
    assert pd.isna(two.speedup) and reason in two.why
    assert reason in text and "cannot be judged" in conclusion_of(text)
    assert not (tmp_path / "out" / "speedup.png").exists()


def test_threads_count_where_they_are_the_workers(tmp_path: Path, compared: Compared) -> None:
    """Two threads against one is no comparison of CPU workers; a GPU is as fast with either.

    Each kind of hardware has a section of its own.
    """
    for device in (CPU, GPU):
        write_run(tmp_path, f"one-{device[:3]}", [10, 1000], device_name=device)
        write_run(
            tmp_path, f"two-{device[:3]}", [10, 1500], **ddp(2, threads_per_worker=2, device_name=device)
        )
    text, table, _ = compared()
    assert f"{CPU}, mnist, Net: " in text and "1.50x" in conclusion_of(text)
    two = table[table.stage == "ddp"].set_index("device_name")
    assert pd.isna(two.speedup[CPU]) and "threads per worker (2, 1)" in two.why[CPU]
    assert two.speedup[GPU] == 1.5


def test_each_batch_has_its_own_line(tmp_path: Path, compared: Compared) -> None:
    for batch, one, two in ((128, 1000, 1200), (1024, 2000, 3800)):
        write_run(tmp_path, f"one-{batch}", [10, one, one], global_batch=batch)
        write_run(tmp_path, f"two-{batch}", [10, two, two], **ddp(2, global_batch=batch))
    text, table, _ = compared()
    assert list(table[table.stage == "ddp"].speedup) == [1.2, 1.9]
    assert numbers_in(conclusion_of(text)) == ["2", "1.90", "95", "1024"]


def test_data_parallel_on_one_device_has_no_speedup(tmp_path: Path, compared: Compared) -> None:
    write_run(tmp_path, "one", [10, 1000], device_name=CPU)
    write_run(tmp_path, "dp", [10, 2000], **dp(1, device_name=CPU))
    text, table, _ = compared()
    assert table[table.stage == "dp"].speedup.isna().all()
    assert "[1] DataParallel had one device" in text
    assert "DataParallel had only one device" in conclusion_of(text)
    assert "2.00" not in text
    assert f"{CPU}: CPU workers standing in for GPUs" in text


def test_a_run_that_has_only_a_warm_up_has_no_speed(tmp_path: Path, compared: Compared) -> None:
    """Such a run keeps its accuracy, has no throughput, and is no baseline."""
    write_run(tmp_path, "one", [1000])
    assert [*compared().figures] == ["accuracy.png"]
    write_run(tmp_path, "two", [10, 1500], **ddp(2))
    text, table, _ = compared()
    one, two = table.iloc[0], table.iloc[1]
    assert pd.isna(one.images_per_s) and one.test_accuracy == 98.0
    assert cells(text, "single", 1)[1:5] == ["-", "-", "-", "-"] and "98.00" in cells(text, "single", 1)
    assert "only a warm-up" in one.why
    assert pd.isna(two.speedup) and "only a warm-up" in two.why
    assert "?" not in text and "nan" not in text.lower()


def test_copies_count_once_and_neither_samples_of_a_job_nor_the_table_and_code_of_a_sweep_are_runs(
    tmp_path: Path, compared: Compared
) -> None:
    path = write_run(tmp_path, "one", [10, 1000, 1200])
    shutil.copy(path, tmp_path / "copy.csv")
    (tmp_path / "12" / "monitor").mkdir(parents=True)
    (tmp_path / "12" / "monitor" / "n1.csv").write_text("time,what\n1,node\n")
    (tmp_path / "sweep.csv").write_text("run,lr\na,1\n")
    # The code of a sweep, in which the checkout has runs of its own.
    write_run(tmp_path / "code", "other", [10, 2000, 2400])
    (tmp_path / "code.json").touch()
    text = compared(tmp_path, path).text
    assert cells(text, "single", 1)[-2:] == ["1", "3"]
    assert "Skipped" not in text


def test_synthetic_data_and_mixed_versions_are_announced(tmp_path: Path, compared: Compared) -> None:
    write_run(tmp_path, "one", [10, 1000], dataset="synthetic")
    write_run(tmp_path, "two", [10, 1000], torch_version="2.14.0")
    text, _, _ = compared()
    assert "SYNTHETIC DATA" in text
    assert "2.14.0, 2.15.0" in text
    assert "NOT MNIST" in (tmp_path / "out" / "comparison.md").read_text()
    (tmp_path / "one.only").mkdir()
    write_run(tmp_path / "one.only", "real", [10, 1000])
    assert "SYNTHETIC" not in compared(tmp_path / "one.only").text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no csv", "There is no CSV"),
        ("not there", "in is not there: give CSV files"),
        ("broken", "broken.csv: not read, it has no rows"),
        ("out is a file", "out cannot be written to"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    tmp_path: Path, compared: Compared, case: str, words: str
) -> None:
    source = tmp_path / "in"
    if case != "not there":
        source.mkdir()
    if case == "broken":
        (source / "broken.csv").touch()
    if case == "out is a file":
        write_run(source, "one", [10, 1000])
        (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match=words) as caught:
        compared(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "words"),
    [("--colour", "--colour. See --help"), ("--target=101", "101 must be more than 0 and at most 100")],
)
def test_plot_results_refuses_in_one_sentence(
    plot: Callable, tmp_path: Path, option: str, words: str
) -> None:
    done = plot(tmp_path, option, cwd=tmp_path)
    assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_plot_results_writes_table_and_figures(plot: Callable, tmp_path: Path) -> None:
    """From another folder: all it prints and writes, and three PNGs with something on them."""
    write_run(tmp_path / "a", "one", [10, 1000])
    write_run(tmp_path / "a", "two", [10, 1600, 1700], **ddp(2))
    written = ("comparison.md", "comparison.html", "comparison.csv", *FIGURES)
    done = plot("a", "--out", "out", "--target", 98, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert cells(done.stdout, "ddp", 2)[1:4] == ["1650", "1600..1700", "1.65"]
    assert "s to 98 %" in done.stdout
    assert "1.65x" in conclusion_of(done.stdout)
    assert f"Written to out: {', '.join(written)}\n" in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(written)
    for name in FIGURES:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
        pixels = matplotlib.image.imread(tmp_path / "out" / name)[..., :3]
        assert pixels.shape[1] > 900 and pixels.shape[0] > 300
        # Ink in the middle, where the data is, and not on the frame and its labels only.
        height, width = pixels.shape[:2]
        assert pixels[height // 4 : -height // 3, width // 4 : -width // 4].std() > 0.05


def test_figures_do_not_depend_on_the_settings_of_the_user(plot: Callable, tmp_path: Path) -> None:
    """A backend that matplotlib does not know, LaTeX where there is none, and a size of their own."""
    write_run(tmp_path / "runs", "one", [10, 1000])
    write_run(tmp_path / "runs", "two", [10, 1600, 1700], **ddp(2))
    succeeded(plot("runs", "--out", "out", cwd=tmp_path))
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nsavefig.dpi: 7\n")
    # The fork server has loaded matplotlib already.
    again = [sys.executable, ROOT / "results" / "plot_results.py", "runs", "--out", "again"]
    done = subprocess.run(
        again, cwd=tmp_path, env=ENVIRONMENT | {"MPLBACKEND": "Qt4Agg"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in FIGURES:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_one_page_to_share(plot: Callable, forking: Forking, tmp_path: Path) -> None:
    """Alone in a folder it has all: the rows, the figures, the command, and the answer to how many GPUs."""
    runs = ROOT / "results" / "sample" / "cpu-2-cores" / "runs.csv"
    succeeded(plot(runs, "--out", tmp_path, "--target", 98))
    page = (tmp_path / "comparison.html").read_text()
    figures = re.findall(r'<img alt="\w+" src="data:image/png;base64,([^"]+)">', page)
    assert [base64.b64decode(data) for data in figures] == [
        (tmp_path / name).read_bytes() for name in FIGURES
    ]
    assert not re.findall(r"https?:|<link|<script|@import|url\(", page)
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    rows = [line for line in (tmp_path / "comparison.md").read_text().splitlines() if line.startswith("| ")]
    shown = [re.findall(r"<t[hd]>(.*)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL)]
    assert shown[:5] == [[cell.strip() for cell in line[2:-1].split(" | ")] for line in rows]
    asked = [ROOT / "results" / "how_many_gpus.py", runs, "--target", 98, "--json"]
    answer = json.loads(succeeded(forking.run(*asked, env=ENVIRONMENT)).stdout)
    assert answer["best"]["devices"] == 2 and f"<p>{answer['sentence']}</p>" in page
    program = ROOT / "results" / "plot_results.py"
    command = shlex.join(map(str, ["python", program, runs, "--out", tmp_path, "--target", 98]))
    assert f"{command}</pre>" in unescape(page)


def test_a_page_to_share_says_why_there_is_no_answer(plot: Callable, tmp_path: Path) -> None:
    """Names of a user's own are text there, not HTML."""
    write_run(tmp_path, "one", [10, 1000], **own(1, arguments="--tag=<b>"))
    write_run(tmp_path, "slow", [10, 100], **own(1, arguments="--tag=<i>"))
    succeeded(plot(tmp_path, "--out", tmp_path))
    page = (tmp_path / "comparison.html").read_text()
    assert "one set of runs at a time" in page
    assert "--tag &lt;b&gt;" in page and "<b>" not in page


def test_a_table_of_an_own_training(tmp_path: Path, compared: Compared) -> None:
    """Any name, network and data: its own section, its own run on one device as the baseline."""
    for run_id, speed, columns in (
        ("one", 1000, {}),
        ("two", 1600, ddp(2)),
        ("own-one", 50, own(1)),
        ("own-two", 90, own(2)),
        ("own-four", 160, own(4)),
    ):
        write_run(tmp_path, run_id, [10, speed, speed], **columns)
    seen = compared()
    rows = seen.table[seen.table.stage == "depth"]
    assert list(rows.speedup) == [1, 1.8, 3.2] and set(rows.baseline) == {"depth"}
    assert list(seen.table[seen.table.stage == "ddp"].speedup) == [1.6]
    assert "speedup against depth" in seen.text
    assert f"{GPU}, mnist, Net: " in seen.text and f"{GPU}, rooms, UNet: " in seen.text
    assert numbers_in(conclusion_of(seen.text)) == ["2", "1.60", "80", "256", "4", "3.20", "80", "256"]
    for name in FIGURES:
        assert seen.titles(name) == [f"{GPU} · mnist, Net", f"{GPU} · rooms, UNet"]
    assert seen.legend("speedup.png") == ["ideal", "DDP, batch 256", "depth, batch 256"]


def test_own_name_on_the_tutorials_network(tmp_path: Path, compared: Compared) -> None:
    """Equal to `single` in all else: that is its baseline, and its row comes after the tutorial's."""
    write_run(tmp_path, "one", [10, 1000])
    write_run(tmp_path, "two", [10, 1600], **ddp(2))
    write_run(tmp_path, "mine", [10, 1700], **ddp(2, stage="buckets"))
    write_run(tmp_path, "mine-one", [10, 900], **ddp(1, stage="buckets"))
    write_run(tmp_path, "threads", [10, 700], **dp(2, stage="a copy of dp"))
    text, table, _ = compared()
    assert list(table.stage) == ["single", "ddp", "a copy of dp", "buckets", "buckets"]
    assert list(table.speedup) == [1, 1.6, 0.7, 0.9, 1.7] and set(table.baseline) == {"single"}
    of_ddp = ["2", "1.60", "80", "256"]
    of_dp = ["2", "0.70", "35", "256"]
    of_buckets = ["2", "1.70", "85", "256"]
    assert numbers_in(conclusion_of(text))[:12] == of_ddp + of_dp + of_buckets
    assert "there is no" not in conclusion_of(text)


def test_a_table_without_accuracy(tmp_path: Path, compared: Compared) -> None:
    """A regression has none: a dash in the table, and no figure. Nothing is said of the tutorial's stages."""
    write_run(tmp_path, "one", [10, 50, 50], **own(1, test_accuracy=float("nan")))
    seen = compared()
    assert "cannot be judged" in conclusion_of(seen.text) and "there is no" not in conclusion_of(seen.text)
    assert cells(seen.text, "depth", 1)[5:] == ["[1]", "-", "30.0", "300", "1", "3"]
    assert list(seen.figures) == ["throughput.png"]


def test_unreadable_folder_is_named(
    tmp_path: Path, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "good", [10, 1000])
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    text = compared().text
    assert re.search(r"Skipped: \S*/locked: not read, Permission denied", text)
    assert cells(text, "single", 1)[1] == "1000"


def test_tables_fit_a_terminal(plot: Callable, tmp_path: Path) -> None:
    """With every column and many settings: the least needed ones are in comparison.md only."""
    settings = {"loader": "workers", "workers_per_loader": 4, "width": 64, "lr_scale": "linear", "lr": 2.0}
    write_run(tmp_path, "one", [10, 1000], global_batch=128)
    write_run(tmp_path, "large", [10, 1000, 1000])
    write_run(tmp_path, "two", [10, 21000, 22000], **ddp(2, nodes=2))
    write_run(tmp_path, "other", [10, 21000, 22000], **ddp(2, nodes=2, **settings))
    text = plot(tmp_path, "--out", tmp_path / "out", "--target", 98.25).stdout
    table = text.split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= 120 and {"variant", "doubt", "note"} <= set(table[0].split())
    assert [line.strip() for line in table[-2:]] == ["linear lr scale,", "width 64"]  # below 4 loader workers
    assert "In comparison.md only: eval s, train s to it, mem. MB, " in text
    assert "| eval s |" in unpadded(tmp_path / "out" / "comparison.md")


def test_a_table_has_the_unit_of_its_trainings(compared: Compared, tmp_path: Path) -> None:
    """Speeds in tokens/s, if all rows of a section have that unit; otherwise in samples/s, which all have."""

    def write(folder: str, name: str, per_s: float, unit: str, **columns: object) -> None:
        path = write_run(tmp_path / folder, name, [per_s / 2, per_s, per_s], **columns)
        rows = "".join(f"{epoch}\t{unit}_per_s\t\t{8 * per_s}\n" for epoch in (2, 3))
        speed_row = f"1\tgraphs_per_s\ttraining\t{99}\n"  # which the script has logged
        records.beside(path, "metrics").write_text(f"epoch\tmetric\tof\tvalue\n{speed_row}{rows}")

    write("same", "one", 100, "tokens", model="GPT")
    write("same", "two", 190, "tokens", model="GPT", **ddp(2))
    write_run(tmp_path / "same", "of images", [50, 60, 70])
    write("mixed", "one", 100, "tokens")
    write_run(tmp_path / "mixed", "two", [100, 190, 190], **ddp(2))
    seen = compared(tmp_path / "same")
    assert re.search(r"tokens/s +min..max .*\n.* 800 +800..800 .*\n.* 1520 +1520..1520 +1.90 ", seen.text)
    (title,) = (line for line in seen.text.splitlines() if ", GPT: " in line)
    assert re.search(r"\d samples\b", title) and "images" not in title
    assert re.search(r"images/s +min..max .*\n.* 65 +60..70 ", seen.text)
    speeds = [axes.get_xlabel() for axes in seen.figures["throughput.png"].axes]
    assert sorted(text.split()[1] for text in speeds) == ["images/s:", "tokens/s:"]
    assert sorted(seen.table.images_per_s) == [65, 100, 190]
    seen = compared(tmp_path / "mixed")
    assert re.search(r"samples/s +min..max .*\n.* 100 +100..100 .*\n.* 190 +190..190 +1.90 ", seen.text)


def test_a_report_leaves_no_figure_of_other_runs(tmp_path: Path) -> None:
    """The second report is of one run, which has no speedup."""
    one = write_run(tmp_path, "one", [300, 400])
    two = write_run(tmp_path, "two", [300, 700], **ddp(2))
    out = tmp_path / "out"
    report([one, two], out)
    assert (out / "speedup.png").exists()
    report([one], out)
    assert {path.name for path in out.glob("*.png")} == {"throughput.png", "accuracy.png"}


def test_a_full_disk_leaves_the_figures_of_before(tmp_path: Path) -> None:
    runs, out = write_run(tmp_path, "single-1", [300, 400]), tmp_path / "out"
    report([runs], out)
    before = (out / "throughput.png").read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))
    try:
        with pytest.raises(UserError, match="cannot be written to"):
            report([runs], out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (out / "throughput.png").read_bytes() == before
