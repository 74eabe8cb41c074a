"""A copy of the checkout for tests that submit jobs: with a site file, results and faults of its own."""

import os
import shutil
import sys
import time
from pathlib import Path

import torch
from cluster import RunningCluster
from conftest import REPOSITORY, rows_of

SCRIPTS = {
    "single": "01_singlegpu/slurm_submit.sh",
    "dp": "02_multigpu_dp/slurm_submit.sh",
    "srun": "03_multigpu_ddp/slurm_submit.sh",
    "torchrun": "03_multigpu_ddp/slurm_submit_torchrun.sh",
}


def copy_project(folder: Path) -> None:
    """What a user has after `git clone` and `make data`, but for the tests and the environment."""
    produced = ("site.sh", "*.log", "__pycache__", "runs", "jobs", "sweeps", "comparisons", "sample")
    for name in ("trainkit", "01_singlegpu", "02_multigpu_dp", "03_multigpu_ddp", "slurm", "results"):
        ignore = shutil.ignore_patterns("practice_cluster", *produced)
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignore)
    (folder / "data").symlink_to(REPOSITORY / "data")


class Checkout:
    """A copy of the checkout, and the jobs submitted from it."""

    def __init__(self, folder: Path, cluster: RunningCluster) -> None:
        self.folder, self.cluster = folder, cluster
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = {"PATH": path, "PYTHONPATH": str(folder)}  # this copy of trainkit, not the installed one
        copy_project(folder)

    def submit(self, launcher: str, *arguments: object, sbatch: tuple = ()) -> int:
        """The job's number; `sbatch` are options before the script's name, `arguments` come after it."""
        script = self.folder / SCRIPTS[launcher]
        return self.cluster.submit(*sbatch, script.name, *arguments, cwd=script.parent, env=self.env)

    def log(self, job: int) -> str:
        """What the job has written so far."""
        return "".join(path.read_text() for path in self.folder.glob(f"**/*-{job}.log"))

    def wait_for(self, text: str, job: int) -> None:
        """Until `text` is in the log of a job that still runs or waits."""
        while text not in self.log(job):
            assert self.cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), self.log(job)
            time.sleep(0.2)

    def run(self, launcher: str, *arguments: object, sbatch: tuple = ()) -> list[dict]:
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

    def plant(self, stage: str, fault: str) -> None:
        """Put `fault` into the loop over the epochs of a stage script, after the first epoch."""
        (script,) = self.folder.glob(f"{stage}*/mnist_*.py")
        loop = "        tested = engine.evaluate"
        text = script.read_text()
        assert loop in text
        planted = f"        if epoch == 2 and here.rank == 1:\n            {fault}\n{loop}"
        script.write_text("import os\nimport sys\nimport time\n" + text.replace(loop, planted))

    @property
    def checkpoints(self) -> Path:
        (folder,) = (self.folder / "results" / "jobs").glob("*/checkpoints")
        return folder

    def weights(self) -> dict[str, torch.Tensor]:
        (path,) = (self.folder / "results" / "models").glob("*.pt")
        return torch.load(path, weights_only=True)
