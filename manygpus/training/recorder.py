"""The record of a training with a loop from elsewhere: Accelerate's, Fabric's, or your own."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from manygpus.config import options
from manygpus.devices import reset_peak_memory
from manygpus.distributed import process_group
from manygpus.errors import UserError, first_line
from manygpus.network import training_identity
from manygpus.network.model import trained_weights
from manygpus.network.rank_weights import inner_optimizer
from manygpus.record.columns import OWN_LOOP
from manygpus.record.loggers import Logger
from manygpus.record.records import ALL_EPOCHS, IMAGES, ITS_LOOP, SAME, RecordWriter, Row
from manygpus.training import printing, run_facts
from manygpus.training.drift import Drift

# What `Recorder.epoch` has of a test where there was none.
NO_TEST = {"test_samples": 0, "test_seconds": 0, "test_loss": math.nan, "accuracy": math.nan}
NEVER_BELOW_0 = ("samples", "seconds", "test_samples", "test_seconds", "accuracy")


class Recorder:
    """Writes the record of a training with another loop.

        recorder = Recorder("mine", model, optimizer, batch_size=64, epochs=10, dataset="noise")
        checkpointer = Checkpointer({"model": model, "optimizer": optimizer, "recorder": recorder})
        epoch, step = checkpointer.resume()
        for epoch in range(epoch, 11):
            ...  # the steps, as Checkpointer says
            recorder.epoch(samples, seconds, loss)
            checkpointer.save(epoch + 1)
        checkpointer.finish()
        recorder.finish()

    Every rank creates one after the process group, and calls its methods at the same points; rank 0
    writes. A Checkpointer keeps it as one of its parts, as does what else saves by state_dict. `first_epoch`
    is 1, or follows the last epoch of the state that was loaded.

    Args:
        name: the training's name in the record.
        model, optimizer: the network and its optimizer, on the device that they train on, wrapped or not.
        batch_size: the global batch size: samples per optimizer step of all ranks together.
        epochs: the number planned.
        dataset: its name.
        settings: other settings that identify the training, such as {"hidden": 256}.
        precision: the type that the layers compute in, such as "bf16", if it is not that of the weights.
        lr_scheduler: the training's scheduler, for the record; without it the rates tell two schedules apart.
        weights_differ: whether the weights rightly differ between the ranks, as in local SGD or in a
            pipeline. Otherwise the training ends after the first epoch if each rank has trained by itself, or
            all with the same samples.
        loggers: what gets each epoch besides the record, such as TensorBoardLogger.
        unit: the unit in which the speed is told, such as "graphs"; by default `samples` are images.
        per_sample: units in a sample, such as the tokens in a window.
        results_dir: the folder of results; by default that of the job, or `results` in this checkout.

    Raises:
        UserError: if several processes have no process group, a setting cannot be recorded, or the results
            cannot be written.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batch_size: int,
        epochs: int,
        dataset: str,
        settings: dict[str, object] | None = None,
        precision: str = "fp32",
        lr_scheduler: object | None = None,
        weights_differ: bool = False,
        loggers: Sequence[Logger] = (),
        unit: str = IMAGES,
        per_sample: float = 1,
        results_dir: Path | str | None = None,
    ) -> None:
        self._optimizer = inner_optimizer(optimizer)
        self._device = next(model.parameters()).device
        self._batch_size = batch_size
        dist_env = process_group.read_distributed(self._device)
        results = Path(results_dir or os.environ.get("MANYGPUS_RESULTS_DIR") or options.DEFAULT_RESULTS)
        lr = training_identity.base_lr(self._optimizer)
        columns = run_facts.of_start(dist_env, model, dataset, precision) | {
            "stage": name,
            "devices": dist_env.world_size,
            "global_batch": batch_size,
            "batch_per_device": batch_size // dist_env.world_size,
            "recipe": OWN_LOOP,
            "loader": "workers",
            "lr": lr,
            "gamma": math.nan,
            "parameters": trained_weights(model),
            "settings": options.settings_in_words(settings or {}),
            "optimizer": training_identity.of_optimizer(self._optimizer),
            "schedule": training_identity.of_lr_scheduler(lr_scheduler),
            "network": training_identity.of_network({"model": model}),
            "arguments": training_identity.of_arguments(),
        }
        self._epochs = epochs
        self._unit = unit
        self._per_sample = per_sample
        self._record = process_group.on_rank_0(
            lambda: self._open_record(results.absolute(), columns, loggers)
        )
        # What an optimizer that has made steps began with is known from the record alone.
        self._must_be_equal = (*SAME, "precision")
        if not self._optimizer.state:
            self._must_be_equal += ("optimizer", "lr")
        self.first_epoch = self._epoch = 1
        self._drift = None if weights_differ else Drift([model])  # until the first epoch is compared

    def _open_record(self, results_dir: Path, columns: Row, loggers: Sequence[Logger]) -> RecordWriter:
        record = RecordWriter(
            results_dir / "runs", columns, loggers, unit=self._unit, per_sample=self._per_sample
        )
        printing.print_start(record.facts)
        return record

    def epoch(self, samples: int, seconds: float, loss: float, **metrics: float) -> None:
        """Write the row of the next epoch, from each rank's own numbers.

        Args:
            samples: how many samples this rank trained on; the record has the sum over all ranks.
            seconds: how long it took, by a clock that waited for the GPU; the slowest rank counts.
            loss: this rank's mean loss per sample; the record has the mean over the samples of all ranks.
            metrics: `test_samples`, `test_seconds`, `test_loss` and `accuracy` (%) of its shard of the test
                become columns. Others, means over its samples, go to `<run_id>.metrics.tsv`.

        Raises:
            UserError: if a number makes no sense, the row cannot be written, or each rank has trained by
                itself, or all with the same samples; also after the last of the `epochs`. Earlier epochs are
                kept.
        """
        # Seen: a framework, requeued just after its last epoch, started anew, and had rows of "epoch 5/4".
        if self._epoch > self._epochs:
            raise UserError(
                f"the record has all {self._epochs} epochs already, and got one more: begin with the epoch "
                "`first_epoch` of the Recorder, or give it more `epochs`."
            )
        numbers = {"samples": samples, "seconds": seconds, "loss": loss} | NO_TEST | metrics
        try:
            numbers = _checked(numbers)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UserError(
                f"epoch {self._epoch} has a value that makes no sense ({first_line(error)}): give one for "
                "each name."
            ) from None
        numbers_by_rank = process_group.gather(numbers)
        if any(rank_numbers.keys() != numbers.keys() for rank_numbers in numbers_by_rank):
            raise UserError(
                f"the ranks give epoch {self._epoch} different metrics: give the same names on all."
            )
        if self._drift:
            self._drift.check()
            self._drift = None
        rank_rows = run_facts.rows_of_ranks(
            self._epoch, self._device, own_seconds=math.nan, data_seconds=math.nan
        )
        means = {name: _mean(numbers_by_rank, name) for name in numbers}
        trained = sum(rank_numbers["samples"] for rank_numbers in numbers_by_rank)
        slowest = max(rank_numbers["seconds"] for rank_numbers in numbers_by_rank)
        row = {
            "epoch": self._epoch,
            "steps": max(1, trained // self._batch_size),
            "images": trained,
            "train_seconds": slowest,
            "images_per_s": trained / (slowest or math.nan),
            "train_loss": means["loss"],
            "test_images": sum(rank_numbers["test_samples"] for rank_numbers in numbers_by_rank),
            "eval_seconds": max(rank_numbers["test_seconds"] for rank_numbers in numbers_by_rank),
            "test_loss": means["test_loss"],
            "test_accuracy": means["accuracy"],
            "learning_rate": float(self._optimizer.param_groups[0].get("lr") or 0),
            "peak_memory_mb": max(of_device["peak_memory_mb"] for of_device in rank_rows),
        }
        epoch_metrics = [
            {"epoch": self._epoch, "metric": name, "of": "epoch", "value": means[name]}
            for name in metrics
            if name not in NO_TEST
        ]
        process_group.on_rank_0(lambda: self._write_row(row, rank_rows, epoch_metrics))
        self._epoch += 1
        reset_peak_memory()

    def _write_row(self, row: Row, rank_rows: list[Row], metrics: list[Row]) -> None:
        row = self._record.add(row, rank_rows, metrics)
        printing.print_epoch(row, rank_rows, self._epochs, self._unit, self._per_sample)

    def state_dict(self) -> dict[str, object]:
        """Return the state that a checkpoint has to keep to continue the record; rank 0's counts."""
        return self._record.state_dict() | {"epoch": self._epoch - 1} if self._record else {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Resume from an earlier start, on every rank from rank 0's `state_dict`, in a record of its own.

        Raises:
            ValueError: on rank 0, if it is not such a state, or of another training.
            PeerError: then on the others.
        """
        try:
            process_group.on_rank_0(lambda: self._check_same(state))
            process_group.on_rank_0(lambda: self._record.load_state_dict(state))
            self.first_epoch = self._epoch = state["epoch"] + 1
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"this record is of another training, or none: {error}") from None

    def _check_same(self, state: dict[str, object]) -> None:
        """Raise a ValueError if a start of another training has saved `state`."""
        for name in self._must_be_equal:
            before, now = state["facts"][name], self._record.facts[name]
            if str(before) != str(now):  # NaN is NaN
                raise ValueError(f"its {name} is {before}, not {now}")

    def finish(self) -> None:
        """Note in the record that the training has ended, and print where the record is.

        Call it when the last checkpoint is whole, and not after a stop. If a kill came before that, the next
        start would train the last epochs again, as a second run.

        Raises:
            UserError: if that cannot be written; the epochs are.
        """
        process_group.on_rank_0(self._finish_on_rank_0)

    def _finish_on_rank_0(self) -> None:
        self._record.finish(ALL_EPOCHS if self._epoch > self._epochs else ITS_LOOP)
        printing.print_end(self._record, self._epochs)


def _checked(numbers: dict[str, float]) -> dict[str, float]:
    """Return what `Recorder.epoch` was given as numbers; raise a ValueError for what makes no sense."""
    checked = {name: float(value) for name, value in numbers.items()}
    checked |= {name: int(checked[name]) for name in ("samples", "test_samples")}
    for name, value in checked.items():
        is_below_0 = value < 0 and name in NEVER_BELOW_0
        if math.isinf(value) or is_below_0 or (name == "accuracy" and value > 100):
            raise ValueError(f"{name} is {value}")
    return checked


def _mean(numbers_by_rank: list[dict[str, float]], name: str) -> float:
    """Return the mean over the samples of all ranks, or over the ranks if their samples are unknown."""
    samples = "test_samples" if name in ("test_loss", "accuracy") else "samples"
    weights = [rank_numbers[samples] for rank_numbers in numbers_by_rank]
    if not any(weights):
        weights = [1] * len(numbers_by_rank)
    # The value of a rank without samples may be NaN.
    weighted = [
        rank_numbers[name] * weight
        for rank_numbers, weight in zip(numbers_by_rank, weights, strict=True)
        if weight
    ]
    return sum(weighted) / sum(weights)
