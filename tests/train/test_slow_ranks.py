"""What is reported of each rank: its seconds and memory, which is slow, and with --debug where each is."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from checkout import Checkout
from conftest import Script, failed, places, rows_of, run_stage, succeeded

from manygpus.devices import devices_in_use
from manygpus.record import records
from manygpus.reports.comparison_report import report
from manygpus.training.compute_time import ComputeTime

SMALL = ("--train-size", 240, "--test-size", 100, "--batch-size", 60, "--precision", "fp32", "--epochs", 2)
SMALL += ("--width", 4)


def rank_table(results: Path) -> pd.DataFrame:
    """Return the ranks' files of the starts in `results`, as a user reads them, by epoch."""
    tables = [pd.read_csv(path, sep="\t") for path in (results / "runs").glob("*.ranks.tsv")]
    return pd.concat(tables, ignore_index=True).sort_values("epoch", kind="stable", ignore_index=True)


@pytest.fixture(scope="module")
def slow(script: Script, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The results and the output of two ranks, of which the second sleeps in every step."""
    place = Checkout(tmp_path_factory.mktemp("slow") / "a checkout")
    place.plant("ddp", "faults.before_every_backward(lambda: time.sleep(0.5 * faults.rank()))")
    done = succeeded(script(place.script("ddp"), *SMALL, "--results-dir", place.folder / "results", ranks=2))
    return place.folder / "results", done.stdout


def test_a_slow_rank_is_named(slow: tuple[Path, str], capsys: pytest.CaptureFixture) -> None:
    results, printed = slow
    table = rank_table(results)
    assert list(zip(table.epoch, table["rank"], strict=True)) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    # Both wait for the slower one in every step, so only without the waiting do their times differ.
    for (_, of_epoch), row in zip(table.groupby("epoch"), rows_of(results), strict=True):
        first, second = of_epoch.own_seconds
        assert 0 < first < 2 <= second <= row["train_seconds"]
    who = (
        f"rank 1 on {re.escape(os.uname().nodename)}"
        r" takes \d+\.\dx the median of the others for its own"
    )
    assert len(re.findall(who, printed)) == 1, "that of the epoch after the warm-up"
    report([results], results)
    assert re.search(rf"In ddp-\S+ {who}", " ".join(capsys.readouterr().out.split()))


def test_how_long_a_rank_waits_for_its_batches(tmp_path: Path, script: Script, checkout: Checkout) -> None:
    checkout.plant(
        "single",
        """
        from manygpus.data.loaders import ResidentBatches

        batches_of = ResidentBatches.__iter__

        def slowly(self):
            for batch in batches_of(self):
                time.sleep(0.1)
                yield batch

        ResidentBatches.__iter__ = slowly
        """,
    )
    succeeded(script(checkout.script("single"), *SMALL, "--results-dir", tmp_path))
    for seconds, row in zip(rank_table(tmp_path).data_seconds, rows_of(tmp_path), strict=True):
        assert 0.4 <= seconds < row["train_seconds"]


def test_the_memory_of_every_device_is_told(slow: tuple[Path, str]) -> None:
    results, printed = slow
    least, most = sorted(rank_table(results).peak_memory_mb.iloc[-2:])
    assert 100 < least <= most == rows_of(results)[-1]["peak_memory_mb"]
    (line,) = re.findall(r"peak memory of each device, MB: (\d+), (\d+)", printed)
    # The file has six digits of what was rounded for the log.
    assert sorted(map(int, line)) == pytest.approx([least, most], abs=0.501)


def test_of_each_gpu_of_a_process(tmp_path: Path, script: Script, checkout: Checkout) -> None:
    """DataParallel has one rank and several devices, of which the first is the fullest."""
    gpus = "facts.devices_in_use = lambda device: [torch.device('cuda', index) for index in range(3)]"
    names = "facts.device_name = lambda device: 'H200'"
    memory = "facts.peak_memory_mb = lambda device: [900, 500, 400][device.index]"
    checkout.plant("dp", f"from manygpus.training import run_facts as facts; {gpus}; {names}; {memory}")
    done = succeeded(script(checkout.script("dp"), *SMALL, "--results-dir", tmp_path))
    assert list(rank_table(tmp_path).device) == ["cuda:0", "cuda:1", "cuda:2"] * 2
    assert rows_of(tmp_path)[-1]["peak_memory_mb"] == 900
    assert "peak memory of each device, MB: 900, 500, 400" in done.stdout


def test_the_gpus_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: [0, 5, 7, 0][gpu.index])
    assert devices_in_use(torch.device("cuda", 1)) == [torch.device("cuda", i) for i in (1, 2)]
    assert devices_in_use(torch.device("cpu")) == [torch.device("cpu")]


class Moment:
    """In place of torch.cuda.Event: recorded at the milliseconds that the GPU has reached."""

    reached = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = self.reached

    def elapsed_time(self, other: "Moment") -> float:
        return other.at - self.at


def test_own_time_by_the_clock_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of a batch, then a wait for the others, then the update; and a step that has no update."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    time = ComputeTime(model, optimizer, torch.device("cuda", 0))
    assert math.isnan(time.per_step())
    for milliseconds, wait, update in ((100, 1000, True), (300, 2000, False), (200, 50, True)):
        for _ in range(2):
            Moment.reached += milliseconds / 2
            model(torch.ones(3, 2)).sum().backward()
        Moment.reached += wait
        if update:
            optimizer.step()
        time.end_of_step()
    assert time.per_step() == pytest.approx(0.15)


def test_the_model_without_its_wrapper_drifts_apart(script: Script, tmp_path: Path) -> None:
    """And that is told, though there is a DistributedDataParallel: no step goes through it."""
    place = Checkout(tmp_path / "a checkout")
    without = "lambda wrapper, *images: wrapper.module(*images)"
    place.plant("ddp", f"nn.parallel.DistributedDataParallel.forward = {without}")
    done = script(place.script("ddp"), *SMALL, "--results-dir", tmp_path, ranks=2)
    assert "each of the 2 ranks has trained a Net of its own" in failed(done)


@pytest.mark.parametrize(
    ("own_seconds", "expected"),
    [
        ([(1.0, 1.1, 1.0, 1.6)], "rank 3 on n0 takes 1.6x the median"),
        ([(1.0, 4.0), (1.0, 1.0)], "rank 1 on n0 takes 2.5x the median"),
        ([(1.0, 1.2)], ""),
        ([(1.0,)], ""),
        ([(1.0, math.nan, 9.0)], ""),
    ],
    ids=["one of four", "where it was slow", "a little", "alone", "not known"],
)
def test_who_is_slow(own_seconds: list[tuple[float, ...]], expected: str) -> None:
    """`own_seconds` has a row for each epoch, on a node of its own, with a number for each rank."""
    rows = [
        {"rank": rank, "own_seconds": seconds, "host": f"n{epoch}"}
        for epoch, of_epoch in enumerate(own_seconds)
        for rank, seconds in enumerate(of_epoch)
    ]
    clause = records.slow_rank(rows)
    assert clause == (f"{expected} of the others for its own part of a step" if expected else "")


def test_it_resumes_with_the_run(tmp_path: Path, script: Script) -> None:
    for epochs in (1, 2):
        succeeded(script("single", *SMALL, *places(tmp_path), "--epochs", epochs))
    table = rank_table(tmp_path)
    assert list(table.epoch) == [1, 2]
    for row, own_seconds in zip(rows_of(tmp_path), table.own_seconds, strict=True):
        assert 0 < own_seconds <= row["train_seconds"]


# --- --debug ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_rank_that_hangs_is_named_with_its_line(tmp_path: Path, checkout: Checkout) -> None:
    """Its file has the line, and the flight recorder the collective that it never made."""
    hangs = "faults.after_epoch(1, lambda: faults.before_every_backward(lambda: time.sleep(3600)))"
    checkout.plant("ddp", f"if faults.rank() == 1: {hangs}")
    where = ("--results-dir", tmp_path / "results", "--debug", "--timeout", 20)
    done = run_stage(checkout.script("ddp"), *SMALL, *where, processes=2)
    assert done.returncode == 1
    place_of = rf"on {re.escape(os.uname().nodename)}: cpu CPU: .+, core\(s\) [\d,]+, gloo"
    for rank in (0, 1):
        assert re.search(rf"^rank {rank} {place_of}$", done.stdout, re.MULTILINE)
    assert "error on rank 0: lost the other ranks" in done.stderr
    texts = [(tmp_path / "results" / "debug" / f"debug-rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert all("MASTER_ADDR=" in text and f"\nRANK={rank}\n" in text for rank, text in enumerate(texts))
    source = checkout.script("ddp").read_text().splitlines()
    stacks = [re.findall(r'mnist_ddp\.py", line (\d+) in main', text) for text in texts]
    assert [source[int(lines[-1]) - 1].strip() for lines in stacks] == ["loss.backward()"] * 2
    assert ["faults.py" in text for text in texts] == [False, True]  # which puts the second to sleep
    assert [row["debug"] for row in rows_of(tmp_path / "results")] == [True]
    flight = tmp_path / "results" / "debug" / "flight-of-2"
    assert f"compared: torchfrtrace {flight}" in done.stdout
    assert all(f"TORCH_FR_DUMP_TEMP_FILE={flight}/rank-" in text for text in texts)
    if torch.__version__ >= (2, 14):  # older ones record NCCL only
        analyser = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", flight]
        compared = subprocess.run(analyser, capture_output=True, text=True).stderr
        assert "missing ranks: {1}" in compared and f"mnist_ddp.py:{stacks[0][-1]}" in compared, compared


def test_writing_the_stacks_of_a_rank_at_work_does_not_crash_it(tmp_path: Path) -> None:
    program = (
        "import json, sys, time\nfrom pathlib import Path\nfrom manygpus.distributed import debugging\n"
        "debugging.begin(Path(sys.argv[1]), rank=0, ranks=1, every=0.005)\nbegan = time.monotonic()\n"
        "while time.monotonic() - began < 4: json.dumps([[{}]] * 20, indent=1)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    stacks = (tmp_path / "debug-rank-0.txt").read_text().count("(most recent call first)")
    assert done.returncode == 0 and stacks > 20, done.stderr


def test_debug_in_one_process_and_in_a_folder_that_is_a_file(tmp_path: Path, script: Script) -> None:
    done = succeeded(script("single", *SMALL, "--debug", "--results-dir", tmp_path))
    assert re.search(r"^rank 0 on \S+: cpu CPU: .*, no group$", done.stdout, re.MULTILINE)
    (tmp_path / "file" / "debug").parent.mkdir()
    (tmp_path / "file" / "debug").touch()
    done = script("single", *SMALL, "--debug", "--results-dir", tmp_path / "file")
    assert done.returncode == 1
    assert done.stderr.startswith("error: --debug cannot write to ") and done.stderr.count("\n") == 1
