"""What surrounds the training step: the clock, the progress bar, the record, checkpoints, and going on."""

import math
import platform
import sys
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from trainkit.rank import operations
from trainkit.rank.agreement import Agreement
from trainkit.rank.batches import Batch, Batches
from trainkit.rank.checkpoint import Checkpoints
from trainkit.rank.compute_time import ComputeTime
from trainkit.rank.data import Split
from trainkit.rank.epoch import Metric, PartialEpoch, Tested, Trained, not_a_number
from trainkit.rank.model import bare
from trainkit.rank.options import Options
from trainkit.rank.runlog import RunLog
from trainkit.runtime import clock, machine, process_group, startup
from trainkit.runtime.errors import UserError, tell
from trainkit.runtime.process_group import World

if TYPE_CHECKING:
    from trainkit.rank.sharded import Sharded  # takes long to import, and few need it


class Run:
    """One training, which the loop of a stage goes through.

        for epoch in run.epochs():
            for inputs, targets in run.steps(epoch, train_batches):
                ...  # the training step
                run.add(loss)
            run.end_of_epoch(epoch, evaluate(model, test_batches, loss_function))
        run.finish()

    Every rank has one and calls all of this; rank 0 prints and writes. With `--resume auto` the
    newest checkpoint is loaded here, into `model`, `optimizer` and `schedule`.

    Args:
        name: what the record calls the run: "single", "dp", "ddp", or a name of your own.
        devices: the number of devices that really compute, on all ranks together.
        accumulate: the number of micro-batches that each batch is cut into.
        also: more of the training's state, by name: what has a state_dict() that a checkpoint is to keep.
        sharded: of a network that is split over the ranks; each then writes its own part of a checkpoint.
        flops: operations of a forward and a backward pass for one sample, where you know better than a count.

    Raises:
        UserError: if results or checkpoints cannot be written, or the checkpoints are of another training.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        here: World,
        train_set: Split,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler,
        devices: int,
        accumulate: int = 1,
        also: dict[str, object] | None = None,
        sharded: "Sharded | None" = None,
        flops: float | None = None,
    ) -> None:
        startup.mark("optimizer")
        self._options, self._model, self._schedule, self._sharded = options, model, schedule, sharded
        facts = {"stage": name, "devices": devices, "accumulate": accumulate, "flops_per_image": flops}
        if flops is None:
            facts["flops_per_image"] = math.nan if sharded else operations.per_image(model, train_set)
        trained = (weights.numel() for weights in model.parameters() if weights.requires_grad)
        facts["parameters"] = sharded.parameters() if sharded else sum(trained)
        # None but on rank 0.
        self._log = process_group.on_rank_0(lambda: RunLog(options, here, train_set.name, model, facts))
        parts = {"optimizer": optimizer, "schedule": schedule} | (also or {})
        self._checkpoints = Checkpoints(options, train_set.name, model, parts, self._log, sharded)
        self._meeting = Agreement(here.device)
        self._own_time = ComputeTime(model, optimizer, here.device)
        self._device = here.device
        self._ended = process_group.broadcast(self._has_ended())
        self.trained: Trained | None = None  # the epoch whose steps are done, until the next one begins
        startup.mark("record")

    def epochs(self) -> Iterator[int]:
        """The epochs that are still to be trained, counted from 1, until --stop-at or --patience end it."""
        for epoch in self._checkpoints.epochs():
            if self._ended:
                return
            yield epoch

    def steps(self, epoch: int, batches: Batches) -> Iterator[Batch]:
        """The batches of `epoch` that no earlier process has trained on, on the clock.

        Raises:
            UserError: if a loss was not a number, a second or so later; the text tells the step.
            Stopped: if a signal asked to save and stop within the epoch.
        """
        self.trained = None
        device = batches.device
        machine.reset_peak_memory()  # the first epoch's has what cuDNN tries out, too
        learning_rate = self._schedule.get_last_lr()[0]
        done = self._checkpoints.part_of(epoch) or PartialEpoch(0, 0.0, learning_rate, torch.zeros(0))
        batches.set_epoch(epoch, done.steps)
        # Losses stay on the device until the epoch ends: reading one makes the CPU wait for the GPU.
        self._losses = torch.zeros(len(batches), device=device)
        self._losses[: done.steps] = done.losses
        self._added, seconds = done.steps, done.seconds
        self._data_seconds, first = 0.0, done.steps
        bar = tqdm(
            self._timed(batches),
            initial=first,
            total=len(batches),
            desc=f"epoch {epoch}",
            unit="step",
            leave=False,
            # None: shown on a terminal, not in a log file. It may be closed.
            disable=None if process_group.is_rank_0() and sys.stderr else True,
        )
        started = clock.start(device)
        self._own_time.begin()
        for step, batch in enumerate(bar, start=first + 1):
            yield batch
            if self._added != step:
                raise UserError(f"{self._added} losses after {step} steps: call run.add(loss) once in each.")
            self._own_time.end_of_step()
            if not self._meeting.due():
                continue
            losses = self._losses[:step]
            stop, save, broken = self._meeting.ask(*self._checkpoints.wishes(), not losses.isfinite().all())
            # The first agreement is after the first step, and waits for its end.
            if self._log and (told := startup.told("first step")):
                bar.clear()
                tell(told)
            if broken:
                check_finite(mean_over_ranks(losses), epoch)
            if (stop or save) and step < len(batches):
                seconds += clock.stop(device, started)  # saving is not training
                part = PartialEpoch(step, seconds, done.learning_rate, mean_over_ranks(losses).cpu())
                self._checkpoints.save(epoch, part, stop)
                started = clock.start(device)
            self._own_time.begin()  # they have waited for each other
        seconds += clock.stop(device, started)

        losses = mean_over_ranks(self._losses)
        check_finite(losses, epoch)
        self.trained = Trained(len(batches), seconds, losses.mean().item(), done.learning_rate)
        self._data_seconds *= len(batches) / max(len(batches) - first, 1)

    def add(self, loss: torch.Tensor) -> None:
        """Take note of the loss of this step: the mean over this rank's share of the batch."""
        self._losses[self._added] = loss.detach()
        self._added += 1

    def end_of_epoch(self, epoch: int, tested: Tested, metrics: Iterable[Metric] = ()) -> None:
        """Write the row of `epoch`, then a checkpoint.

        Rank 0's `metrics` go to `<run_id>.metrics.tsv` beside the CSV.

        Raises:
            UserError: if one of them cannot be written; what was written before stays. Also if the loop
                over `steps` was left before its end.
            Stopped: if a signal asked to stop.
        """
        if self.trained is None:
            raise UserError(f"epoch {epoch} was left early: let the loop over run.steps come to its end.")
        # Of a mean, as an epoch that was interrupted has steps that an earlier process went through. Unknown
        # where a network is split: such ranks wait for each other in the middle of a step, too.
        own_seconds = math.nan if self._sharded else self._own_time.per_step() * self.trained.steps
        of_ranks = rows_of_ranks(epoch, self._device, own_seconds, self._data_seconds)
        process_group.on_rank_0(lambda: self._log.epoch(epoch, self.trained, tested, of_ranks, metrics))
        stop, _, self._ended = self._meeting.ask(*self._checkpoints.wishes(), self._has_ended())
        self._checkpoints.save(epoch + 1, stop=stop and epoch < self._options.epochs and not self._ended)

    def finish(self) -> None:
        """Save the weights if asked to, and say where everything is."""
        split = self._sharded and self._options.save_model
        weights = self._sharded.weights() if split else bare(self._model).state_dict()
        process_group.on_rank_0(lambda: self._log.finish(weights))
        self._checkpoints.finish(self._ended)

    def _timed(self, batches: Batches) -> Iterator[Batch]:
        """The batches, and the clock on how long each one is waited for."""
        loader = iter(batches)
        while True:
            asked = perf_counter()
            batch = next(loader, None)
            self._data_seconds += perf_counter() - asked
            if batch is None:
                return
            yield batch

    def _has_ended(self) -> bool:
        """Whether --stop-at or --patience end the run, as far as this rank knows: rank 0 has the record."""
        return self._log is not None and self._log.ended != ""


def rows_of_ranks(
    epoch: int, device: torch.device, own_seconds: float, data_seconds: float
) -> list[dict[str, object]]:
    """A row for each device of every rank, of `records.RANK_COLUMNS`; NaN where seconds are not known."""
    own = [
        {
            "epoch": epoch,
            "rank": process_group.rank(),
            "host": platform.node(),
            "device": str(one),
            "device_name": machine.device_name(one),
            "own_seconds": own_seconds,
            "data_seconds": data_seconds,
            "peak_memory_mb": machine.peak_memory_mb(one),
        }
        for one in machine.devices_in_use(device)
    ]
    return sum(process_group.gather(own), [])


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The mean of each of the `values` over all ranks."""
    return process_group.sum_in_place(values.clone()).div_(process_group.count())


def check_finite(losses: torch.Tensor, epoch: int) -> None:
    """Raise a UserError that tells the first of the steps whose loss is not a number."""
    broken = losses.isfinite().logical_not().nonzero()
    if len(broken):
        first = broken[0].item()
        raise not_a_number(f"the loss is {losses[first].item()} at step {first + 1} of epoch {epoch}")
