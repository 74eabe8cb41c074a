"""What the tests share: MNIST on disk, and a way to start a stage as its user would."""

import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scheduling import GroupedTests

from manygpus.config.known_datasets import DEFAULT_DATA_DIR
from manygpus.data import staging
from manygpus.jobs import local_job, stages
from manygpus.record import records

if TYPE_CHECKING:
    import torch
    from checkout import Checkout
    from cluster import RunningCluster
    from forking import Forking

REPOSITORY = Path(__file__).resolve().parents[1]
Script = Callable[..., subprocess.CompletedProcess]  # what the fixture `script` is
STAGES = {name: stage.script for name, stage in stages.STAGES.items()}
BEYOND = REPOSITORY / "03_multigpu_ddp" / "beyond"
BY_FEATURE = BEYOND / "by_feature"
COMPLETE = BEYOND / "complete"
AROUND = REPOSITORY / "tests" / "around.py"
TESTED = 501  # test images of `few_images`: two ranks have unequal shards
WITHOUT_DROPOUT, STOPS = (AROUND, "without-dropout"), (AROUND, "stop-in-step")
# Whoever runs the tests in the background ignores Ctrl-C, and the programs that the tests send it to
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _gpus() -> str:
    """Those that PyTorch can use, by their numbers; asked of another process, which then gives them back."""
    if not any(next(Path("/dev").glob(name), None) for name in local_job.GPU_DEVICES):
        return ""
    program = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    count = int(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout)
    chosen = next((os.environ[name] for name in local_job.VISIBLE if os.environ.get(name)), None)
    numbers = chosen.split(",") if chosen else list(map(str, range(count)))
    return ",".join(numbers[:count])


# Only tests marked gpu see GPUs; every other result is to be the same on all machines. The workers of
# pytest-xdist inherit what its first process has found, and hidden, here.
if "GPUS_OF_THE_TESTS" not in os.environ:
    os.environ["GPUS_OF_THE_TESTS"] = _gpus()
WITH_GPUS = {"CUDA_VISIBLE_DEVICES": os.environ["GPUS_OF_THE_TESTS"]}
GPUS = len(os.environ["GPUS_OF_THE_TESTS"].replace(",", " ").split())
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the empty word would hide none of AMD's
os.environ.pop("HIP_VISIBLE_DEVICES", None)
# Users' machines buffer what Python writes to a file; those that run tests often have it set otherwise.
os.environ.pop("PYTHONUNBUFFERED", None)
if version("torch").startswith(("2.4.", "2.5.")):  # which warn of their own torch.load
    os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"
# The options of the `make` that started the tests are none of those of a `make` that a test starts.
for name in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ARGS"):
    os.environ.pop(name, None)
os.environ["SITE_MONITOR"] = "off"  # where a test does not ask for it, by a site file: that saves time
# Where Python finds sitecustomize.py. The workers of pytest-xdist inherit it.
STARTUP = str(REPOSITORY / "tests" / "startup")
if STARTUP not in os.environ.get("PYTHONPATH", ""):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STARTUP]))
# Every worker has one thread, so that results do not depend on the number of cores.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
# Nor does it matter whether the tests themselves run inside a job.
for name in list(ENVIRONMENT):
    if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_", "GROUP_")) or name.endswith(
        ("RANK", "WORLD_SIZE")
    ):
        del ENVIRONMENT[name]


# Files beyond the stages, or around their edges, are for `make test-all`; so is each test of the cluster.
LONG_FILES = {
    "test_beyond",
    "test_breakdown",
    "test_capture",
    "test_gpt",
    "test_lightning",
    "test_meeting",
    "test_sharded",
    "test_storage_failures",
    "test_tabular",
    "test_torchrun",
    "test_vae_counts",
    "test_worked_trainings",
}
NO_CLUSTER = "no practice cluster: "  # and why


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort each test into a tier (docs/dev/TESTS.md). Jobs come first, as they mostly wait."""
    for item in items:
        if _uses_cluster(item):
            item.add_marker("cluster")
        takes_long = _uses_cluster(item) or item.path.stem in LONG_FILES
        if takes_long and not item.get_closest_marker("quick"):
            item.add_marker("full")
    items.sort(key=lambda item: not _uses_cluster(item))


def _uses_cluster(item: pytest.Item) -> bool:
    return "cluster" in item.fixturenames


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> GroupedTests:
    return GroupedTests(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that tried none of its jobs in a Slurm is red, though each test of one was only skipped."""
    if session.exitstatus == pytest.ExitCode.OK and _why_no_job_was_tried(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if why := _why_no_job_was_tried(config):
        reporter.write_line(f"error: all tests of jobs in a Slurm were skipped: {why}", red=True)
        reporter.write_line("Mend that; or accept it, with REQUIRE_CLUSTER=0 in the environment.", red=True)


def _why_no_job_was_tried(config: pytest.Config) -> str:
    """Return why every test of the cluster was skipped, if so.

    Return "" on a machine that cannot have one (slurm/practice_cluster/README.md), or if that is accepted.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # the workers of pytest-xdist have none
    possible = shutil.which("apt-get") or shutil.which("slurmctld")
    if not reporter or not possible or os.environ.get("REQUIRE_CLUSTER") == "0":
        return ""
    of_cluster = {
        outcome: [
            report
            for report in reporter.stats.get(outcome, [])
            if "cluster" in getattr(report, "keywords", ())
        ]
        for outcome in ("passed", "failed", "error", "skipped")
    }
    reasons = [report.longrepr[2] for report in of_cluster.pop("skipped")]
    wanting = [reason for reason in reasons if NO_CLUSTER in reason]
    return wanting[0] if wanting and not any(of_cluster.values()) else ""


def ran(*command: object, **how: object) -> subprocess.CompletedProcess:
    """Run a command to its end, and keep what it prints; `how` goes to `subprocess.run`."""
    settings = {"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(list(map(str, command)), **settings | how)


def stage_command(stage: str | Path, *arguments: object, processes: int | None = None) -> list[str]:
    """`python <stage script> ...`, or torchrun with `processes` ranks."""
    launcher = [sys.executable]
    if processes:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*launcher, str(STAGES.get(stage, stage)), *map(str, arguments)]


def run_stage(
    stage: str | Path,
    *arguments: object,
    processes: int | None = None,
    env: dict | None = None,
    device: tuple[str, ...] = ("--no-cuda",),
) -> subprocess.CompletedProcess:
    """Run a stage to its end, on the CPU unless `device` is empty."""
    command = stage_command(stage, *arguments, *device, processes=processes)
    return ran(*command, env=ENVIRONMENT | code_of(stage) | (env or {}))


def code_of(stage: str | Path) -> dict[str, str]:
    """The variable by which a stage of a copied checkout runs the manygpus there."""
    above = STAGES.get(stage, Path(stage)).resolve().parents
    top = next((folder for folder in above if (folder / "manygpus").is_dir()), REPOSITORY)
    return {"PYTHONPATH": f"{top}{os.pathsep}{STARTUP}"}


def start_stage(stage: str | Path, *arguments: object, env: dict | None = None) -> subprocess.Popen:
    """A stage on the CPU that resumes by itself; all that it says comes through its stdout."""
    command = stage_command(stage, *arguments, "--no-cuda")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT | code_of(stage) | (env or {}), **pipes)


def succeeded(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """A process that has to have gone well."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def failed(done: subprocess.CompletedProcess) -> str:
    """What a process said on stderr that has to have failed, by itself and without a traceback."""
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stderr


def one_error(done: subprocess.CompletedProcess) -> str:
    """The one line that `failed` has, but for those of PyTorch's C++."""
    (line,) = (line for line in failed(done).strip().splitlines() if not re.match(r"\[[A-Z]", line))
    return line


def rows_of(results_dir: Path) -> list[dict[str, object]]:
    """The rows of the one run in `results_dir`, of all its starts."""
    (rows,) = records.read_runs((results_dir / "runs").glob("*.csv")).values()
    return rows


def weights_of(results_dir: Path) -> dict[str, "torch.Tensor"]:
    """The weights that the last start in `results_dir` has saved."""
    import torch  # which most tests do without

    path = max((results_dir / "models").glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)
    return torch.load(path, weights_only=True)


def assert_same_end(folder: Path, other: Path, loss: float = 1e-5, weight: float = 1e-5) -> None:
    """But for rounding, by this part of a loss, and so much of a weight. It came to less than a tenth.

    A training that resumes may have only its last epochs in `folder`.
    """
    rows = {row["epoch"]: row for row in rows_of(folder)}
    expected = {row["epoch"]: row for row in rows_of(other)}
    assert rows.keys() <= expected.keys() and max(rows) == max(expected)
    for epoch, row in rows.items():
        for name in ("train_loss", "test_loss"):
            assert row[name] == pytest.approx(expected[epoch][name], rel=loss), (epoch, name)
    assert furthest(weights_of(folder), weights_of(other)) < weight


def places(folder: Path) -> tuple:
    """The options of a run that resumes, with its results and its checkpoints in `folder`."""
    return ("--results-dir", folder, "--checkpoint-dir", folder / "checkpoints", "--resume", "auto")


@contextmanager
def alone_with_the_gpus() -> Iterator[None]:
    """Held by one test at a time, of all workers."""
    with Path(tempfile.gettempdir(), f"tests-on-gpus-{os.getuid()}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def furthest(one: dict[str, "torch.Tensor"], other: dict[str, "torch.Tensor"]) -> float:
    """The largest difference of two weights of the same name."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """The default data directory, with MNIST in it."""
    staging.put_in_place(DEFAULT_DATA_DIR)
    return DEFAULT_DATA_DIR


@pytest.fixture(scope="session")
def few_images(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `make data` makes it, with 1,000 images to train and `TESTED` to test."""
    folder = tmp_path_factory.mktemp("data")
    few = folder / "MNIST" / "raw"
    few.mkdir(parents=True)
    for name, count in (("train", 1000), ("t10k", TESTED)):
        for kind, header, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            whole = (mnist_dir / "MNIST" / "raw" / f"{name}-{kind}-ubyte").read_bytes()
            cut = whole[:4] + struct.pack(">i", count) + whole[8 : header + size * count]
            (few / f"{name}-{kind}-ubyte").write_bytes(cut)
    return folder


@pytest.fixture
def checkout(tmp_path: Path, mnist_dir: Path) -> "Checkout":
    """A copy of the checkout, with MNIST, on a machine without Slurm."""
    from checkout import Checkout

    return Checkout(tmp_path / "a checkout")


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Path]:
    """Writes the samples of a job, as sampled_jobs.py explains, and returns their folder."""
    from sampled_jobs import write_job

    return partial(write_job, tmp_path / "monitor")


@pytest.fixture(scope="session")
def cluster() -> Iterator["RunningCluster"]:
    """A practice cluster of two nodes with two virtual GPUs each: one for all tests of this process."""
    from cluster import running_cluster

    with running_cluster(nodes=2, gpus=2, accounting=True) as running:
        yield running


@pytest.fixture
def on_cluster(tmp_path: Path, cluster: "RunningCluster", mnist_dir: Path) -> Iterator["Checkout"]:
    """A copy of the checkout, with MNIST, on the cluster's login host."""
    from checkout import Checkout

    yield Checkout(tmp_path / "a checkout", cluster)
    mine = f"squeue --noheader --format='%i %Z' | grep -F '{tmp_path}/' | cut -d' ' -f1 | xargs -r scancel"
    cluster.run(["bash", "-c", mine])  # the job of a test that failed would keep nodes from others


@pytest.fixture(scope="session")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Forking"]:
    """Runs Python programs without their slow start: one for all tests of this process."""
    from forking import forking

    with forking(tmp_path_factory.mktemp("forking"), ENVIRONMENT) as started:
        yield started


@pytest.fixture
def plot(forking: "Forking") -> Script:
    """Runs results/plot_results.py."""
    return partial(forking.run, REPOSITORY / "results" / "plot_results.py", env=ENVIRONMENT)


@pytest.fixture(scope="session")
def script(forking: "Forking", mnist_dir: Path) -> Script:
    """Runs a stage's script, or a changed copy of it, on the CPU; much faster than `run_stage`."""

    def run(
        stage: str | Path, *arguments: object, ranks: int | None = None, env: dict | None = None
    ) -> subprocess.CompletedProcess:
        command = (STAGES.get(stage, stage), *arguments, "--no-cuda")
        return forking.run(*command, env=ENVIRONMENT | (env or {}), ranks=ranks)

    return run
