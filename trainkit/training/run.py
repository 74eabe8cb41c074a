"""What surrounds the training step: the clock, the progress bar, the record, checkpoints and resuming."""

import math
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from trainkit.config.options import Options
from trainkit.data.loaders import Batch, Batches, Data, generator
from trainkit.devices import device_name, devices_in_use, peak_memory_mb, reset_peak_memory, wait_for
from trainkit.distributed import process_group
from trainkit.distributed.launchers import DistEnv
from trainkit.errors import UserError, print_line
from trainkit.files import check_writable
from trainkit.record.columns import OWN_OPTIMIZER
from trainkit.record.records import ALL_EPOCHS, ITS_LOOP, RecordWriter, Row
from trainkit.training import clock, identity, optim, screen
from trainkit.training import facts as facts_of
from trainkit.training.checkpoint import ALWAYS_THERE, Checkpointer
from trainkit.training.compute_time import ComputeTime
from trainkit.training.drift import Drift
from trainkit.training.evaluation import NOT_TESTED, Metric, PartialEpoch, Stopping, Tested, Trained, diverged
from trainkit.training.model import trained_weights, unwrapped
from trainkit.training.state_file import save
from trainkit.training.weights import check_equal, check_whole

if TYPE_CHECKING:
    from trainkit.training.sharded import Sharded  # takes long to import, and few scripts need it

IF_SPLIT = "give Run sharded=Sharded(model, optimizer), as fsdp.py does; nothing else may be split."
# Asking after every step would make each rank wait for the others.
SECONDS_BETWEEN = 1.0


@dataclass(eq=False, repr=False)
class Run:
    """One training, around the loop of a stage.

        run.resume()
        for epoch in run.epochs():
            for inputs, targets in run.steps(epoch, train_batches):
                ...  # the training step
                run.log(loss=loss)
            run.end_of_epoch(epoch, evaluate(model, test_batches, loss_function))
        run.finish()

    Every rank creates one and makes the same calls; rank 0 prints and writes.

    Raises:
        UserError: if results or checkpoints cannot be written. Also if a network or an optimizer is split
            over the ranks, and not given as `sharded`.
    """

    name: str  # the run's name in the record: "single", "dp", "ddp", or your own
    options: Options
    dist_env: DistEnv
    train_set: Data
    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: LRScheduler | None
    _: KW_ONLY
    devices: int | None = None  # the number that really compute, over all ranks; None: one for each rank
    gradient_accumulation_steps: int = 1  # micro-batches that each batch is cut into
    # More state for the checkpoints, by name: objects with a state_dict(), such as second networks and
    # optimizers.
    extra_state: dict[str, object] = field(default_factory=dict)
    # State that differs by rank: each rank gets its own back, from a checkpoint of as many ranks.
    per_rank_state: dict[str, object] = field(default_factory=dict)
    unit: str = "images"  # of the printed speed
    per_sample: int = 1  # units in a sample, such as tokens in a window
    # A network that is split over the ranks, for the checkpoints and the weights at the end.
    sharded: "Sharded | None" = None
    # The epoch whose steps are done, until the next one begins.
    trained: Trained | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.devices is None:
            self.devices = self.dist_env.world_size
        kept = ({} if self.sharded else {"model": self.model, "optimizer": self.optimizer}) | self.extra_state
        check_whole(kept | self.per_rank_state, IF_SPLIT)
        check_equal(kept, IF_SPLIT)
        dataset, device = getattr(self.train_set, "name", type(self.train_set).__name__), self.dist_env.device
        facts = self._facts(dataset)
        self._record = process_group.on_rank_0(lambda: self._open_record(facts))  # None on the others
        mine = self.options.shaping() | {"test_size": self.options.test_size, "dataset": dataset}
        for rank, other in enumerate(process_group.gather(mine)):
            if differ := [name for name in other | mine if other.get(name) != mine.get(name)]:
                names = ", ".join(f"--{name.replace('_', '-')}" for name in differ)
                raise UserError(f"rank {rank} was started with another {names}: start all ranks alike.")
        if unused := self.options.unused(self._used_by_recipe()):
            why = "its own optimizer, schedule or network goes without"
            raise UserError(f"this script does not use {', '.join(unused)} ({why}): leave that out.")
        if taken := self.extra_state.keys() & set(ALWAYS_THERE):
            raise UserError(f"`extra_state` has the name {min(taken)}, as any checkpoint has: give another.")
        self._stopping = Stopping(self.options)
        state = {
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "early_stopping": self._stopping,
        }
        state |= self.extra_state
        state = {name: unwrapped(one) for name, one in state.items() if one is not None}
        self._checkpointer = Checkpointer(
            self.options,
            dataset,
            self.model,
            state,
            record=self._record,
            sharded=self.sharded,
            per_rank_state=self.per_rank_state,
        )
        self._epoch = 1  # the next one
        self._resumed = False
        self._first_epoch = 1  # of this process
        self._drift: Drift | None = None
        self._agreement = Agreement(device)
        self._compute_time = ComputeTime(self.model, self.optimizer, device)
        self._ended = False

    def _open_record(self, facts: Row) -> RecordWriter:
        folder = None if self.options.dry_run else self.options.results_dir / "runs"
        record = RecordWriter(folder, facts)
        if folder and self.options.save_model:
            fix = "give another --results-dir."
            check_writable(self.options.results_dir / "models", "the weights", fix)
        screen.tell_start(record.facts)
        return record

    def _facts(self, dataset: str) -> Row:
        """Return the columns of the record that are known before the first epoch."""
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
        } | self.extra_state
        networks = {name: one for name, one in parts.items() if isinstance(one, nn.Module)}
        weights = sum(map(trained_weights, networks.values()))
        sizes = {"devices": self.devices, "nodes": self.dist_env.num_nodes, "batch": self.options.batch_size}
        facts = self.options.columns() | facts_of.of_start(
            self.dist_env, self.model, dataset, self.options.precision
        )
        facts |= {
            "stage": self.name,
            "devices": self.devices,
            "batch_per_device": self.options.batch_size // max(self.devices, 1),
            "lr": self.options.scaled_lr,
            "accumulate": self.gradient_accumulation_steps,
            "settings": self.options.settings(),
            "parameters": self.sharded.parameters() if self.sharded else weights,
            "network": identity.of_network(networks, split=self.sharded is not None),
            "arguments": identity.of_arguments({}, elsewhere=self.options.elsewhere(), **sizes),
        }
        if not self._by_recipe():
            lr_schedulers = [part for part in parts.values() if isinstance(part, LRScheduler)]
            facts |= {
                "gamma": math.nan,
                "optimizer": " + ".join(map(identity.of_optimizer, self._optimizers())),
                "schedule": " + ".join(map(identity.of_lr_scheduler, lr_schedulers)),
            }
            if self.optimizer not in optim.MADE:
                facts["lr"] = identity.base_lr(self.optimizer)
                facts |= {} if self.options.declares("recipe") else {"recipe": OWN_OPTIMIZER}
        return facts

    def _whole_networks(self) -> list[nn.Module]:
        """List the networks of which every rank should have the same weights."""
        if self.sharded:
            return []
        differ = [unwrapped(one) for one in self.per_rank_state.values()]
        networks = [one for one in (self.model, *self.extra_state.values()) if isinstance(one, nn.Module)]
        return [one for one in networks if not any(unwrapped(one) is other for other in differ)]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            one
            for one in (self.optimizer, *self.extra_state.values())
            if isinstance(one, torch.optim.Optimizer)
        ]

    def _by_recipe(self) -> bool:
        """Return whether build_optimizer has made all that steps the weights."""
        return all(one in optim.MADE for one in (*self._optimizers(), self.lr_scheduler))

    def _used_by_recipe(self) -> set[str]:
        """Return the options that build_optimizer has used, of which it may have made a part."""
        of_optimizer = any(one in optim.MADE for one in self._optimizers())
        used = optim.OF_OPTIMIZER if of_optimizer else set()
        return used | (optim.OF_LR_SCHEDULER if self.lr_scheduler in optim.MADE else set())

    def resume(self) -> None:
        """With `--resume auto`, go on from the newest checkpoint in `--checkpoint-dir`, if there is one.

        It is loaded into the network, the optimizer, the lr_scheduler and what else the run was given. Call
        it once, before `epochs`.

        Raises:
            UserError: if no checkpoint can be read, or the newest is of another training.
        """
        self._checkpointer.resume()
        self._resumed = True
        self._epoch = self._checkpointer.epochs().start
        self._first_epoch = self._epoch
        self._ended = process_group.broadcast(self._has_ended())

    def epochs(self) -> Iterator[int]:
        """Yield the epochs still to be trained, counted from 1, until --stop-at or --patience end it."""
        for epoch in self._checkpointer.epochs():
            if self._ended:
                return
            yield epoch

    def steps(self, epoch: int, batches: Batches) -> Iterator[Batch]:
        """Yield the batches of `epoch` that no earlier process has trained on, on the clock.

        Raises:
            UserError: if a loss was not a number, a second or so later; the text names the step.
            Stopped: if a signal asked to save and stop within the epoch.
        """
        if epoch != self._epoch:
            raise UserError(f"epoch {epoch} in place of {self._epoch}: take the epochs of run.epochs().")
        self.trained = None
        if self.options.checkpoint_dir and not self._resumed:
            # It would begin anew, and its checkpoints could count as older than those of an earlier run.
            raise UserError("the script saves checkpoints: call run.resume() before run.epochs().")
        if epoch == self._first_epoch:  # of this process: its weights are compared after it
            self._drift = Drift(self._whole_networks())
        device = batches.device
        reset_peak_memory()  # the first epoch's peak includes cuDNN's trials
        learning_rate = float(self.optimizer.param_groups[0].get("lr") or 0)
        if not 0 <= learning_rate < math.inf:
            raise UserError(f"the schedule's learning rate for epoch {epoch} is {learning_rate}: correct it.")
        done = self._checkpointer.partial_epoch(epoch) or PartialEpoch(0, 0.0, learning_rate, torch.zeros(0))
        if done.steps and done.steps >= len(batches):
            told = f"the checkpoint is of step {done.steps} of an epoch, and now one has {len(batches)} steps"
            raise UserError(f"{told}: give another --checkpoint-dir.")
        batches.set_epoch(epoch, done.steps)
        # Losses stay on the device until the epoch ends: reading one makes the CPU wait for the GPU.
        self._noted = {}
        for name, values in {"loss": done.losses, **done.metrics}.items():
            self._noted[name] = torch.zeros(len(batches), device=device)
            self._noted[name][: done.steps] = values
        before, self._added, seconds = (epoch - 1) * len(batches), done.steps, done.seconds
        self._data_seconds, first = 0.0, done.steps
        bar = tqdm(
            self._timed(batches),
            initial=first,
            total=len(batches),
            desc=f"epoch {epoch}",
            unit="step",
            leave=False,
            # None: show it on a terminal, not in a log file. stderr may be closed.
            disable=None if process_group.is_rank_0() and sys.stderr else True,
        )
        started = clock.start(device)
        self._compute_time.begin()
        for step, batch in enumerate(bar, start=first + 1):
            # The numbers from 1 on are for the orders of the epochs.
            self._noise = generator(self.options.seed, -before - step)
            yield batch
            if self._added != step:
                raise UserError(
                    f"{self._added} losses after {step} steps: call run.log(loss=loss) once in each."
                )
            self._compute_time.end_of_step()
            if not self._agreement.due():
                continue
            losses = self._noted["loss"][:step]
            stop, save, broken = self._agreement.ask(
                *self._checkpointer.requests(), not losses.isfinite().all()
            )
            if broken:
                check_finite(mean_over_ranks(losses), epoch)
            if (stop or save) and step < len(batches):
                seconds += clock.stop(device, started)  # saving is not training
                means = {name: one[:step].cpu() for name, one in self._means().items()}
                part = PartialEpoch(step, seconds, done.learning_rate, means.pop("loss"), means)
                self._checkpointer.save(epoch, part, stop)
                started = clock.start(device)
            self._compute_time.begin()  # they have waited for each other
        seconds += clock.stop(device, started)

        means = self._means()
        losses = means.pop("loss")
        check_finite(losses, epoch)
        self.trained = Trained(len(batches), seconds, losses.mean().item(), done.learning_rate)
        self._of_steps = [Metric(name, "training", one.mean().item()) for name, one in means.items()]
        self._data_seconds *= len(batches) / max(len(batches) - first, 1)

    def log(self, *, loss: torch.Tensor, **metrics: torch.Tensor | float) -> None:
        """Record the loss of this step, and other numbers by name: means over this rank's share.

        Their means over steps and ranks are metrics of the epoch.

        Raises:
            UserError: if the names differ from those of the step before.
        """
        numbers = {"loss": loss, **metrics}
        if not self._added:
            self._noted = {name: torch.zeros_like(self._noted["loss"]) for name in numbers}
        if self._noted.keys() != numbers.keys():
            before, now = ", ".join(self._noted), ", ".join(numbers)
            raise UserError(f"run.log got {before}, and then {now}: give it the same names in every step.")
        for name, value in numbers.items():
            value = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
            self._noted[name][self._added] = value
        self._added += 1

    def _means(self) -> dict[str, torch.Tensor]:
        """Return the mean over the ranks of what they noted at each step."""
        if any(names != [*self._noted] for names in process_group.gather([*self._noted])):
            raise UserError("the ranks give run.log other names: give it the same on all of them.")
        return {name: mean_over_ranks(one) for name, one in self._noted.items()}

    def noise(self, *shape: int) -> torch.Tensor:
        """Draw float32 (batch size / ranks, *shape) for this step: the ranks together draw what one would."""
        noise = torch.randn(self.options.batch_size, *shape, generator=self._noise)
        return noise.chunk(self.dist_env.world_size)[self.dist_env.rank].to(self.dist_env.device)

    def end_of_epoch(
        self, epoch: int, tested: Tested = NOT_TESTED, metrics: Iterable[Metric] = (), best_epoch: int = 0
    ) -> None:
        """Write the row of `epoch`, then a checkpoint.

        Rank 0's `metrics` go to `<run_id>.metrics.tsv` next to the CSV, with those of `log`. `best_epoch` is
        that of a script with a validation of its own, so far: --patience counts from it, and tables show its
        test accuracy.

        Raises:
            UserError: if one of them cannot be written; what was written earlier is kept. Also if the loop
                over `steps` was left early, or there is no test for --stop-at or --patience.
            Stopped: if a signal asked to stop.
        """
        if self.trained is None or epoch != self._epoch:
            raise UserError(f"epoch {epoch} was left early, or not trained: end the loop over run.steps.")
        if self._drift:
            self._drift.check()
            self._drift = None
        if tested is NOT_TESTED and (self.options.stop_at or self.options.patience):
            raise UserError(
                "--stop-at and --patience go by a test, and this training has none: leave them out."
            )
        # From the mean of a step, as an interrupted epoch has steps of an earlier process. Unknown if
        # a network is split: its ranks also wait for each other in the middle of a step.
        own_seconds = math.nan if self.sharded else self._compute_time.per_step() * self.trained.steps
        of_ranks = rows_of_ranks(epoch, self.dist_env.device, own_seconds, self._data_seconds)
        metrics = [*self._of_steps, *metrics]
        self._stopping.note(epoch, tested, best_epoch)
        process_group.on_rank_0(lambda: self._write_row(epoch, tested, of_ranks, metrics, best_epoch))
        self.trained, self._epoch = None, epoch + 1
        stop, _, self._ended = self._agreement.ask(*self._checkpointer.requests(), self._has_ended())
        self._checkpointer.save(epoch + 1, stop=stop and epoch < self.options.epochs and not self._ended)

    def _write_row(
        self, epoch: int, tested: Tested, of_ranks: list[Row], metrics: list[Metric], best_epoch: int
    ) -> None:
        """Write what an epoch has shown to the record, and print its line; on rank 0."""
        images = self.trained.steps * self.options.batch_size
        images_per_s = images / self.trained.seconds
        row = {
            "epoch": epoch,
            "steps": self.trained.steps,
            "images": images,
            "train_seconds": self.trained.seconds,
            "images_per_s": images_per_s,
            "test_images": tested.samples,
            "eval_seconds": tested.seconds,
            "train_loss": self.trained.loss,
            "test_loss": tested.loss,
            "test_accuracy": tested.accuracy,
            "best_epoch": best_epoch,
            "learning_rate": self.trained.learning_rate,
            "peak_memory_mb": max(row["peak_memory_mb"] for row in of_ranks),
        }
        if self.unit != "images":
            speed = Metric(f"{self.unit}_per_s", "training", images_per_s * self.per_sample)
            metrics = [speed, *metrics]
        row = self._record.add(row, of_ranks, [{"epoch": epoch} | one._asdict() for one in metrics])
        screen.tell_epoch(row, of_ranks, self.options.epochs, self.unit, self.per_sample)

    def finish(self) -> None:
        """Save the weights if asked to, and say where everything is."""
        if self.sharded and self.options.save_model:
            weights = self.sharded.weights()
        else:
            weights = unwrapped(self.model).state_dict()
        process_group.on_rank_0(lambda: self._tell_end(weights))
        self._checkpointer.finish(self._ended)

    def _tell_end(self, weights: dict[str, torch.Tensor]) -> None:
        if self.options.dry_run:
            print_line("dry run: one training step and one test batch went through; nothing was written.")
            return
        reached_the_last = self._epoch > self.options.epochs
        self._record.finish(self._stopping.reason or (ALL_EPOCHS if reached_the_last else ITS_LOOP))
        screen.tell_end(self._record, self.options.epochs, self._stopping.reason)
        if self.options.save_model:
            path = self.options.results_dir / "models" / f"{self._record.facts['run_id']}.pt"
            save("the weights", weights, path, "mend that. The record is kept.", check=False)
            print_line(f"weights: {path}")

    def _timed(self, batches: Batches) -> Iterator[Batch]:
        """Yield the batches, and add up the time spent waiting for them."""
        loader = iter(batches)
        while True:
            asked = perf_counter()
            batch = next(loader, None)
            self._data_seconds += perf_counter() - asked
            if batch is None:
                return
            yield batch

    def _has_ended(self) -> bool:
        """Return whether --stop-at or --patience end the run; rank 0 decides for all."""
        return process_group.is_rank_0() and self._stopping.reason != ""


class Agreement:
    """The ranks' meetings: about once a second, on every rank after the same step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps, self._due_after = 0, 1
        self._met_at = monotonic()

    def due(self) -> bool:
        """Return whether to meet now; call it after every step."""
        self._steps += 1
        return self._steps >= self._due_after

    def ask(self, *questions: bool) -> list[bool]:
        """Return for each question whether any rank says yes."""
        wait_for(self._device)  # steps done, not steps queued
        now, due_after = monotonic(), 0
        if process_group.is_rank_0():  # its clock decides, so that all ranks meet at the same step again
            steps_per_second = self._steps / (now - self._met_at)
            # At most twice as many as the last time: the first steps say little about the others.
            due_after = max(1, min(2 * self._due_after, steps_per_second * SECONDS_BETWEEN))
        # The others add 0 to rank 0's value, so the sum is rank 0's.
        numbers = torch.tensor([*questions, due_after], dtype=torch.float64, device=self._device)
        *answers, due_after = process_group.sum_in_place(numbers).tolist()
        self._steps, self._due_after, self._met_at = 0, int(due_after), now
        return [answer > 0 for answer in answers]


def rows_of_ranks(epoch: int, device: torch.device, own_seconds: float, data_seconds: float) -> list[Row]:
    """Return a row of `RANK_COLUMNS` for each device of every rank; unknown seconds are NaN."""
    own = [
        {
            "epoch": epoch,
            "rank": process_group.rank(),
            "host": platform.node(),
            "device": str(one),
            "device_name": device_name(one),
            "own_seconds": own_seconds,
            "data_seconds": data_seconds,
            "peak_memory_mb": peak_memory_mb(one),
        }
        for one in devices_in_use(device)
    ]
    return sum(process_group.gather(own), [])


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of each of the `values` over all ranks."""
    return process_group.sum_in_place(values.clone()).div_(process_group.count())


def check_finite(losses: torch.Tensor, epoch: int) -> None:
    """Raise a UserError that names the first step whose loss is not a number."""
    broken = losses.isfinite().logical_not().nonzero()
    if len(broken):
        first = broken[0].item()
        raise diverged(f"the loss is {losses[first].item()} at step {first + 1} of epoch {epoch}")
