"""The processes of a job: what submitit calls in each of them, and starting them on this machine.

`start` starts all trainings here without Slurm: those of submit.py, sweeps, `make compare` and the
benchmarks.
"""

import os
import runpy
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

from trainkit.jobs.following import LocalHandle
from trainkit.jobs.stages import REPOSITORY
from trainkit.runtime import job_folder, place, plain
from trainkit.runtime.process import end_with
from trainkit.schema import samples

# submitit announces every step; the log should have only the stage's lines.
QUIET = {"SUBMITIT_LOG_LEVEL": "CRITICAL"}
DAY_MINUTES = 24 * 60
# Device nodes of NVIDIA's GPUs, of AMD's, and of both in Windows' Linux.
GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")  # on AMD's GPUs the first counts before the second


@dataclass(frozen=True)
class Rank:
    """What submitit calls in every process of a job: the stage script, as `srun python` would start it.

    It ends by SystemExit, with the stage's exit code and last words. `visible_gpus` is for local
    processes, for which submitit sets CUDA_VISIBLE_DEVICES; on a node Slurm does that.
    """

    script: Path
    arguments: tuple[str, ...]
    visible_gpus: str | None = None
    checkpoints: bool = True
    plain: bool = False

    def __call__(self) -> None:
        import submitit

        os.environ.pop("PYTHONSAFEPATH", None)  # a queue.py where it started was not for submitit
        # submitit survives SIGTERM, and answers USR2 by putting the job back into the queue itself.
        # Here the stage handles both (trainkit.rank.checkpoint); they end a process without checkpoints.
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        # Not with submitit's TorchDistributedEnvironment: it would show each process only one GPU, does
        # not expect MASTER_PORT to be set, and takes ports that the system assigns itself.
        job = submitit.JobEnvironment()
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(job.global_rank), str(job.num_tasks)
        os.environ["LOCAL_RANK"] = str(job.local_rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(place.size_here(job.num_tasks, job.num_nodes))
        os.environ["GROUP_WORLD_SIZE"] = str(job.num_nodes)
        if self.visible_gpus is not None:
            end_with(int(job.job_id), signal.SIGTERM)
            os.environ |= dict.fromkeys(VISIBLE, self.visible_gpus)
        if self.plain:
            plain.run(self.script, self.arguments, noted=self.visible_gpus is not None)
        sys.path.insert(0, str(self.script.parent))
        places = ["--data-dir", os.environ["TRAINKIT_DATA_DIR"]]
        places += ["--results-dir", os.environ["TRAINKIT_RESULTS_DIR"]]
        if self.checkpoints:
            places += [
                "--checkpoint-dir",
                str(job_folder.here() / job_folder.CHECKPOINTS),
                "--resume",
                "auto",
            ]
        sys.argv = [str(self.script), *places, *self.arguments]
        runpy.run_path(str(self.script), run_name="__main__")


def start(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    data_dir: Path,
    results_dir: Path,
    *,
    ranks: int = 1,
    gpus: int = 0,
    threads: int | None = None,
    minutes: int = DAY_MINUTES,
    checkpoints: bool = True,
    sampled: bool = False,
    plain: bool = False,
) -> LocalHandle:
    """Start the ranks of a job on this machine, in an environment prepared here.

    Args:
        folder: new; for the logs, checkpoints and notes.
        gpus: of the whole job, all visible to every rank. Ranks on CPUs get equal shares of the cores.
        threads: of each rank (default: OMP_NUM_THREADS, else an equal share of the cores).
        minutes: time limit; shortly before it, the ranks are asked to save a checkpoint and end.
        checkpoints: save them, and resume from them.
        sampled: also start the sampler, which ends the log with its verdict (trainkit.monitor.cli).
        plain: the script does not use the kit (runtime/plain.py).
    """
    import submitit

    if threads is None:
        share = max(len(os.sched_getaffinity(0)) // ranks, 1)
        threads = os.environ.get("OMP_NUM_THREADS", share)
    variables = outside_of_jobs() | QUIET
    variables |= {
        "TRAINKIT_DATA_DIR": str(data_dir),
        "TRAINKIT_RESULTS_DIR": str(results_dir),
        job_folder.VARIABLE: str(folder),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(place.free_port()),
        "OMP_NUM_THREADS": str(threads),
        # As in slurm/job_env.sh: a script that is killed leaves what it has printed.
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
    }  # fmt: skip
    chosen = (os.environ[name].split(",") for name in VISIBLE if name in os.environ)
    visible = next(chosen, [str(index) for index in range(gpus)])[:gpus]
    executor = submitit.LocalExecutor(folder)
    executor.update_parameters(tasks_per_node=ranks, timeout_min=minutes, stderr_to_stdout=True)
    # Ctrl-C reaches only this process, which then ends the others in order.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sampled:
        (folder / samples.FOLDER).mkdir(exist_ok=True)  # where the ranks note their records
    if plain:
        (folder / job_folder.PLAIN).touch()
        (folder / job_folder.CHECKPOINTS).mkdir()
    try:
        # submitit's processes inherit it.
        with patch.dict(os.environ, variables | {"PYTHONSAFEPATH": "1"}, clear=True):
            job = executor.submit(Rank(script, tuple(arguments), ",".join(visible), checkpoints, plain))
        with patch.dict(os.environ, variables | dict.fromkeys(VISIBLE, ",".join(visible)), clear=True):
            sampler = _sampler(folder, job.job_id, job.paths.stdout) if sampled else None
    finally:
        signal.signal(signal.SIGINT, before)
    results = None if plain else results_dir / "runs"
    return LocalHandle(job.job_id, ranks, job.paths.stdout, folder, results, job.done, sampler)


def _sampler(folder: Path, job_id: str, log: Path) -> subprocess.Popen:
    """Start the sampler, which outlives this program and writes its verdict to the log."""
    place = folder / samples.FOLDER
    with log.open("ab") as output, (place / "log").open("w") as complaints:
        return subprocess.Popen(
            [sys.executable, REPOSITORY / "slurm" / "monitor.py", "--sample", place, "--until", job_id],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=complaints,
            start_new_session=True,
        )


def has_ended(job_id: str, folder: Path) -> bool:
    """Return whether the process that controls the ranks of the job in `folder` has ended."""
    try:  # the number may now belong to another program
        return os.fsencode(folder) not in Path("/proc", job_id, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return True


def submitted(folder: Path) -> tuple[str, bool]:
    """Return the number of the job that submitit sent from `folder`, "" if none, and whether Slurm has it."""
    name = next((path.name for path in folder.glob("[0-9]*_submitted.pkl")), "")
    scripts = folder.glob("*submission*.sh")  # with a dot in front if submit.py was killed
    return name.removesuffix("_submitted.pkl"), next(scripts, None) is not None


def outside_of_jobs() -> dict[str, str]:
    """Return this environment for another job, without what a launcher or the job that it is in has set."""
    inside = "SLURM_JOB_ID" in os.environ
    return {
        name: value
        for name, value in os.environ.items()
        if not place.LEFT_BY_LAUNCHERS.fullmatch(name)
        and not (inside and name.startswith("SLURM_") and name != "SLURM_CONF")
    }


def new_name(word: str) -> str:
    """Make a folder name that no other job has had, as numbers are reused."""
    return f"{word}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def gpus_here() -> int:
    """Count the GPUs that PyTorch sees here, without loading it, which is slow, if there can be none.

    Raises:
        UserError: if there are GPUs that PyTorch cannot use.
    """
    if not any(next(Path("/dev").glob(name), None) for name in GPU_DEVICES):
        return 0
    from trainkit.runtime.device import usable_gpus

    return len(usable_gpus())
