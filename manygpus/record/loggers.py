"""Where the epochs of a training go besides its record: TensorBoard, Weights & Biases, MLflow, or your own.

    run = Run("mine", ..., loggers=[TensorBoardLogger("results/tensorboard")])
    recorder = Recorder("mine", ..., loggers=[WandbLogger("my project")])

Rank 0 calls them, after it has written the CSV. A training that resumes from a checkpoint resumes the run
that its first start has begun.
"""

import math
import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from manygpus.errors import UserError
from manygpus.record.columns import COLUMNS, Role

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]

# The columns of a record that are curves.
CURVES = ("train_loss", "test_loss", "test_accuracy", "images_per_s", "learning_rate", "peak_memory_mb")


class Logger(Protocol):
    """What `Run` and `Recorder` hand the epochs of a training to.

    Every rank makes one, and rank 0 alone calls its methods. If one raises an error, a warning says so, and
    the training goes on without this logger.
    """

    def start(self, run_id: str, config: dict[str, object], first_epoch: int) -> None:
        """Begin a run, or resume it; called before the first `log` of each start of a training.

        Args:
            run_id: the id of the first start's record: the same when the training is resumed.
            config: what `config_of` returns of the record.
            first_epoch: the first that this start logs. Later epochs of an earlier start do not count.
        """

    def log(self, epoch: int, metrics: dict[str, float]) -> None:
        """Take the numbers of an epoch (counted from 1), each by its name as `curves` says."""

    def finish(self) -> None:
        """End the run, after its last epoch. A training that was stopped and will resume does not call it."""


def config_of(facts: dict[str, object]) -> dict[str, object]:
    """Return the columns of a record that say what was trained, how and where; those that say something."""
    return {
        name: value
        for name, value in facts.items()
        if name in COLUMNS and COLUMNS[name].role != Role.MEASUREMENT and value != ""
    }


def curves(row: dict[str, object], metrics: Iterable[dict[str, object]]) -> dict[str, float]:
    """Return the numbers of an epoch: columns by their names, and metrics as `metric/of`; those known.

    Args:
        row: the epoch's row of the record.
        metrics: the rows of the same epoch, with the columns of `METRIC_COLUMNS`.
    """
    numbers = {name: row[name] for name in CURVES}
    numbers |= {f"{metric['metric']}/{metric['of']}".rstrip("/"): metric["value"] for metric in metrics}
    return {name: float(value) for name, value in numbers.items() if not math.isnan(value)}


class TensorBoardLogger:
    """Writes a run to `folder/<run_id>`; look with `tensorboard --logdir folder`.

    Raises:
        UserError: if TensorBoard is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        _check_installed("tensorboard", "TensorBoard", "tensorboard")
        self._folder = Path(folder)

    def start(self, run_id: str, config: dict[str, object], first_epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes long to import

        # TensorBoard shows nothing that an earlier start has logged from this epoch on.
        self._writer = SummaryWriter(self._folder / run_id, purge_step=first_epoch)
        table = "".join(f"| {name} | {value} |\n" for name, value in config.items())
        self._writer.add_text("config", f"| column | value |\n|---|---|\n{table}", first_epoch)

    def log(self, epoch: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, epoch)
        # To see each epoch while the training runs; and the thread that writes reports its errors here.
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class WandbLogger:
    """Writes a run of Weights & Biases, offline unless WANDB_MODE says otherwise.

    Compute nodes often have no internet. `wandb sync FOLDER/wandb/offline-run-*` uploads later. Each start
    of a training has a folder there, with one id.

    W&B writes an offline file in blocks of 32 KiB (its core/pkg/leveldb), the last one when the process ends.
    Where Slurm ends W&B's own process at the same moment, by scancel or by SIGTERM at a preemption, the last
    epochs of that start are in the record alone.

    Args:
        project: its name in W&B.
        folder: the folder in which W&B makes its own, `wandb`; by default WANDB_DIR, or the current folder.

    Raises:
        UserError: if W&B is not installed.
    """

    def __init__(self, project: str, folder: Path | str | None = None) -> None:
        _check_installed("wandb", "Weights & Biases", "wandb")
        self._project = project
        self._folder = folder

    def start(self, run_id: str, config: dict[str, object], first_epoch: int) -> None:
        import wandb

        if self._folder:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            dir=self._folder,
            id=run_id,
            name=run_id,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=config,
        )
        # W&B's own steps only grow, and an epoch may come a second time.
        self._run.define_metric("*", step_metric="epoch")

    def log(self, epoch: int, metrics: dict[str, float]) -> None:
        self._run.log({"epoch": epoch} | metrics)

    def finish(self) -> None:
        self._run.finish()


class MLflowLogger:
    """Writes a run of MLflow to a folder or a tracking server.

    Args:
        tracking_uri: a folder, or the address of a server, such as "http://login1:5000".
        experiment: its name in MLflow.

    Raises:
        UserError: if MLflow is not installed.
    """

    def __init__(self, tracking_uri: Path | str, experiment: str) -> None:
        _check_installed("mlflow", "MLflow", "mlflow-skinny")
        self._tracking_uri = str(tracking_uri)
        self._experiment = experiment

    def start(self, run_id: str, config: dict[str, object], first_epoch: int) -> None:
        # MLflow 3 would have a database in place of a folder, but the jobs of a cluster share only files.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # MLflow would try for four minutes to reach a server that is down, and for 16 where a firewall says
        # nothing. Meanwhile the other ranks wait, and after --timeout they would end the training.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(self._tracking_uri)
        experiment_id = _experiment_id(self._client, self._experiment)
        earlier_runs = self._client.search_runs([experiment_id], f"tags.manygpus_run = '{run_id}'")
        if earlier_runs:
            self._run_id = earlier_runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        created = self._client.create_run(experiment_id, run_name=run_id, tags={"manygpus_run": run_id})
        self._run_id = created.info.run_id
        parameters = [Param(name, str(value)) for name, value in config.items()]
        self._client.log_batch(self._run_id, params=parameters)

    def log(self, epoch: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            # The characters that MLflow accepts in a name.
            self._client.log_metric(self._run_id, re.sub(r"[^\w\-. /]", "_", name), value, step=epoch)

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def _experiment_id(client: "MlflowClient", name: str) -> str:
    """Return the id of the experiment, which is made unless it is there."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment:
        return experiment.experiment_id
    try:
        return client.create_experiment(name)
    except MlflowException:
        # Another job of a sweep may have made it since.
        return client.get_experiment_by_name(name).experiment_id


def _check_installed(module: str, name: str, package: str) -> None:
    """Raise a UserError before the training if `module` cannot be imported; importing it would take long."""
    if find_spec(module) is None:
        raise UserError(f"{name} is not installed here: pip install {package}")
