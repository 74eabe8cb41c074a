"""What a run tells: one line per epoch on the screen and one row per epoch in its CSV."""

import os
import platform
import secrets
import subprocess
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from trainkit.epoch import Tested, Trained
from trainkit.errors import UserError
from trainkit.options import Options
from trainkit.records import Recorder
from trainkit.world import World


class RunLog:
    """The log of one run. Only rank 0 has one.

    `devices` is the number of devices that really compute. Raises UserError if the results
    directory cannot be written to.
    """

    def __init__(self, stage: str, options: Options, world: World, devices: int, precision: str) -> None:
        self._options = options
        self._started = psutil.Process().create_time()
        self._before_s = 0.0  # what earlier processes of this run took
        self._warm = False
        started_at = datetime.fromtimestamp(self._started, timezone.utc)
        self.run_id = f"{stage}-{started_at:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        self._facts = {
            "run_id": self.run_id,
            "stage": stage,
            "launcher": world.launcher,
            "dataset": options.dataset,
            "loader": options.loader,
            "recipe": options.recipe,
            "world_size": world.size,
            "nodes": world.nodes,
            "devices": devices,
            "device_name": device_name(world.device),
            "workers_per_loader": options.num_workers,
            "threads_per_worker": torch.get_num_threads(),
            "global_batch": options.batch_size,
            "batch_per_device": options.batch_size // devices,
            "accumulate": 1,
            "precision": precision,
            "compiled": False,
            "seed": options.seed,
            "job_id": os.environ.get("SLURM_JOB_ID", ""),
            "node_list": os.environ.get("SLURM_JOB_NODELIST", platform.node()),
            "torch_version": str(torch.__version__),
            "cuda_version": torch.version.cuda if world.device.type == "cuda" else "",
            "git_commit": git_commit(),
            "started_at": f"{started_at:%Y-%m-%dT%H:%M:%SZ}",
        }
        self._recorder = None if options.dry_run else Recorder(options.results_dir, self._facts)
        print(
            f"stage {stage} · {devices} x {self._facts['device_name']} · {options.dataset} · global batch "
            f"{options.batch_size} · {options.loader} loader · {precision} · recipe {options.recipe}"
        )

    def epoch(self, epoch: int, trained: Trained, tested: Tested) -> None:
        """Print the line of one epoch and write its row."""
        images = trained.steps * self._options.batch_size
        images_per_s = images / trained.seconds
        train = f"loss {trained.loss:.4f}, {images_per_s:,.0f} images/s, {trained.seconds:.1f} s"
        test = f"accuracy {tested.accuracy:.2f} %, loss {tested.loss:.4f}, {tested.seconds:.1f} s"
        print(f"epoch {epoch}/{self._options.epochs}: train {train} | test {test}", flush=True)
        if self._recorder is None:
            return
        self._recorder.add(
            epoch=epoch,
            warmup=not self._warm,
            steps=trained.steps,
            images=images,
            train_seconds=trained.seconds,
            images_per_s=images_per_s,
            eval_seconds=tested.seconds,
            train_loss=trained.loss,
            test_loss=tested.loss,
            test_accuracy=tested.accuracy,
            learning_rate=trained.learning_rate,
            peak_memory_mb=tested.peak_memory_mb,
            elapsed_s=self._elapsed_s(),
        )
        self._warm = True

    def state(self) -> dict:
        """What a checkpoint keeps of the log, so that the run can go on under its own name."""
        facts = {name: self._facts[name] for name in ("run_id", "started_at", "precision")}
        return {"facts": facts, "elapsed_s": self._elapsed_s(), "rows": self._recorder.rows}

    def go_on(self, state: dict) -> None:
        """Continue the run that `state` was kept of; epochs written after that count as not written.

        Raises:
            UserError: if the CSV cannot be written.
        """
        self.run_id, self._before_s = state["facts"]["run_id"], state["elapsed_s"]
        self._recorder.go_on(state["facts"], state["rows"])

    def _elapsed_s(self) -> float:
        """Seconds that the run's processes took so far, without the time between two of them."""
        return self._before_s + time.time() - self._started

    def finish(self, model: torch.nn.Module) -> None:
        """Save the weights if asked to, and say where everything is."""
        if self._recorder is None:
            print("dry run: one training step and one test batch went through; nothing was written.")
            return
        if self._options.save_model:
            print(f"weights: {self._save(model)}")
        print(f"results: {self._recorder.path}")

    def _save(self, model: torch.nn.Module) -> Path:
        # DataParallel and DistributedDataParallel keep the network itself in `.module`; without
        # their prefix the file loads into a plain Net.
        network = getattr(model, "module", model)
        path = self._options.results_dir / "models" / f"{self.run_id}.pt"
        temporary = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(network.state_dict(), temporary)
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                temporary.unlink()
            raise UserError(
                f"the weights cannot be saved to {path} ({error}). The results are in {self._recorder.path}."
            ) from None
        return path


def device_name(device: torch.device) -> str:
    """The GPU's name, or "CPU: " and the processor's, from Linux's /proc/cpuinfo."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"CPU: {line.split(':', 1)[1].strip()}"
    return f"CPU: {platform.machine()}"  # ARM processors have no name there


def git_commit() -> str:
    """The commit of this checkout, with "-dirty" if it was changed since; empty outside of git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
