"""CSVs that no run has written, among good ones: each is named in a sentence, and the others are compared."""

import csv
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPOSITORY, Script, ran, succeeded

from trainkit.compare import comparison
from trainkit.compare.report import report
from trainkit.runtime.errors import UserError
from trainkit.schema import records
from trainkit.schema.records import COLUMNS, RunFiles

SAMPLE = REPOSITORY / "results" / "sample" / "cpu-2-cores" / "runs.csv"
GOOD = "ddp-20261121-041110-f2fc72"  # of these runs, the one of two workers
NUMBERS = ("nan", "inf", "-inf", "-5", "1e308", "", "many", "9" * 5000)
# Column -> cells that it never holds.
ZERO = ["zero\0"] if sys.version_info >= (3, 11) else []  # which csv does not write, nor read, before
REFUSED = {
    "run_id": ["\x1b]0;title\x07"],
    "stage": ["x" * 100_000, "\x1b[31mred", "a\nb", "a\rb", *ZERO, "\u202egnp"],
    "device_name": ["x" * 201],
    "node_list": ["x" * 20_001],
    "devices": ["0", "1e3", str(10**7), *NUMBERS],
    "world_size": ["0", str(10**7)],
    "epoch": ["0", str(10**9)],
    "global_batch": [str(2**63)],
    "warmup": ["2"],
    "images_per_s": ["0", "1e13", *NUMBERS],
    "train_seconds": ["0", "1e10", *NUMBERS],
    "eval_seconds": ["-1"],
    "elapsed_s": NUMBERS,
    "train_loss": ["nan", "inf", "1e308"],
    "test_accuracy": ["inf", "-1", "100.1", "1e308"],
    "peak_memory_mb": ["inf"],
}


def made(folder: Path, name: str, last: dict[str, str] | None = None, **cells: str) -> Path:
    """A copy of a good run with other cells in all its rows, or with those of `last` in its last one."""
    with SAMPLE.open() as file:
        good = [row for row in csv.DictReader(file) if row["run_id"] == GOOD]
    rows = [row | {"run_id": name} | cells for row in good]
    rows[-1] |= last or {}
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / f"{name}.csv"


def test_what_no_run_has_written_is_named_and_the_rest_is_compared(plot: Script, tmp_path: Path) -> None:
    """A hundred files in one call: each is skipped for its line and column, or for what it is."""
    folder = tmp_path / "hostile"
    reasons = {}
    for column, cells in REFUSED.items():
        for i, cell in enumerate(cells):
            line = 5 if "\n" in cell or "\r" in cell else 4
            reasons[made(folder, f"{column}-{i}", {column: cell})] = f"line {line}, column {column}: "
    reasons[made(folder, "version", schema_version="9" * 5000)] = "its schema version 999"
    reasons[made(folder, "nodes", nodes="64")] = "line 2 has more nodes than devices"
    header, first, *_ = made(folder, "whole").read_text().splitlines()
    (folder / "whole.csv").unlink()
    for name, content, reason in (
        ("empty", b"", "it has no rows"),
        ("header-only", f"{header}\n".encode(), "it has no rows"),
        ("binary", bytes(range(256)) * 8, ""),
        ("cut", f"{header}\n{first}\n{first[: len(first) // 2]}".encode(), ""),
        ("twice", f"{header},images_per_s\n{first},1\n".encode(), "it has the column images_per_s twice"),
        ("excel", f"{header}\n{first}\n".replace(",", ";").encode(), "its cells are not separated by commas"),
        ("no-column", f"{header.replace('images_per_s', 'speed')}\n{first}\n".encode(), ""),
    ):
        reasons[folder / f"{name}.csv"] = reason
        (folder / f"{name}.csv").write_bytes(content)
    reasons[folder / "field.csv"] = "field larger than field limit"
    (folder / "field.csv").write_text(f"{'x' * 200_000}\n1\n")

    windows = tmp_path / "windows.csv"
    windows.write_bytes(b"\xef\xbb\xbf" + SAMPLE.read_bytes())
    done = plot(windows, folder, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    told = "".join(done.stdout.split())  # long lines are wrapped
    for path, reason in reasons.items():
        assert told.count("".join(f"Skipped: {path}: not read, {reason}".split())) == 1, (path, reason)
    assert told.count("Skipped:") == len(reasons)
    alone, _ = comparison.load([SAMPLE])
    table = pd.read_csv(tmp_path / "out" / "comparison.csv")
    assert table.images_per_s.to_list() == comparison.summarize(alone).images_per_s.to_list()


def test_a_run_that_went_on_in_another_world_counts_in_neither(plot: Script, tmp_path: Path) -> None:
    """Two workers, then four: a note names it, and the rows of both configurations are without it."""
    made(tmp_path / "in", "resumed", {"world_size": "4", "devices": "4", "images_per_s": "9999"})
    done = plot(SAMPLE, tmp_path / "in", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    note = "Skipped: run resumed went on with world_size 4 after 2, devices 4 after 2: it counts in neither."
    assert note in done.stdout.replace("\n    ", " ")
    report([SAMPLE], tmp_path / "alone")
    expected, written = ((tmp_path / out / "comparison.md").read_text() for out in ("alone", "out"))
    assert written.replace(f"- {note}\n", "") == expected


@pytest.mark.parametrize("column", ["stage", "dataset", "job_id", "precision", "batch_per_device"])
def test_a_name_that_could_not_be_read_back_is_refused_before_training(tmp_path: Path, column: str) -> None:
    numbers = {"global_batch": 64, "batch_per_device": 64, "devices": 1}
    facts = dict.fromkeys(COLUMNS, "Net 训练 $") | numbers
    RunFiles(tmp_path, facts)
    for name in ("a\nb", "x" * 201):
        with pytest.raises(UserError, match=f"the {column} cannot be recorded"):
            RunFiles(tmp_path, facts | {column: name})


# --- many runs in one file --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs, one with a slow rank."""
    (row, *_) = records.read(SAMPLE)
    for run_id, slowest in {"one": 1.0, "two": 1.1, "slow": 2.0}.items():
        recorder = records.RunFiles(tmp_path, row | {"run_id": run_id})
        for epoch in (1, 2):
            ranks = [{"rank": rank, "own_seconds": seconds} for rank, seconds in enumerate([1.0, slowest])]
            of_all = {"epoch": epoch, "host": "n1", "device": "cpu", "device_name": "CPU"}
            of_all |= {"peak_memory_mb": 1, "data_seconds": 0.1}
            metric = {"epoch": epoch, "metric": "recall", "of": "cats", "value": 0.5}
            recorder.add([of_all | rank for rank in ranks], [metric], epoch=epoch, warmup=epoch == 1)
    return tmp_path / "runs"


def test_a_csv_of_many_runs_is_read_as_their_folder(folder: Path, tmp_path: Path) -> None:
    """As CONTRIBUTING makes one of the runs behind a table; the ranks stay where they are."""
    (command,) = re.findall(r"`(awk .*?)`", (REPOSITORY / "CONTRIBUTING.md").read_text())
    command = command.replace("results/runs", str(folder)).replace("> runs.csv", f"> {tmp_path}/many.csv")
    succeeded(ran("bash", "-c", command))
    single, _ = comparison.load([folder])
    many, skipped = comparison.load([tmp_path / "many.csv"])
    assert skipped == [] and many.run_id.nunique() == 3
    assert single.slow_rank[single.run_id == "slow"].all() and not many.slow_rank.any()
    left_out = ["file", "slow_rank"]
    by = ["run_id", "epoch"]
    single, many = (rows.drop(columns=left_out).sort_values(by, ignore_index=True) for rows in (single, many))
    assert many.equals(single)


def test_ranks_that_cannot_be_read_are_named_and_the_run_stays(folder: Path) -> None:
    ranks = folder / "slow.ranks.tsv"
    ranks.write_text(ranks.read_text().replace("\tn1\t", "\t"))
    rows, (sentence,) = comparison.load([folder])
    assert rows.run_id.nunique() == 3 and sentence.startswith(f"{ranks}: not read, ")


def test_rows_next_to_a_record_that_cannot_be_read_are_set_aside(folder: Path) -> None:
    rows = records.read(folder / "one.csv")
    for kind in ("ranks", "metrics"):
        (folder / f"one.{kind}.tsv").write_text(f"a note of {kind}")
    records.RunFiles(folder.parent, rows[0]).go_on({"run_id": "one"}, rows)
    for kind in ("ranks", "metrics"):
        assert (folder / f"one.{kind}.damaged.tsv").read_text() == f"a note of {kind}"
