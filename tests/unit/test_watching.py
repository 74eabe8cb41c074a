"""The live view of a job: on a terminal, in a file, through a pipe (trainkit/jobs/watching.py)."""

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ENVIRONMENT, REPOSITORY

from trainkit import samples
from trainkit.errors import UserError
from trainkit.jobs import watching

# What slurm/monitor.py does, for a job that has ended when somebody says so.
PROGRAM = """
import sys
from pathlib import Path
from trainkit import errors
from trainkit.jobs import watching

folder = Path(sys.argv[1])
errors.run(lambda: watching.watch(folder, lambda: Path(f"{folder}.ended").exists()))
"""
AS_SET = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "1"}  # or Python would change LC_CTYPE
LATER = 60  # s: long enough for anything here, on a busy machine
EPOCHS = REPOSITORY / "results/sample/traces/gpu_healthy/training/runs/ddp-gpu_healthy.csv"


class Sampled:
    """A job's samples, and the view of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writers: dict[str, samples.Writer] = {}

    def add(self, node: str = "n1", gpus: int = 2, ago: float = 0, **gpu: object) -> None:
        """A moment of a node: the last of its GPUs has no rank."""
        rows = [{"what": samples.NODE, "memory_mb": 2000, "memory_limit_mb": 64_000, "core_list": "0-3"}]
        for number in range(gpus):
            rank = number if number < gpus - 1 else "-"
            row = {"what": samples.GPU, "number": number, "ranks": rank, "utilisation": 97, "power_w": 200}
            row |= {"power_limit_w": 400, "memory_mb": 1000, "memory_limit_mb": 40_000, "throttled": "-"}
            rows.append(row | gpu)
            if rank != "-":
                rows.append({"what": samples.RANK, "number": rank, "name": "R", "cores": 1.0, "loaders": 0})
        moment = {"time": time.time() - ago}
        writer = self.writers.setdefault(node, samples.Writer(self.folder, node))
        writer.add(moment | row for row in rows)

    def end(self) -> None:
        Path(f"{self.folder}.ended").touch()

    def watch(self, **how: object) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, str(self.folder)]
        environment = ENVIRONMENT | {"LC_ALL": "C.UTF-8", "TERM": "xterm"} | how.pop("env", {})
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, **how)


class Terminal:
    """One of so many columns and rows."""

    def __init__(self, columns: int, rows: int) -> None:
        self.ours, self.theirs = pty.openpty()
        self.said = b""
        self.resize(columns, rows)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def resize(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        with suppress(OSError):  # nobody has it open any more
            while part := os.read(self.ours, 1000):
                self.said += part

    def lines(self) -> list[str]:
        """What is on it, of the few words that a view may say."""
        screen, at = [""], 0
        for word in re.findall(r"\x1b\[\d*[A-Z]|[\r\n]|[^\x1b\r\n]+", self.said.decode(errors="ignore")):
            if re.fullmatch(r"\x1b\[\d+A", word):
                at -= int(word[2:-1])
            elif word == "\x1b[H":
                at = 0
            elif word == "\x1b[J":
                screen[at:] = [""]
            elif word == "\n":
                at += 1
                screen += [""] * (at + 1 - len(screen))
            elif word not in ("\r", "\x1b[K"):
                assert word[0] != "\x1b", word
                screen[at] = word
        return list(filter(None, screen))

    def wait_for(self, happens: Callable[[], bool]) -> None:
        until = time.monotonic() + LATER
        while not happens() and time.monotonic() < until:
            time.sleep(0.05)
        assert happens(), self.said

    def wait(self, words: str) -> list[str]:
        """The lines on it, when these words are among them; all fit."""
        self.wait_for(lambda: any(words in line for line in self.lines()))
        lines = self.lines()
        assert len(lines) < self.rows and max(map(len, lines)) < self.columns, lines
        return lines


@pytest.fixture
def job(tmp_path: Path) -> Sampled:
    return Sampled(tmp_path / "monitor")


@pytest.fixture
def terminal(job: Sampled) -> Iterator[Callable[..., tuple[Terminal, subprocess.Popen]]]:
    started = []

    def start(columns: int = 100, rows: int = 30, **environment: str) -> tuple[Terminal, subprocess.Popen]:
        screen = Terminal(columns, rows)
        view = job.watch(stdin=screen.theirs, stdout=screen.theirs, env=environment, start_new_session=True)
        started.append((screen, view))
        return screen, view

    yield start
    for screen, view in started:
        view.kill()
        view.communicate()
        os.close(screen.theirs)
        screen.reader.join(LATER)
        os.close(screen.ours)


def ended(view: subprocess.Popen) -> tuple[int, str]:
    error = view.communicate(timeout=LATER)[1].decode()
    return view.returncode, error


def names(lines: list[str]) -> list[str]:
    """Of what a line is, with the mark of a warning before it."""
    return [" ".join(re.findall(r"!|n\d+\b|GPU \d|rank \d", line)) for line in lines]


def test_on_a_terminal_it_is_kept_up_to_date_in_place(job: Sampled, terminal: Callable) -> None:
    screen, view = terminal()
    screen.wait("no samples yet")  # its folder is not there either
    job.add()
    _, *lines = screen.wait("200 of 400 W")
    assert names(lines) == ["n1", "GPU 0", "! GPU 1", "rank 0"]
    assert "97 % busy  █████░░░░░  200 of 400 W    1.0 of 40.0 GB" in lines[1] and "ranks 0" in lines[1]
    assert lines[2].endswith("no rank")
    (job.folder / samples.RUNS).write_text(f"{EPOCHS}\n")
    job.add(power_w=390, throttled="heat+power", temperature_c=91)
    _, epoch, *lines = screen.wait("390 of 400 W")
    assert epoch == "epoch 3: 5,000 images/s, 12.0 s of training"
    assert names(lines) == ["n1", "! GPU 0", "! GPU 1", "rank 0"]
    assert "█████████▊  390" in lines[1] and lines[1].endswith("91 C  ranks 0  slowed by heat")
    job.end()
    assert ended(view) == (0, "")
    assert screen.wait("the job has ended")[1:] == [epoch, *lines]


def test_a_small_terminal_shows_what_needs_attention_and_counts_the_rest(
    job: Sampled, terminal: Callable
) -> None:
    for node in ("n1", "n2", "n10"):
        job.add(node, gpus=8)
    screen, view = terminal(40, 10)
    lines = screen.wait("more lines")
    warned = [f"! {node} GPU 7" for node in ("n1", "n2", "n10")]
    assert names(lines[1:-1]) == ["n1", "n1 GPU 0", "n1 GPU 1", "n1 GPU 2", *warned]
    assert all("GPU 7  no rank" in line for line in lines[5:8])
    assert "and 41 more lines" in lines[-1]
    screen.resize(100, 60)
    job.add("n1", gpus=8)
    assert len(screen.wait("n10 rank 6")) == 1 + 3 * 16
    screen.resize(50, 12)
    job.add("n1", gpus=8)
    assert len(screen.wait("more lines")) == 11
    assert screen.said.count(b"\x1b[H") == 2  # where the lines went is not known any more
    job.end()
    assert ended(view) == (0, "")


@pytest.mark.parametrize(
    ("environment", "in_place", "blocks"),
    [
        ({"LC_ALL": "C"}, True, False),
        ({"PYTHONIOENCODING": "ascii"}, True, False),
        ({"LC_ALL": "", "LC_CTYPE": "C.UTF-8", "LANG": "C"}, True, True),
        ({"LC_ALL": "", "LC_CTYPE": "C", "LANG": "C.UTF-8"} | AS_SET, True, False),
        ({"TERM": "dumb"}, False, True),
        ({}, True, True),
    ],
)
def test_a_terminal_gets_what_it_can_show(
    environment: dict, in_place: bool, blocks: bool, job: Sampled, terminal: Callable
) -> None:
    job.add("n\u00e9\x1b[2J")
    job.end()
    screen, view = terminal(**environment)
    assert ended(view) == (0, "")
    screen.wait("200 of 400 W")
    assert (b"\x1b" in screen.said) == in_place
    assert ("\u2588" in screen.said.decode()) == blocks
    assert b"#####-----" in screen.said or blocks
    assert rb"n\xe9\x1b[2J" in screen.said


def test_ctrl_c_leaves_it(job: Sampled, terminal: Callable) -> None:
    job.add()
    screen, view = terminal()
    screen.wait("200 of 400 W")
    view.send_signal(signal.SIGINT)
    assert ended(view) == (130, "")
    screen.wait_for(lambda: screen.said.endswith(b"\x1b[J\r\n"))  # what comes next begins a line


@pytest.fixture
def asked() -> list[float]:
    """When `blocks` was asked whether the job has ended (s)."""
    return []


@pytest.fixture
def blocks(
    job: Sampled, asked: list[float], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[list[str]]]:
    """The blocks of lines in a file: of a job to which something happens between two looks, and that ends."""

    def watch(*happenings: Callable[[], object]) -> list[list[str]]:
        rest, out, now = list(happenings), io.StringIO(), 0.0
        asked.clear()

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds
            if rest:
                rest.pop(0)()

        clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now, time=time.time, strftime=time.strftime)
        monkeypatch.setattr(watching, "time", clock)

        def ended() -> bool:
            asked.append(now)
            return not rest

        watching.watch(job.folder, ended, out)
        return [block.splitlines() for block in out.getvalue().split("\n\n")[:-1]]

    return watch


def test_in_a_file_a_block_comes_when_something_changes_and_every_ten_seconds(
    job: Sampled, blocks: Callable, asked: list[float]
) -> None:
    others = [partial(job.add, power_w=watts) for watts in range(100, 112)]  # a second each
    found = blocks(*others, partial(job.add, gpus=3), lambda: None)
    assert [block[0][8:] for block in found] == [
        "  no samples yet", "", "", "", "  the job has ended; its last samples:"
    ]  # fmt: skip
    assert [block[2].split()[6] for block in found[1:4]] == ["100", "110", "200"]
    two = ["n1", "GPU 0", "! GPU 1", "rank 0"]
    three = ["n1", "GPU 0", "GPU 1", "! GPU 2", "rank 0", "rank 1"]
    assert [names(block[1:]) for block in found[1:]] == [two, two, three, three]
    assert asked == [0, 2, 17]  # while samples come, nobody need ask Slurm


def test_samples_that_do_not_come_any_more(job: Sampled, blocks: Callable) -> None:
    job.add(ago=300)
    found = blocks(lambda: None)
    assert re.fullmatch(r"..:..:..  no new samples for 30\d s", found[0][0])
    assert found[1][0].endswith("  the job has ended; its last samples:")


def test_a_reader_that_has_enough(job: Sampled) -> None:
    job.add()
    reader, writer = os.pipe()
    os.close(reader)
    view = job.watch(stdout=writer)
    os.close(writer)
    assert ended(view) == (0, "")


def test_a_full_disk(job: Sampled) -> None:
    job.add()
    with Path("/dev/full").open("wb") as full:
        code, error = ended(job.watch(stdout=full))
    assert (code, error) == (
        1, "error: the view cannot be written (No space left on device): give it another place.\n"
    )  # fmt: skip


def test_no_samples_at_all(job: Sampled, blocks: Callable) -> None:
    for missing in (True, False):
        with pytest.raises(UserError, match=r"^there are no samples in .*: give a job that was sampled"):
            blocks()
        if missing:
            job.folder.mkdir()
            (job.folder / "n1.csv").write_text(",".join(samples.COLUMNS) + "\n")


def test_only_the_end_of_a_long_file_is_read(
    job: Sampled, blocks: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.add(gpus=4, ago=2)
    size = (job.folder / "n1.csv").stat().st_size
    job.add(gpus=2)
    assert "! GPU 3" in names(blocks()[0])
    monkeypatch.setattr(watching, "MOST_BYTES", (job.folder / "n1.csv").stat().st_size - size + 20)
    assert names(blocks()[0][1:]) == ["n1", "GPU 0", "! GPU 1", "rank 0"]


def test_what_is_gone_and_what_is_damaged(job: Sampled, blocks: Callable) -> None:
    job.add(gpus=4, ago=60)
    job.add(gpus=3)
    job.add("n2", gpus=2, ago=60)  # the newest of its node
    (job.folder / "n3.csv").write_bytes(b"\x00\xff,,\n1,2\n")
    with (job.folder / "n1.csv").open("ab") as file:
        file.write(b"\n\xff\x00\n1795000000.1,gpu,7,NVID\n,,,\nnan,gpu,8" + b"," * 19)
        file.write(b"\n1795000000.1,gpu,9")
    assert names(blocks()[0][1:]) == [
        "n1", "n1 GPU 0", "n1 GPU 1", "! n1 GPU 2", "n1 rank 0", "n1 rank 1",
        "n2", "n2 GPU 0", "! n2 GPU 1", "n2 rank 0",
    ]  # fmt: skip


def test_a_line_that_is_half_there_is_read_when_it_is_whole(job: Sampled, blocks: Callable) -> None:
    job.add(gpus=2)
    path = job.folder / "n1.csv"
    text = path.read_bytes()

    def rest() -> None:
        path.write_bytes(text)

    path.write_bytes(text[:-30])  # the last one is of GPU 1
    first, second, _ = blocks(rest, lambda: None)
    assert names(first[1:]) == ["n1", "GPU 0", "rank 0"]
    assert names(second[1:]) == ["n1", "GPU 0", "! GPU 1", "rank 0"]


def test_what_is_worth_a_warning(job: Sampled, blocks: Callable) -> None:
    gpu = {"memory_mb": 39_500, "memory_limit_mb": 40_000, "ranks": "0+1", "throttled": "power"}
    rank = {"cores": 0.5, "loaders": 2, "loader_cores": 1.9, "memory_mb": 2000}
    rows = [
        {"what": samples.NODE, "memory_mb": 980, "memory_limit_mb": 1000, "core_list": "0"},
        {"what": samples.GPU, "number": 0} | gpu,
        {"what": samples.GPU, "number": 1},  # lost: there is nothing to read of it
        {"what": samples.RANK, "number": 0, "name": "R", "waiting": 0.48} | rank,
        {"what": samples.RANK, "number": 1, "name": "T", "waiting": 0.1} | rank,
        {"what": samples.RANK, "number": 2, "name": "S", "waiting": ""} | rank | {"loaders": 1},
    ]
    samples.Writer(job.folder, "n1").add({"time": time.time()} | row for row in rows)
    _, node, full, lost, crowded, stopped, well = blocks()[0]
    assert node.startswith("! n1") and node.endswith("its memory is nearly full")
    assert full.startswith("! GPU 0") and full.endswith("ranks 0+1  its memory is nearly full")
    assert re.fullmatch(r"  GPU 1 +- % busy +-+ +- of - W +- of - GB  - C", lost)
    assert crowded.startswith("! rank 0") and crowded.endswith("waits for a core 48 % of the time")
    assert stopped.startswith("! rank 1") and stopped.endswith("is stopped")
    assert re.fullmatch(r"  rank 2 +0.5 cores  2.0 GB  1 loader worker, 1.9 cores  sleeps", well)


def test_without_ranks_a_gpu_without_a_rank_is_no_news(job: Sampled, blocks: Callable) -> None:
    """Before the training and after it."""
    job.add(gpus=1)
    assert names(blocks()[0][1:]) == ["n1", "GPU 0"]
