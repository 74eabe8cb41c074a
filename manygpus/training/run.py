"""What surrounds the training step: the loop over epochs and steps, and its clock.

A `Run` puts together what can also be used alone in a loop of one's own: `Checkpointer`
(checkpoint/checkpointer.py), `RecordWriter` (record/records.py) and `EarlyStopping` (early_stopping.py).
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from manygpus import job_folder
from manygpus.checkpoint.checkpointer import Checkpointer
from manygpus.checkpoint.state_file import save
from manygpus.checkpoint.stop_signal import Agreement, StopSignal
from manygpus.config.options import Options
from manygpus.data.loaders import Batch, Batches, Data, generator
from manygpus.devices import reset_peak_memory
from manygpus.distributed import process_group
from manygpus.errors import Stopped, UserError, print_line
from manygpus.files import check_writable
from manygpus.launchers import DistEnv
from manygpus.network import optim, training_identity
from manygpus.network.model import trained_weights, unwrapped
from manygpus.network.rank_weights import check_equal, check_whole
from manygpus.record.columns import OWN_OPTIMIZER
from manygpus.record.loggers import Logger
from manygpus.record.records import ALL_EPOCHS, IMAGES, ITS_LOOP, RecordWriter, Row
from manygpus.signals import unblock_stop_signals
from manygpus.training import clock, printing, run_facts
from manygpus.training.compute_time import ComputeTime
from manygpus.training.drift import Drift
from manygpus.training.early_stopping import EarlyStopping
from manygpus.training.epoch_results import NOT_EVALUATED, EvalResult, Metric, PartialEpoch, TrainResult
from manygpus.training.step_metrics import StepMetrics, check_finite

if TYPE_CHECKING:
    from manygpus.checkpoint.sharded import Sharded  # takes long to import, and few scripts need it

# The names of what every Run keeps in its checkpoints, so that a script's own parts have others.
PARTS_OF_RUN = {"model", "optimizer", "sharded", "lr_scheduler", "early_stopping", "partial_epoch", "record"}
IF_SHARDED = "give Run sharded=Sharded(model, optimizer), as fsdp.py does; nothing else may be split."


@dataclass
class EpochSoFar:
    """The part of the next epoch that is done, as a part of a checkpoint; None between two epochs."""

    done: PartialEpoch | None = None

    def state_dict(self) -> dict[str, object]:
        return vars(self.done) if self.done else {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.done = PartialEpoch(**state) if state else None


@dataclass
class RecordOfRank0:
    """The record as a part of a checkpoint: only rank 0 has one."""

    record: RecordWriter | None

    def state_dict(self) -> dict[str, object]:
        return self.record.state_dict() if self.record else {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if self.record and state:
            self.record.load_state_dict(state)


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
            over the ranks, and not given as `sharded`; or if the ranks have other options.
    """

    name: str  # the run's name in the record: "single", "dp", "ddp", or your own
    options: Options
    dist_env: DistEnv
    train_set: Data
    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: LRScheduler | None = None
    _: KW_ONLY
    devices: int | None = None  # the number that really compute, over all ranks; None: one for each rank
    gradient_accumulation_steps: int = 1  # micro-batches that each batch is cut into
    # More state for the checkpoints, by name: objects with a state_dict(), such as second networks and
    # optimizers.
    extra_state: dict[str, object] = field(default_factory=dict)
    # State that differs by rank: each rank gets its own back, from a checkpoint of as many ranks.
    per_rank_state: dict[str, object] = field(default_factory=dict)
    unit: str = IMAGES  # of the speed, on the screen, in the record's metrics and in tables
    per_sample: float = 1  # units in a sample, such as tokens in a window
    loggers: Sequence[Logger] = ()  # what gets each epoch besides the record, such as TensorBoardLogger
    # A network that is split over the ranks, for the checkpoints and the weights at the end.
    sharded: "Sharded | None" = None
    # The epoch whose steps are done, until the next one begins.
    trained: TrainResult | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        device = self.dist_env.device
        if self.devices is None:
            self.devices = self.dist_env.world_size
        self._dataset = getattr(self.train_set, "name", type(self.train_set).__name__)
        if self.options.precision is None:
            # A script that has not called `resolve_precision` enters no autocast by itself.
            self.options = replace(self.options, precision="fp32")
        self._check_weights()
        self._record = self._open_record()
        self._check_options()
        self._early_stopping = EarlyStopping(
            self.options.epochs, accuracy=self.options.stop_at, patience=self.options.patience
        )
        self._partial_epoch = EpochSoFar()
        self._checkpointer = self._open_checkpoints() if self.options.checkpoint_dir else None
        self._agreement = Agreement(device)
        # Without checkpoints a signal ends the process, as it does without us.
        self._stop_signal = StopSignal() if self._checkpointer else None
        unblock_stop_signals()
        self._compute_time = ComputeTime(self.model, self.optimizer, device)
        self._drift: Drift | None = None
        self._has_called_resume = False
        self._first_epoch = self._next_epoch = 1
        self._is_first_epoch = True  # of this process
        self._ended_early = False

    # --- set-up -------------------------------------------------------------------------------------

    def _check_weights(self) -> None:
        """Check that each rank has all of the weights, and the same: rank 0 saves them for all."""
        saved_by_rank_0 = self.extra_state
        if not self.sharded:
            saved_by_rank_0 = {"model": self.model, "optimizer": self.optimizer} | self.extra_state
        check_whole(saved_by_rank_0 | self.per_rank_state, IF_SHARDED)
        check_equal(saved_by_rank_0, IF_SHARDED)

    def _open_record(self) -> RecordWriter | None:
        """Return the record, on rank 0; None on the others, which have to call it, too."""
        columns = self._columns_of_start()
        return process_group.on_rank_0(lambda: self._open_record_on_rank_0(columns))

    def _open_record_on_rank_0(self, columns: Row) -> RecordWriter:
        folder = None if self.options.dry_run else self.options.results_dir / "runs"
        record = RecordWriter(folder, columns, self.loggers, unit=self.unit, per_sample=self.per_sample)
        if folder and self.options.save_model:
            fix = "give a different --results-dir."
            check_writable(self.options.results_dir / "models", "the weights", fix)
        printing.print_start(record.facts)
        return record

    def _columns_of_start(self) -> Row:
        """Return the columns of the record that are known before the first epoch."""
        options = self.options
        dist_env = self.dist_env
        networks = {name: part for name, part in self._parts().items() if isinstance(part, nn.Module)}
        parameters = sum(trained_weights(network) for network in networks.values())
        columns = options.columns() | run_facts.of_start(
            dist_env, self.model, self._dataset, options.precision
        )
        columns |= {
            "stage": self.name,
            "devices": self.devices,
            "batch_per_device": options.batch_size // max(self.devices, 1),
            "lr": options.scaled_lr,
            "accumulate": self.gradient_accumulation_steps,
            "settings": options.settings(),
            "parameters": self.sharded.parameters() if self.sharded else parameters,
            "network": training_identity.of_network(networks, sharded=self.sharded is not None),
            "arguments": options.other_arguments(),
        }
        if not self._is_all_by_recipe():
            columns |= self._columns_of_own_optimizer()
        return columns

    def _columns_of_own_optimizer(self) -> Row:
        """Return the columns of a script that does not take both optimizer and schedule of a recipe."""
        lr_schedulers = [part for part in self._parts().values() if isinstance(part, LRScheduler)]
        columns = {
            "gamma": math.nan,
            "optimizer": " + ".join(map(training_identity.of_optimizer, self._optimizers())),
            "schedule": " + ".join(map(training_identity.of_lr_scheduler, lr_schedulers)),
        }
        if not optim.is_by_recipe(self.optimizer):
            columns["lr"] = training_identity.base_lr(self.optimizer)
            if not self.options.declares("recipe"):
                columns["recipe"] = OWN_OPTIMIZER
        return columns

    def _parts(self) -> dict[str, object]:
        """Return what is trained and what trains it, by name."""
        parts = {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        return parts | self.extra_state

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [part for part in self._parts().values() if isinstance(part, torch.optim.Optimizer)]

    def _is_all_by_recipe(self) -> bool:
        """Return whether build_optimizer has made all that steps the weights."""
        return all(map(optim.is_by_recipe, (*self._optimizers(), self.lr_scheduler)))

    def _check_options(self) -> None:
        self._check_ranks_alike()
        process_group.on_rank_0(self._warn_of_unused_options)
        taken = self.extra_state.keys() & PARTS_OF_RUN
        if taken:
            raise UserError(f"`extra_state` has the name {min(taken)}, as any checkpoint has: give another.")

    def _warn_of_unused_options(self) -> None:
        """Warn of options that set up a recipe, in a script that makes its optimizer or schedule itself."""
        names = []
        if not any(map(optim.is_by_recipe, self._optimizers())):
            names.append("recipe")
        if not optim.is_by_recipe(self.lr_scheduler):
            names += ["gamma", "lr_warmup_images"]
        defaults = {declaration.name: declaration.default for declaration in fields(self.options)}
        for name in names:
            if getattr(self.options, name) != defaults[name] and not self.options.declares(name):
                print_line(
                    f"warning: --{name.replace('_', '-')} is an option of build_optimizer, and this script "
                    "makes its optimizer or its schedule itself: see that it uses the option",
                    sys.stderr,
                )

    def _check_ranks_alike(self) -> None:
        values = self.options.shaping() | {"test_size": self.options.test_size, "dataset": self._dataset}
        for rank, values_of_rank in enumerate(process_group.gather(values)):
            differing = [
                name for name in values_of_rank | values if values_of_rank.get(name) != values.get(name)
            ]
            if differing:
                names = ", ".join(f"--{name.replace('_', '-')}" for name in differing)
                raise UserError(f"rank {rank} was started with a different {names}: start all ranks alike.")

    def _open_checkpoints(self) -> Checkpointer:
        if self.sharded:
            trained = {"sharded": self.sharded}
        else:
            trained = {"model": self.model, "optimizer": self.optimizer}
        parts = trained | {
            "lr_scheduler": self.lr_scheduler,
            "early_stopping": self._early_stopping,
            "partial_epoch": self._partial_epoch,
            "record": RecordOfRank0(self._record),
        }
        options = {f"--{name.replace('_', '-')}": value for name, value in self.options.shaping().items()}
        return Checkpointer(
            {name: part for name, part in (parts | self.extra_state).items() if part is not None},
            self.options.checkpoint_dir,
            every_minutes=self.options.checkpoint_minutes,
            settings=options | {"the dataset": self._dataset},
            any_world_size=True,
            per_rank_state=self.per_rank_state,
        )

    def _whole_networks(self) -> list[nn.Module]:
        """List the networks of which every rank should have the same weights."""
        if self.sharded:
            return []
        rank_networks = [unwrapped(part) for part in self.per_rank_state.values()]
        networks = [part for part in (self.model, *self.extra_state.values()) if isinstance(part, nn.Module)]
        return [
            network for network in networks if not any(unwrapped(network) is part for part in rank_networks)
        ]

    # --- the loop -----------------------------------------------------------------------------------

    def resume(self) -> None:
        """With `--resume auto`, resume from the newest checkpoint in `--checkpoint-dir`, if there is one.

        It is loaded into the network, the optimizer, the lr_scheduler and what else the run was given. Call
        it once, before `epochs`.

        Raises:
            UserError: if no checkpoint can be read, or the newest is of another training.
        """
        self._has_called_resume = True
        if self._checkpointer:
            process_group.on_rank_0(self._refuse_checkpoints_of_an_earlier_run)
            self._next_epoch = self._checkpointer.resume().epoch
        self._first_epoch = self._next_epoch
        self._ended_early = process_group.broadcast(self._should_end_early())

    def _refuse_checkpoints_of_an_earlier_run(self) -> None:
        if self.options.resume == "never" and self._checkpointer.has_any():
            raise UserError(
                f"{self.options.checkpoint_dir} holds the checkpoints of an earlier run: add --resume auto "
                "to resume it, or give a different --checkpoint-dir."
            )

    def epochs(self) -> Iterator[int]:
        """Yield the epochs still to be trained, counted from 1, until --stop-at or --patience end it."""
        for epoch in range(self._first_epoch, self.options.epochs + 1):
            if self._ended_early:
                return
            yield epoch

    def steps(self, epoch: int, batches: Batches) -> Iterator[Batch]:
        """Yield the batches of `epoch` that no earlier process has trained on, on the clock.

        Raises:
            UserError: if a loss was not a number, a second or so later; the text names the step.
            Stopped: if a signal asked to save and stop within the epoch.
        """
        done = self._begin_epoch(epoch, len(batches))
        batches.set_epoch(epoch, done.steps)
        metrics = self._step_metrics = StepMetrics(
            len(batches), {"loss": done.losses, **done.metrics}, batches.device
        )
        self._data_seconds = 0.0
        seconds = done.seconds
        started = clock.start(batches.device)
        self._compute_time.begin()
        for step, batch in enumerate(self._with_progress(epoch, batches, done.steps), start=done.steps + 1):
            # The numbers from 1 on are for the orders of the epochs.
            self._noise = generator(self.options.seed, -(epoch - 1) * len(batches) - step)
            yield batch
            if metrics.steps_logged != step:
                raise UserError(
                    f"{metrics.steps_logged} losses after {step} steps: call run.log(loss=loss) once in each."
                )
            self._compute_time.end_of_step()
            if not self._agreement.is_due():
                continue
            stop, save_now, is_broken = self._agreement.ask(
                self._was_asked_to_stop(), self._is_checkpoint_due(), metrics.has_broken_loss()
            )
            if is_broken:
                metrics.check_losses(epoch)
            if (stop or save_now) and step < len(batches):
                seconds += clock.stop(batches.device, started)  # saving is not training
                self._save_within_epoch(epoch, step, seconds, done.learning_rate)
                if stop:
                    self._stop()
                started = clock.start(batches.device)
            self._compute_time.begin()  # they have waited for each other
        seconds += clock.stop(batches.device, started)
        self._end_steps(epoch, seconds, done)

    def _begin_epoch(self, epoch: int, steps: int) -> PartialEpoch:
        """Return what an earlier process has done of an epoch of so many `steps`: of most epochs nothing."""
        if epoch != self._next_epoch:
            raise UserError(f"epoch {epoch} in place of {self._next_epoch}: take the epochs of run.epochs().")
        self.trained = None
        if self.options.checkpoint_dir and not self._has_called_resume:
            # It would begin anew, and its checkpoints could count as older than those of an earlier run.
            raise UserError("the script saves checkpoints: call run.resume() before run.epochs().")
        if self._is_first_epoch:
            self._drift = Drift(self._whole_networks())
            self._is_first_epoch = False
        reset_peak_memory()  # the first epoch's peak includes cuDNN's trials
        learning_rate = float(self.optimizer.param_groups[0].get("lr") or 0)
        if not 0 <= learning_rate < math.inf:
            raise UserError(f"the schedule's learning rate for epoch {epoch} is {learning_rate}: correct it.")
        done = self._partial_epoch.done
        if done is None:
            return PartialEpoch(steps=0, seconds=0.0, learning_rate=learning_rate, losses=torch.zeros(0))
        if done.steps >= steps:
            raise UserError(
                f"the checkpoint is of step {done.steps} of an epoch, and now one has {steps} steps: give "
                "a different --checkpoint-dir."
            )
        return done

    def _with_progress(self, epoch: int, batches: Batches, steps_done: int) -> Iterable[Batch]:
        return tqdm(
            self._timed(batches),
            initial=steps_done,
            total=len(batches),
            desc=f"epoch {epoch}",
            unit="step",
            leave=False,
            # None: show it on a terminal, not in a log file. stderr may be closed.
            disable=None if process_group.is_rank_0() and sys.stderr else True,
        )

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

    def _save_within_epoch(self, epoch: int, steps: int, seconds: float, learning_rate: float) -> None:
        means = {name: values[:steps].cpu() for name, values in self._step_metrics.means().items()}
        losses = means.pop("loss")
        done = PartialEpoch(
            steps=steps, seconds=seconds, learning_rate=learning_rate, losses=losses, metrics=means
        )
        self._save(epoch, done)

    def _save(self, epoch: int, partial_epoch: PartialEpoch | None = None) -> None:
        """Save a checkpoint before `epoch`, or within it."""
        self._partial_epoch.done = partial_epoch
        if self._checkpointer:
            self._checkpointer.save(epoch, partial_epoch.steps if partial_epoch else 0)

    def _stop(self) -> NoReturn:
        """End the training on all ranks after a checkpoint, so that a later start resumes from it."""
        text = self._checkpointer.report_stop("--resume auto")
        # After rank 0 has saved: a rank that left earlier would end the whole job step.
        process_group.destroy_distributed()
        raise Stopped(text)

    def _end_steps(self, epoch: int, seconds: float, done_before: PartialEpoch) -> None:
        """Sum up an epoch whose steps are done, the first of them by an earlier process."""
        means = self._step_metrics.means()
        losses = means.pop("loss")
        check_finite(losses, epoch)
        steps = len(losses)
        self.trained = TrainResult(
            steps=steps,
            seconds=seconds,
            loss=losses.mean().item(),
            learning_rate=done_before.learning_rate,
        )
        self._metrics_of_steps = [
            Metric(name, "training", values.mean().item()) for name, values in means.items()
        ]
        self._data_seconds *= steps / max(steps - done_before.steps, 1)

    def log(self, *, loss: torch.Tensor, **metrics: torch.Tensor | float) -> None:
        """Record the loss of this step, and other numbers by name: means over this rank's shard.

        Their means over steps and ranks are metrics of the epoch.

        Raises:
            UserError: if the names differ from those of the step before.
        """
        self._step_metrics.log({"loss": loss, **metrics})

    def noise(self, *shape: int) -> torch.Tensor:
        """Draw float32 (batch size / ranks, *shape) for this step: the ranks together draw what one would."""
        noise = torch.randn(self.options.batch_size, *shape, generator=self._noise)
        return noise.chunk(self.dist_env.world_size)[self.dist_env.rank].to(self.dist_env.device)

    def end_of_epoch(
        self,
        epoch: int,
        tested: EvalResult = NOT_EVALUATED,
        metrics: Iterable[Metric] = (),
        best_epoch: int = 0,
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
        if self.trained is None or epoch != self._next_epoch:
            raise UserError(f"epoch {epoch} was left early, or not trained: end the loop over run.steps.")
        if self._drift:
            self._drift.check()
            self._drift = None
        if tested is NOT_EVALUATED and (self.options.stop_at or self.options.patience):
            raise UserError(
                "--stop-at and --patience go by a test, and this training has none: leave them out."
            )
        # From the mean of a step, as an interrupted epoch has steps of an earlier process. Unknown if
        # a network is split: its ranks also wait for each other in the middle of a step.
        own_seconds = math.nan if self.sharded else self._compute_time.per_step() * self.trained.steps
        rank_rows = run_facts.rows_of_ranks(epoch, self.dist_env.device, own_seconds, self._data_seconds)
        metrics = [*self._metrics_of_steps, *metrics]
        self._early_stopping.note(epoch, tested.loss, accuracy=tested.accuracy, best_epoch=best_epoch)
        process_group.on_rank_0(lambda: self._write_row(epoch, tested, rank_rows, metrics, best_epoch))
        self.trained = None
        self._next_epoch = epoch + 1
        stop, self._ended_early = self._agreement.ask(self._was_asked_to_stop(), self._should_end_early())
        self._save(epoch + 1)
        if stop and epoch < self.options.epochs and not self._ended_early:
            self._stop()

    def _write_row(
        self, epoch: int, tested: EvalResult, rank_rows: list[Row], metrics: list[Metric], best_epoch: int
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
            "peak_memory_mb": max(row["peak_memory_mb"] for row in rank_rows),
        }
        row = self._record.add(row, rank_rows, [{"epoch": epoch} | metric._asdict() for metric in metrics])
        printing.print_epoch(row, rank_rows, self.options.epochs, self.unit, self.per_sample)

    def finish(self) -> None:
        """Save the weights if asked to, and say where everything is."""
        if self._checkpointer:
            # The record may say that the training has ended only when its last checkpoint is whole: after a
            # kill in between, the next start would train the last epochs again, as a second run.
            self._checkpointer.finish()
        if self.sharded and self.options.save_model:
            weights = self.sharded.weights()
        else:
            weights = unwrapped(self.model).state_dict()
        process_group.on_rank_0(lambda: self._finish_on_rank_0(weights))
        if self._checkpointer:
            self._keep_newest_checkpoint_of_a_job()

    def _keep_newest_checkpoint_of_a_job(self) -> None:
        """Of the checkpoints in a job's own folder keep the newest, from which more epochs can resume."""
        job = job_folder.here()
        if job and self._checkpointer.folder.resolve().is_relative_to(job.resolve()):
            with suppress(OSError):  # the run went well
                self._checkpointer.keep_newest()

    def _finish_on_rank_0(self, weights: dict[str, torch.Tensor]) -> None:
        if self.options.dry_run:
            print_line("dry run: one training step and one test batch went through; nothing was written.")
            return
        reached_the_last = self._next_epoch > self.options.epochs
        reason = self._early_stopping.reason
        self._record.finish(reason or (ALL_EPOCHS if reached_the_last else ITS_LOOP))
        printing.print_end(self._record, self.options.epochs, reason)
        if self.options.save_model:
            path = self.options.results_dir / "models" / f"{self._record.facts['run_id']}.pt"
            save("the weights", weights, path, "mend that. The record is kept.", check=False)
            print_line(f"weights: {path}")

    def _was_asked_to_stop(self) -> bool:
        return self._stop_signal is not None and self._stop_signal.was_sent

    def _is_checkpoint_due(self) -> bool:
        return self._checkpointer is not None and self._checkpointer.is_due()

    def _should_end_early(self) -> bool:
        """Return whether --stop-at or --patience end the run; rank 0 decides for all."""
        return process_group.is_rank_0() and self._early_stopping.reason != ""
