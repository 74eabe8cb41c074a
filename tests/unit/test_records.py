"""Records: what no run has written is named and the rest compared; the starts of a run are joined."""

import csv
import re
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPOSITORY, Script, ran, succeeded

from manygpus.errors import UserError
from manygpus.record import records
from manygpus.record.columns import COLUMNS, RANK_COLUMNS, Column, Role, number
from manygpus.reports import comparison
from manygpus.reports.comparison_report import report

SAMPLE = REPOSITORY / "results" / "sample" / "cpu-2-cores" / "runs.csv"
GOOD = "ddp-20261121-041110-f2fc72"  # of these runs, the one of two workers
# Column -> cells that it never holds.
REFUSED = {
    "devices": ["0", "1e3", "nan", "", "many"],
    "warmup": ["2"],
    "images_per_s": ["0", "nan", "inf", "-5", "many"],
    "elapsed_s": ["-1"],
    "train_loss": ["nan"],
    "test_accuracy": ["100.1"],
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
    """Many files in one call: each is skipped for its line and column, or for what it is."""
    folder = tmp_path / "others"
    reasons = {}
    for column, cells in REFUSED.items():
        for i, cell in enumerate(cells):
            reasons[made(folder, f"{column}-{i}", {column: cell})] = f"line 4, column {column}: "
    reasons[made(folder, "version", schema_version="9")] = "its schema version 9"
    header, first, *_ = made(folder, "whole").read_text().splitlines()
    (folder / "whole.csv").unlink()
    for name, content, reason in (
        ("empty", b"", "it has no rows"),
        ("header-only", f"{header}\n".encode(), "it has no rows"),
        ("photograph", bytes(range(256)) * 8, ""),
        ("cut", f"{header}\n{first}\n{first[: len(first) // 2]}".encode(), "line 3 is cut short"),
        ("excel", f"{header}\n{first}\n".replace(",", ";").encode(), "it has no column run_id"),
        ("no-column", f"{header.replace('images_per_s', 'speed')}\n{first}\n".encode(), "it has no column"),
    ):
        reasons[folder / f"{name}.csv"] = reason
        (folder / f"{name}.csv").write_bytes(content)

    windows = tmp_path / "windows.csv"
    windows.write_bytes(b"\xef\xbb\xbf" + SAMPLE.read_bytes())
    done = plot(windows, folder, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    printed = "".join(done.stdout.split())  # long lines are wrapped
    for path, reason in reasons.items():
        assert printed.count("".join(f"Skipped: {path}: not read, {reason}".split())) == 1, (path, reason)
    assert printed.count("Skipped:") == len(reasons)
    alone, _ = comparison.load([SAMPLE])
    table = pd.read_csv(tmp_path / "out" / "comparison.csv")
    assert table.images_per_s.to_list() == comparison.summarize(alone).images_per_s.to_list()


def test_a_new_column_leaves_every_earlier_file_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the project, and with them the ranks' files; a run that is written now has the column."""
    joules = Column(number(least=0), Role.MEASUREMENT, default=0.0)
    monkeypatch.setitem(COLUMNS, "joules", joules)
    monkeypatch.setitem(RANK_COLUMNS, "joules", joules)
    files = REPOSITORY.glob("results/sample/**/*.csv")
    earlier = [path for path in files if path.read_text().startswith("run_id,resumed_from,")]
    assert len(earlier) > 36
    for path in earlier:
        assert {row["joules"] for row in records.read(path)} == {0.0}, path
        if records.beside(path).exists():
            assert {row["joules"] for row in records.read_ranks(path)} == {0.0}, path
    assert any(records.beside(path).exists() for path in earlier)


def test_a_run_that_resumed_in_another_world_counts_in_neither(plot: Script, tmp_path: Path) -> None:
    """Two workers, then four: a note names it, and the rows of both configurations are without it."""
    made(tmp_path / "in", "resumed", {"world_size": "4", "devices": "4", "images_per_s": "9999"})
    done = plot(SAMPLE, tmp_path / "in", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    note = (
        "Skipped: run resumed was resumed with world_size 4 after 2, devices 4 after 2: it counts in neither."
    )
    assert note in done.stdout.replace("\n    ", " ")
    report([SAMPLE], tmp_path / "alone")
    expected, written = ((tmp_path / out / "comparison.md").read_text() for out in ("alone", "out"))
    assert written.replace(f"- {note}\n", "") == expected


def write_start(
    folder: Path, run_id: str, epochs: range, ended: str = "", seconds: float = 10.0, **columns: object
) -> None:
    """The record of a start with these epochs, of `seconds` each; `ended` if it came to its end."""
    (row, *_) = records.read(SAMPLE)
    columns = (
        row | {"run_id": run_id, "started_at": f"2026-01-01T00:00:{len([*folder.glob('*')]):02}Z"} | columns
    )
    writer = records.RecordWriter(folder, {name: columns[name] for name in columns if name != "ended"})
    for epoch in epochs:
        row = {"epoch": epoch, "warmup": epoch == epochs[0], "train_seconds": seconds}
        row |= {"images_per_s": row["epoch"] + 100, "elapsed_s": seconds * epoch}
        writer.add(row)
    if ended:
        writer.finish(ended)


def joined(folder: Path) -> dict[str, list[tuple[str, int]]]:
    """The runs in a folder, and which start has made which of their epochs."""
    runs = records.read_runs(sorted(folder.glob("*.csv")))
    return {run_id: [(row["start"], row["epoch"]) for row in rows] for run_id, rows in runs.items()}


def test_a_killed_start_and_those_after_it_are_one_run(plot: Script, tmp_path: Path) -> None:
    """The second one was killed between its row and its checkpoint, so the third has made epoch 4 again."""
    folder = tmp_path / "runs"
    write_start(folder, "a", range(1, 4))
    write_start(folder, "b", range(4, 5), resumed_from="a", seconds=1000)
    write_start(folder, "c", range(4, 6), resumed_from="a", ended="all epochs")
    assert joined(folder) == {"c": [("a", 1), ("a", 2), ("a", 3), ("c", 4), ("c", 5)]}
    succeeded(plot(folder, "--out", tmp_path / "out"))
    (row,) = pd.read_csv(tmp_path / "out" / "comparison.csv").itertuples()
    assert (row.runs, row.epochs, row.elapsed_s) == (1, 5, 50)
    assert (row.steady_epochs, row.slowest, row.fastest) == (3, 102, 105)  # without epochs 1 and 4


def test_an_epoch_after_the_checkpoint_counts_as_it_was_made_again(tmp_path: Path) -> None:
    write_start(tmp_path, "a", range(1, 4))  # whose last checkpoint is of epoch 2
    write_start(tmp_path, "b", range(3, 5), resumed_from="a")
    write_start(tmp_path, "c", range(5, 6), resumed_from="b")
    assert joined(tmp_path) == {"c": [("a", 1), ("a", 2), ("b", 3), ("b", 4), ("c", 5)]}


def test_a_start_that_saved_before_its_first_row_is_not_a_run_of_its_own(tmp_path: Path) -> None:
    """The first one saved within epoch 1, and was killed between the row of that epoch and its checkpoint."""
    (row, *_) = records.read(SAMPLE)
    columns = {name: row[name] for name in row if name not in ("run_id", "started_at", "ended")}
    first = records.RecordWriter(tmp_path, columns)
    saved = first.state_dict()
    first.add({"epoch": 1})
    second = records.RecordWriter(tmp_path, columns)
    second.load_state_dict(saved)
    second.add({"epoch": 1})
    (run,) = records.read_runs(tmp_path.glob("*.csv")).values()
    assert [(row["start"], row["epoch"]) for row in run] == [(second.facts["run_id"], 1)]


def test_what_a_start_that_resumes_records_as_the_first(tmp_path: Path) -> None:
    """An optimizer has its constants from the checkpoint, whatever the script says now."""
    (row, *_) = records.read(SAMPLE)
    columns = {name: row[name] for name in row if name not in ("run_id", "started_at", "ended")}
    trains_so = {"precision": "tf32", "optimizer": "SGD momentum=0.9", "lr": 0.1, "schedule": "StepLR"}
    first = records.RecordWriter(tmp_path, columns | trains_so | {"world_size": 2})
    now = {"precision": "fp32", "optimizer": "Adam", "lr": 0.5, "schedule": "", "world_size": 4}
    second = records.RecordWriter(tmp_path, columns | now)
    second.load_state_dict(first.state_dict())
    second.add({"epoch": 1})
    (row,) = records.read(second.path)
    assert {name: row[name] for name in trains_so} == trains_so
    assert row["world_size"] == 4


def test_a_number_is_recorded_with_six_digits(tmp_path: Path) -> None:
    (columns, *_) = records.read(SAMPLE)
    writer = records.RecordWriter(tmp_path, columns | {"lr": 0.01 * 2**0.5})
    writer.add({"epoch": 1, "images_per_s": 1234567.89, "train_loss": 0.123456789})
    (row,) = csv.DictReader(writer.path.open())
    assert (row["lr"], row["images_per_s"], row["train_loss"]) == ("0.0141421", "1.23457e+06", "0.123457")


def test_starts_that_never_had_a_row_keep_the_others_together(tmp_path: Path) -> None:
    """After a, the start x saved within epoch 3 twice; b, which resumed from x, did not save any more."""
    write_start(tmp_path, "a", range(1, 3))
    write_start(tmp_path, "b", range(3, 4), resumed_from="x a")
    write_start(tmp_path, "c", range(3, 5), resumed_from="x a")
    assert joined(tmp_path) == {"c": [("a", 1), ("a", 2), ("c", 3), ("c", 4)]}


def test_a_run_that_came_to_its_end_stays_beside_its_branch(tmp_path: Path) -> None:
    """The epochs that both share count in the speed once."""
    write_start(tmp_path, "a", range(1, 6), ended="all epochs")
    write_start(tmp_path, "branch", range(3, 6), resumed_from="a")
    assert joined(tmp_path) == {
        "a": [("a", epoch) for epoch in range(1, 6)],
        "branch": [("a", 1), ("a", 2), ("branch", 3), ("branch", 4), ("branch", 5)],
    }
    rows, _ = comparison.load([tmp_path])
    (row,) = comparison.summarize(rows).itertuples()
    assert (row.runs, row.steady_epochs) == (2, 6)


def test_more_epochs_after_the_end_are_the_same_run(tmp_path: Path) -> None:
    write_start(tmp_path, "a", range(1, 4), ended="accuracy 98.0 reached")
    write_start(tmp_path, "b", range(4, 6), resumed_from="a")
    assert joined(tmp_path) == {"b": [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5)]}


def test_a_start_whose_earlier_record_is_elsewhere_is_a_run(tmp_path: Path) -> None:
    write_start(tmp_path, "b", range(4, 6), resumed_from="a")
    assert joined(tmp_path) == {"b": [("b", 4), ("b", 5)]}


@pytest.mark.parametrize(("column", "value"), [("global_batch", 0), ("global_batch", 64.5), ("seed", -1)])
def test_a_fact_that_could_not_be_read_back_is_refused_before_training(
    tmp_path: Path, column: str, value: object
) -> None:
    (columns, *_) = records.read(SAMPLE)
    with pytest.raises(UserError, match=f"the {column} cannot be recorded"):
        records.RecordWriter(tmp_path, columns | {column: value})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs, one with a slow rank."""
    (row, *_) = records.read(SAMPLE)
    for run_id, slowest in {"one": 1.0, "two": 1.1, "slow": 2.0}.items():
        recorder = records.RecordWriter(tmp_path / "runs", row | {"run_id": run_id})
        for epoch in (1, 2):
            ranks = [{"rank": rank, "own_seconds": seconds} for rank, seconds in enumerate([1.0, slowest])]
            of_all = {"epoch": epoch, "host": "n1", "device": "cpu", "device_name": "CPU"}
            of_all |= {"peak_memory_mb": 1, "data_seconds": 0.1}
            metric = {"epoch": epoch, "metric": "recall", "of": "cats", "value": 0.5}
            recorder.add({"epoch": epoch}, [of_all | rank for rank in ranks], [metric])
    return tmp_path / "runs"


def test_a_csv_of_many_runs_is_read_as_their_folder(folder: Path, tmp_path: Path) -> None:
    """As docs/dev/README.md makes one of the runs behind a table; the ranks stay where they are."""
    (command,) = re.findall(r"`(awk .*?)`", (REPOSITORY / "docs/dev/README.md").read_text())
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
