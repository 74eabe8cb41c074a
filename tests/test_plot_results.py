"""results/plot_results.py, run as a user runs it, on small CSVs whose right answers are known."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pandas as pd
import pytest

from trainkit.records import COLUMNS, Recorder

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "results" / "plot_results.py"
GPU, CPU = "NVIDIA H200", "CPU: AMD EPYC 9V74"
FIGURES = ("throughput.png", "speedup.png", "accuracy.png")


def write_run(folder: Path, run_id: str, speeds: list[float], **facts: object) -> Path:
    """A run whose epochs had these images/s. The first one is the warm-up; facts are columns."""
    row = dict.fromkeys(COLUMNS, "") | {
        "stage": "single",
        "run_id": run_id,
        "dataset": "mnist",
        "loader": "resident",
        "recipe": "classic",
        "world_size": 1,
        "nodes": 1,
        "devices": 1,
        "device_name": GPU,
        "workers_per_loader": 0,
        "threads_per_worker": 1,
        "global_batch": 256,
        "batch_per_device": 256,
        "accumulate": 1,
        "precision": "fp32",
        "compiled": False,
        "seed": 0,
        "torch_version": "2.15.0",
    }
    row |= {"steps": 234, "images": 59904, "train_loss": 0.1, "test_loss": 0.1, "learning_rate": 1.0} | facts
    recorder = Recorder(folder, row)
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
        recorder.add(**(epoch | {k: v for k, v in facts.items() if k in epoch}))
    return recorder.path


def ddp(devices: int, **facts: object) -> dict[str, object]:
    return {"stage": "ddp", "devices": devices, "world_size": devices} | facts


def dp(devices: int, **facts: object) -> dict[str, object]:
    return {"stage": "dp", "devices": devices} | facts


def plot(*args: object, cwd: Path = ROOT, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, str(SCRIPT), *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def report(folder: Path) -> tuple[str, pd.DataFrame]:
    """What the terminal shows, wrapped lines joined, and comparison.csv."""
    done = plot(folder, "--out", folder / "out")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.replace("\n    ", " "), pd.read_csv(folder / "out" / "comparison.csv")


def cells(text: str, stage: str, devices: int) -> list[str]:
    """The one row of this stage and device count in the terminal's table, without the first two cells."""
    (line,) = re.findall(rf"^{stage} +{devices} .*$", text, re.MULTILINE)
    return line.split()[2:]


def test_numbers(tmp_path: Path) -> None:
    """Medians leave the warm-up out and take in the repeats; speedup and efficiency follow."""
    write_run(tmp_path, "one", [10, 1000, 1100])
    write_run(tmp_path, "one-again", [10, 1200])
    write_run(tmp_path, "two", [9000, 1750, 1650, 1850], **ddp(2))
    write_run(tmp_path, "dp", [10, 550], **dp(2))
    write_run(tmp_path, "ddp-one", [10, 880], **ddp(1))
    text, table = report(tmp_path)

    # batch, images/s, min..max speedup, efficiency, accuracy, wall, memory, runs, epochs
    assert " ".join(cells(text, "single", 1)) == "256 1100 1000..1200 1.00 100 98.38 25.0 300 2 2..3"
    assert " ".join(cells(text, "ddp", 2)) == "256 1750 1650..1850 1.59 80 98.75 40.0 300 1 4"
    assert " ".join(cells(text, "dp", 2)) == "256 550 550..550 0.50 25 98.25 20.0 300 1 2"
    assert cells(text, "ddp", 1)[3:5] == ["0.80", "80"]  # its own row is no baseline beside a single run
    row = table[table.devices == 2].iloc[-1]
    assert (row.images_per_s, row.slowest, row.fastest) == (1750, 1650, 1850)
    assert row.speedup == pytest.approx(1750 / 1100) and row.efficiency == pytest.approx(1750 / 2200)
    assert (row.baseline, row.steady_epochs, row.eval_seconds) == ("single", 3, 0.5)
    assert text.splitlines()[-1] == (
        "DDP on 2 workers trained 1.59x as fast as single (80 % efficiency at global batch 256); "
        "DataParallel on 2 devices trained 0.50x as fast as single (25 % efficiency at global batch 256), "
        "which is slower than one."
    )
    assert "| ddp | 2 | 256 | 1750 | 1650..1850 | 1.59 | 80 |" in (tmp_path / "out/comparison.md").read_text()


def test_own_baseline_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [10, 1000], **ddp(1))
    write_run(tmp_path, "two", [10, 1500], **ddp(2))
    text, table = report(tmp_path)
    assert list(table.speedup) == [1, 1.5] and set(table.baseline) == {"ddp"}
    assert "[1] speedup against ddp on one device: there is no equal single run." in text
    assert "1.50x as fast as DDP on one (75 % efficiency" in text and "there is no DataParallel run" in text


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"global_batch": 512}, "no otherwise equal 1-device run with global batch 512 to compare with"),
        ({"global_batch": 1024, "images": 59392}, "no otherwise equal 1-device run with global batch 1024"),
        ({"precision": "bf16"}, "differs from the nearest 1-device run (single) in precision (bf16, fp32)"),
        ({"images": 20480}, "in images per epoch (20480, 59904)"),
        ({"dataset": "synthetic"}, "in dataset (synthetic, mnist)"),
        ({"loader": "workers", "workers_per_loader": 4}, "in loader (workers, resident) and loader"),
        ({"recipe": "fast"}, "in recipe (fast, classic)"),
        ({"compiled": True}, "in compiled (True, False)"),
        ({"accumulate": 4}, "in micro-batches per step (4, 1)"),
        ({"device_name": "NVIDIA A100"}, "in device (NVIDIA A100, NVIDIA H200)"),
        ({"recipe": "fast", "global_batch": 512}, "in recipe (fast, classic) and global batch (512, 256)"),
    ],
)  # fmt: skip
def test_unequal_runs_are_not_compared(tmp_path: Path, facts: dict[str, object], reason: str) -> None:
    write_run(tmp_path, "one", [10, 1000])
    write_run(tmp_path, "two", [10, 1500], **ddp(2, **facts))
    text, table = report(tmp_path)
    two = table[table.stage == "ddp"].iloc[0]
    assert pd.isna(two.speedup) and reason in two.why
    assert reason in text and "cannot be judged here" in text
    assert not (tmp_path / "out" / "speedup.png").exists()


def test_threads_count_where_they_are_the_workers(tmp_path: Path) -> None:
    """Two threads against one is no comparison of CPU workers; a GPU is as fast with either."""
    for device in (CPU, GPU):
        write_run(tmp_path, f"one-{device[:3]}", [10, 1000], device_name=device)
        write_run(
            tmp_path, f"two-{device[:3]}", [10, 1500], **ddp(2, threads_per_worker=2, device_name=device)
        )
    _, table = report(tmp_path)
    two = table[table.stage == "ddp"].set_index("device_name")
    assert pd.isna(two.speedup[CPU]) and "in threads per worker (2, 1)" in two.why[CPU]
    assert two.speedup[GPU] == 1.5


def test_each_batch_has_its_own_line(tmp_path: Path) -> None:
    for batch, one, two in ((128, 1000, 1200), (1024, 2000, 3800)):
        write_run(tmp_path, f"one-{batch}", [10, one], global_batch=batch)
        write_run(tmp_path, f"two-{batch}", [10, two], **ddp(2, global_batch=batch))
    text, table = report(tmp_path)
    assert list(table[table.stage == "ddp"].speedup) == [1.2, 1.9]
    assert "1.90x as fast as single (95 % efficiency at global batch 1024) at best, 1.20x at worst" in text


def test_no_one_device_run_at_all(tmp_path: Path) -> None:
    write_run(tmp_path, "two", [10, 1500], **ddp(2))
    text, _ = report(tmp_path)
    assert "DDP on 2 workers cannot be judged here (no 1-device run to compare with)" in text


def test_data_parallel_on_one_device_has_no_speedup(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [10, 1000], device_name=CPU)
    write_run(tmp_path, "dp", [10, 2000], **dp(1, device_name=CPU))
    text, table = report(tmp_path)
    assert table[table.stage == "dp"].speedup.isna().all()
    assert "[1] DataParallel had one device and ran the plain model" in text
    assert "DataParallel had only one device and cannot be judged here" in text
    assert "2.00" not in text
    assert f"{CPU}: CPU workers standing in for GPUs." in text


def test_warm_up_only(tmp_path: Path) -> None:
    """Such a run keeps its accuracy, has no throughput, and is no baseline."""
    write_run(tmp_path, "one", [1000])
    write_run(tmp_path, "two", [10, 1500], **ddp(2))
    text, table = report(tmp_path)
    one, two = table.iloc[0], table.iloc[1]
    assert pd.isna(one.images_per_s) and one.test_accuracy == 98.0
    assert cells(text, "single", 1)[1:5] == ["-", "-", "-", "-"] and "98.00" in cells(text, "single", 1)
    assert "needs --epochs 2 or more" in one.why
    assert pd.isna(two.speedup) and "the 1-device run to compare with (single) has only a warm-up" in two.why
    assert "?" not in text and "nan" not in text.lower()


def test_only_warm_up_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [1000])
    report(tmp_path)
    assert [name for name in FIGURES if (tmp_path / "out" / name).exists()] == ["accuracy.png"]


def test_copies_count_once(tmp_path: Path) -> None:
    path = write_run(tmp_path, "one", [10, 1000, 1200])
    shutil.copy(path, tmp_path / "copy.csv")
    done = plot(tmp_path, path, "--out", tmp_path / "out")
    assert done.returncode == 0 and cells(done.stdout, "single", 1)[-2:] == ["1", "3"]
    assert "Skipped" not in done.stdout


def test_kinds_of_hardware_stay_apart(tmp_path: Path) -> None:
    for name, scale in ((CPU, 1), (GPU, 100)):
        write_run(tmp_path, f"{name[:3]}1", [10, 1000 * scale], device_name=name)
        write_run(tmp_path, f"{name[:3]}2", [10, 1600 * scale], **ddp(2, device_name=name))
    text, table = report(tmp_path)
    assert list(table[table.stage == "ddp"].speedup) == [1.6, 1.6]
    assert f"{CPU}, mnist: " in text and f"{GPU}, mnist: " in text
    assert (
        "DDP on 2 CPU workers trained 1.60x" in text and f"on {GPU}: DDP on 2 workers trained 1.60x" in text
    )


def test_synthetic_data_and_mixed_versions_are_announced(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [10, 1000], dataset="synthetic")
    write_run(tmp_path, "two", [10, 1000], torch_version="2.14.0")
    text, _ = report(tmp_path)
    assert "SYNTHETIC DATA: generated digits, NOT MNIST." in text
    assert "The runs mix PyTorch versions: 2.14.0, 2.15.0." in text
    assert "NOT MNIST" in (tmp_path / "out" / "comparison.md").read_text()
    (tmp_path / "one.only").mkdir()
    write_run(tmp_path / "one.only", "real", [10, 1000])
    assert "SYNTHETIC" not in plot(tmp_path / "one.only", "--out", tmp_path / "out2").stdout


def test_damaged_files_are_named_and_the_rest_is_reported(tmp_path: Path) -> None:
    good = write_run(tmp_path, "good", [10, 1000]).read_text()
    header, first, second = good.splitlines()
    assert good.endswith(",1\n")  # schema_version is the last column
    damaged = {
        "empty.csv": b"",
        "binary.csv": bytes(range(256)) * 8,
        "header-only.csv": f"{header}\n".encode(),
        "cut.csv": f"{header}\n{first}\n{second[: len(second) // 2]}".encode(),
        "older.csv": f"{header}\n{first[:-1]}0\n".encode(),
        "newer.csv": f"{header}\n{first[:-1]}99\n".encode(),
        "no-version.csv": f"{header.replace(',schema_version', ',x')}\n{first}\n".encode(),
        "no-column.csv": f"{header.replace('images_per_s', 'speed')}\n{first}\n".encode(),
        "no-number.csv": f"{header}\n{first.replace('59904', 'many')}\n".encode(),
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
    text, table = report(tmp_path)
    assert list(table.images_per_s) == [1000]
    skipped = re.findall(r"Skipped: \S*/(\S+): not read, \w+", text)
    assert sorted(skipped) == sorted(damaged)
    assert "good.csv" not in text


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root reads everything")
def test_unreadable_folder_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, "good", [10, 1000])
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    # Root needs to lose the right to ignore permissions.
    prefix = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    try:
        done = plot(tmp_path, "--out", tmp_path / "out", prefix=prefix)
    finally:
        locked.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Skipped: \S*/locked: not read, Permission denied", done.stdout.replace("\n    ", " "))
    assert cells(done.stdout, "single", 1)[1] == "1000"


@pytest.mark.parametrize("case", ["nothing readable", "no csv", "not there", "out is a file"])
def test_one_sentence_instead_of_a_traceback(tmp_path: Path, case: str) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    if case == "nothing readable":
        (source / "broken.csv").write_text("")
        words = "broken.csv: not read, it has no rows"
    elif case == "no csv":
        words = "There is no CSV"
    elif case == "not there":
        source = tmp_path / "nowhere"
        words = "nowhere is not there"
    else:
        write_run(source, "one", [10, 1000])
        out.write_text("")
        words = "out cannot be written to"
    done = plot(source, "--out", out)
    assert done.returncode == 1
    assert words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_figures(tmp_path: Path) -> None:
    """From another folder: three PNGs with something on them; an old one that no run supports goes."""
    write_run(tmp_path / "a", "one", [10, 1000])
    two = write_run(tmp_path / "a", "two", [10, 1600, 1700], **ddp(2))
    done = plot("a", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in FIGURES:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
        pixels = matplotlib.image.imread(tmp_path / "out" / name)[..., :3]
        assert pixels.shape[1] > 900 and pixels.shape[0] > 300
        # Ink in the middle, where the data is, and not on the frame and its labels only.
        height, width = pixels.shape[:2]
        assert pixels[height // 4 : -height // 3, width // 4 : -width // 4].std() > 0.05
    two.unlink()
    assert plot("a", "--out", "out", cwd=tmp_path).returncode == 0
    assert not (tmp_path / "out" / "speedup.png").exists()
