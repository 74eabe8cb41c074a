"""A copy of the checkout for tests: with a site file, results and faults of its own, and Slurm or none."""

import ast
import itertools
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
from cluster import UNFINISHED, RunningCluster
from conftest import ENVIRONMENT, REPOSITORY, STARTUP, ran, rows_of, succeeded

# What the kit needs besides PyTorch and NumPy (pyproject.toml), by the names in site-packages.
OF_THE_KIT = re.compile(
    "(submitit|torchvision|scipy|pandas|matplotlib|mpl_toolkits|pillow|PIL|tqdm|psutil|pynvml|nvidia_ml_py"
    "|manygpus|__editable__)",
    re.IGNORECASE,
)
FOLDERS = {"single": "01_singlegpu", "dp": "02_multigpu_dp", "ddp": "03_multigpu_ddp"}
SCRIPTS = {
    "single": "01_singlegpu/slurm_submit.sh",
    "dp": "02_multigpu_dp/slurm_submit.sh",
    "srun": "03_multigpu_ddp/slurm_submit.sh",
    "torchrun": "03_multigpu_ddp/slurm_submit_torchrun.sh",
}


# A stage that trains nothing, loads no PyTorch, and records what a GPU might have done.
PRETENDED = """
import os, sys, time
from manygpus import errors
from manygpus.config import options
from manygpus import launchers
from manygpus.record import records

SPEEDS = {4096: 300_000, 8192: 310_000}
ONES = ("nodes", "threads_per_worker", "accumulate", "test_images", "train_loss", "test_loss")
ONES += ("test_accuracy", "learning_rate", "lr", "peak_memory_mb", "parameters")

TEXTS = ("launcher", "job_id", "node_list", "torch_version", "cuda_version", "git_commit")

@errors.entrypoint
def main():
    opts = options.parse_options("", arguments=sys.argv[1:])
    dist_env = launchers.read()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    devices = len(gpus) if STAGE in ("single", "dp") else dist_env.world_size
    if dist_env.rank != 0:
        return
    steps = (opts.train_size or 60_000) // opts.batch_size
    facts = opts.columns() | dict.fromkeys(ONES, 1) | dict.fromkeys(TEXTS, "")
    facts |= {"stage": STAGE, "dataset": opts.dataset, "model": "Net", "device_name": "a GPU"}
    facts |= {"run_id": f"{opts.results_dir.name}-{os.getpid()}", "precision": "fp32"}
    facts |= {"world_size": dist_env.world_size, "devices": devices}
    facts |= {"steps": steps, "images": steps * opts.batch_size}
    facts |= {"batch_per_device": opts.batch_size // devices, "test_images": 10_000}
    recorder = records.RecordWriter(opts.results_dir / "runs", facts)
    for epoch in range(1, opts.epochs + 1):
        speed = SPEEDS.get(opts.batch_size, 10_000) * devices
        seconds = facts["images"] / speed
        row = {"epoch": epoch, "warmup": epoch == 1, "images_per_s": speed, "train_seconds": seconds}
        recorder.add(row | {"eval_seconds": 1.0, "elapsed_s": 8 + epoch * (seconds + 1)})
    errors.print_line("results: none")

if __name__ == "__main__":
    main()
"""


def pretended(stage: str) -> str:
    """The script of a stage that only pretends to train."""
    return f"STAGE = {stage!r}\n{PRETENDED}"


def copy_project(folder: Path) -> None:
    """What a user has after `git clone` and `make data`, but for the tests and the environment."""
    made = ("runs", "jobs", "debug", "sweeps", "comparisons", "models", "sample", "breakdown", "all_reduce")
    produced = {"results": made}
    for name in ("manygpus", *FOLDERS.values(), "slurm", "results"):
        of_a_learner = ("mine", "mine-*", "progress.json")
        left_out = (
            "practice_cluster",
            "site.sh",
            "*.log",
            "__pycache__",
            *of_a_learner,
            *produced.get(name, ()),
        )
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns(*left_out))
    for page in REPOSITORY.glob("*.md"):
        shutil.copy(page, folder)
    (folder / "data").symlink_to(REPOSITORY / "data")


def make_project(folder: Path) -> Path:
    """A copy of the project, with the environment that runs this test as its own."""
    copy = folder / "a folder with spaces" / "the project"
    copy_project(copy)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, copy)
    # What `make` builds: here it is there already, and newer than pyproject.toml.
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{copy}:{STARTUP}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (copy / ".venv" / "ready").touch()
    return copy


def own_environment(folder: Path, with_torch: bool = False) -> Path:
    """Make an environment without any package, or with PyTorch and NumPy only, and return its Python."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, env=environment)
    if with_torch:
        linked = folder / "linked"
        linked.mkdir()
        installed = Path(find_spec("torch").origin).parents[1]
        for path in installed.iterdir():
            if not OF_THE_KIT.match(path.name) and path.suffix != ".pth":
                (linked / path.name).symlink_to(path)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "linked.pth").write_text(f"{linked}\n")
    return folder / "bin" / "python"


def commit_of(folder: Path) -> str:
    """Make the folder a repository of git, and return the commit of all that is in it."""
    git = ["git", "-C", folder, "-c", "user.name=me", "-c", "user.email=me@localhost"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=mine"]):
        succeeded(ran(*git, *command))
    return succeeded(ran(*git, "describe", "--always")).stdout.strip()


def wait_until(condition: Callable[[], object]) -> None:
    """Fails after two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.1)


def plant(script: Path, code: str, at_import: bool = False) -> None:
    """Put code at the beginning of main(), or with `at_import` in front of the script's imports.

    For what is to happen later in a training, the module `faults` has the moments.
    """
    text = script.read_text()
    module = ast.parse(text)
    if at_import:
        first = module.body[1]  # after the docstring
    else:
        (main,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "main")
        first = main.body[0]
    imports = "import faults\n" if "faults." in code else ""
    imports += "import os, signal, sys, threading, time\n"
    planted = textwrap.indent(imports + textwrap.dedent(code).strip() + "\n", " " * first.col_offset)
    lines = text.splitlines(keepends=True)
    lines.insert(first.lineno - 1, planted)
    script.write_text("".join(lines))


class Checkout:
    """A copy of the checkout, used on the login host of a cluster, or on a machine without Slurm."""

    def __init__(self, folder: Path, cluster: RunningCluster | None = None) -> None:
        self.folder, self.cluster = folder, cluster
        copy_project(folder)
        # Some commands and no others: there may be a Slurm on the PATH of whoever runs the tests.
        self.commands = folder / "commands"
        self.commands.mkdir()
        for name in ("bash", "dirname", "env", "git", "timeout"):
            (self.commands / name).symlink_to(shutil.which(name))
        self.environment = {
            name: value for name, value in ENVIRONMENT.items() if not name.startswith("SBATCH_")
        }
        # This copy of manygpus, not the installed one.
        self.environment |= {"PATH": str(self.commands), "PYTHONPATH": f"{folder}:{STARTUP}"}

    def run(
        self, *command: object, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess:
        """Run a command to its end, by default in the folder of the checkout."""
        where = {"cwd": cwd or self.folder, "timeout": 300}
        if not self.cluster:
            output_settings = {"capture_output": True, "text": True}
            return subprocess.run(
                list(map(str, command)), env=self.environment | environment, **where, **output_settings
            )
        # Set behind the cluster's own settings; the commands of `fake` come before those of the cluster.
        first = shlex.quote(f"{self.commands}:{Path(sys.executable).parent}")
        settings = {"PYTHONPATH": self.environment["PYTHONPATH"]} | environment
        assignments = [f"{name}={value}" for name, value in settings.items()]
        return self.cluster.run(
            ["bash", "-c", f'PATH={first}:$PATH exec env "$@"', "bash", *assignments, *command], **where
        )

    def python(self, script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
        return self.run(sys.executable, self.folder / script, *arguments, **environment)

    def kill(self, *words: object) -> None:
        """Kill the program that was started with these words."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # others may just have ended
                if {*map(str, words)} <= set(process.cmdline()):
                    process.send_signal(signal.SIGKILL)

    def submit_py(self, stage: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
        return self.python(f"{FOLDERS[stage]}/submit.py", *arguments, **environment)

    @property
    def job_env(self) -> Path:
        return self.folder / "manygpus" / "jobs" / "scripts" / "job_env.sh"

    def script(self, stage: str) -> Path:
        (path,) = (self.folder / FOLDERS[stage]).glob("mnist_*.py")
        return path

    def pretend(self) -> None:
        """Have every stage train nothing."""
        for stage in FOLDERS:
            self.script(stage).write_text(pretended(stage))

    def plant(self, where: str, code: str, at_import: bool = False) -> None:
        """Plant code in a stage's training script, or in another file of the checkout."""
        path = self.script(where) if where in FOLDERS else self.folder / where
        plant(path, code, at_import)

    def redefine(self, module: str, code: str) -> None:
        """Put a definition at the end of a module, where it takes the place of the one before."""
        with (self.folder / module).open("a") as file:
            file.write(f"\n\n{code}\n")

    def insert(self, where: str, line: str, before: str) -> None:
        """Put a line into a stage's training script, or another file, in front of the one that begins so."""
        path = self.script(where) if where in FOLDERS else self.folder / where
        text = path.read_text()
        (at,) = re.finditer(rf"^( *){re.escape(before)}", text, re.MULTILINE)
        planted = f"{at[1]}import os, signal, sys, threading, time\n{at[1]}{line}\n"
        path.write_text(text[: at.start()] + planted + text[at.start() :])

    def fake(self, command: str, script: str) -> None:
        """A command of Slurm that does what the shell script says."""
        path = self.commands / command
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def site(self, text: str) -> None:
        (self.folder / "slurm" / "site.sh").write_text(text)

    # --- job scripts, on a cluster ---

    def submit(self, launcher: str, *arguments: object, sbatch: tuple = ()) -> int:
        """The job's number; `sbatch` are options before the script's name, `arguments` come after it."""
        script = self.folder / SCRIPTS[launcher]
        done = self.run("sbatch", "--parsable", *sbatch, script.name, *arguments, cwd=script.parent)
        assert done.returncode == 0, done.stdout + done.stderr
        return int(done.stdout)

    def log(self, job: int) -> str:
        """What the job has written so far."""
        return "".join(path.read_text() for path in self.folder.glob(f"**/*-{job}.log"))

    def wait_for(self, text: str, job: int) -> None:
        """Until `text` is in the log of a job that still runs or waits."""
        for turn in itertools.count(1):
            if text in self.log(job):
                return
            if turn % 20 == 0:  # seldom: each time a Python starts
                state = self.cluster.job(job)["JobState"]
                assert state in UNFINISHED or text in self.log(job), (state, self.log(job))
            time.sleep(0.2)

    def train(self, launcher: str, *arguments: object, sbatch: tuple = ()) -> list[dict]:
        """Submit a job that has to go well; returns the rows of the only CSV."""
        job = self.submit(launcher, *arguments, sbatch=sbatch)
        state = self.cluster.wait(job, timeout=300)
        assert state["JobState"] == "COMPLETED", self.log(job)
        return rows_of(self.folder / "results")

    def fail(self, launcher: str, *arguments: object, sbatch: tuple = ()) -> str:
        """Submit a job that has to fail by itself, not at its time limit; returns its log."""
        job = self.submit(launcher, *arguments, sbatch=sbatch)
        state = self.cluster.wait(job)
        assert state["JobState"] == "FAILED", self.log(job)
        return self.log(job)

    @property
    def checkpoints(self) -> Path:
        (folder,) = (self.folder / "results" / "jobs").glob("*/checkpoints")
        return folder
