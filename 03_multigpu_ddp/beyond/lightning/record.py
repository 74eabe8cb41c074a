"""The record of a run by Lightning, row by row as the stages write it; and stopping and going on."""

import math
import signal
from contextlib import suppress
from pathlib import Path

from trainkit import clock, machine, operations, world
from trainkit.checkpoint import (
    check_same,
    ends_with_its_job,
    leave_word,
    random_numbers,
    read_whole,
    set_random_numbers,
)
from trainkit.epoch import Tested, Trained, not_a_number
from trainkit.errors import STOP_SIGNALS, Stopped, UserError, first_line, reason, tell
from trainkit.files import check_writable
from trainkit.options import Options
from trainkit.run import check_finite, mean_over_ranks, rows_of_ranks
from trainkit.runlog import RunLog
from trainkit.world import World

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

SUMS = ("sum_of_losses", "right", "images")  # what the network logs of the test set
ONE_VALIDATION = (
    "the row of an epoch needs one validation, at its end: leave out what changes that, such as "
    "trainer.limit_val_batches or trainer.val_check_interval."
)


def check_readable(path: Path) -> None:
    """Raise a UserError if there is no checkpoint of Lightning at `path`, or it cannot be read."""
    try:
        if "pytorch-lightning_version" not in read_whole(path):
            raise ValueError("Lightning has not made it")
    except Exception as error:  # whatever PyTorch makes of a damaged file
        raise UserError(
            f"the checkpoint {path} cannot be read ({first_line(error)}): give another."
        ) from None


class RecordRun(Callback):
    """What trainkit.run.Run is to a stage: the clock, a row and a checkpoint after each epoch, the end.

    On USR2 or SIGTERM the run stops at the end of its epoch, not within.
    """

    def __init__(self, opts: Options, here: World) -> None:
        self._options, self._here, self._device = opts, here, here.device
        self._newest = opts.checkpoint_dir and opts.checkpoint_dir / "last.ckpt"
        self._kept: dict | None = None  # what the checkpoint that the run goes on from has kept
        self._stop_asked = False
        self._stopped_after = 0
        self._started, self._train_seconds, self._eval_seconds = 0.0, None, 0.0

    def open_folder(self) -> Path | None:
        """The checkpoint to go on from, if there is one.

        Raises:
            UserError: if the folder cannot be written to, holds an earlier run's checkpoint or a damaged one.
        """
        folder = self._options.checkpoint_dir
        if not folder:
            return None
        world.on_first(lambda: check_writable(folder, "checkpoints", "give another --checkpoint-dir."))
        if not world.from_first(self._newest.exists()):
            return None
        if self._options.resume == "never":
            raise UserError(
                f"{folder} holds the checkpoint of an earlier run: add --resume auto to go on with it, or "
                "give another --checkpoint-dir."
            )
        world.on_first(lambda: check_readable(self._newest))
        return self._newest

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        if self._kept:
            was = self._kept["options"] | {"precision": self._kept["run"]["facts"]["precision"]}
            asked = self._shaping() | {"precision": self._options.precision}
            check_same(trainer.ckpt_path, was, asked)
        train_set = trainer.datamodule.train_set
        flops = operations.per_image(module.net, train_set)
        what = {"devices": self._here.size, "dataset": train_set.name, "model": module.net}
        self._log = world.on_first(
            lambda: RunLog("lightning", self._options, self._here, **what, flops_per_image=flops)
        )
        if self._kept:
            world.on_first(lambda: self._log.go_on(self._kept["run"]))
            if world.is_first():
                tell(f"resumed from {trainer.ckpt_path}")
            seed = self._options.seed + 1000 * trainer.current_epoch
            set_random_numbers(self._kept["random_numbers"], seed)
        trainer.should_stop = self._has_ended()

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for number in STOP_SIGNALS:
            # Lightning's own for SIGTERM waits for the other ranks, wherever the signal meets this one.
            signal.signal(number, self._ask_to_stop if self._newest else signal.SIG_DFL)
        # A job has them wait until somebody listens (slurm/job_env.sh).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        machine.reset_peak_memory()
        trainer.train_dataloader.set_epoch(trainer.current_epoch + 1)
        self._learning_rate = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0]
        self._losses, self._train_seconds = [], None
        self._started = clock.start(self._device)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: dict, *_: object
    ) -> None:
        self._losses.append(outputs["loss"])  # stays on the device until the epoch ends

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        # Validation is within Lightning's epoch.
        self._train_seconds = clock.stop(self._device, self._started)
        self._started = clock.start(self._device)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._eval_seconds = clock.stop(self._device, self._started)
        if trainer.state.fn == "validate":
            self.on_test_end(trainer, module)

    def on_test_end(self, trainer: Trainer, module: LightningModule) -> None:
        tested = self._tested(trainer)
        if world.is_first():
            tell(f"{tested.samples} images: accuracy {tested.accuracy:.2f} %, loss {tested.loss:.4f}")

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._train_seconds is None:
            raise UserError(ONE_VALIDATION)
        epoch = trainer.current_epoch + 1
        losses = mean_over_ranks(torch.stack(self._losses))
        check_finite(losses, epoch)
        trained = Trained(len(losses), self._train_seconds, losses.mean().item(), self._learning_rate)
        tested = self._tested(trainer)
        of_ranks = rows_of_ranks(epoch, self._device, math.nan, math.nan)
        world.on_first(lambda: self._log.epoch(epoch, trained, tested, of_ranks))
        ended = self._has_ended()
        if self._newest:
            self._save(trainer)
            stop = world.largest(self._stop_asked, self._device) and epoch < self._options.epochs
            self._stopped_after = epoch if stop and not ended else 0
        if ended or self._stopped_after:  # another callback may have asked for it, too
            trainer.should_stop = True

    def state_dict(self) -> dict:
        """What a checkpoint keeps that Lightning does not: the options, the rows, and the random numbers."""
        run = self._log.state() if world.is_first() else None  # rank 0 writes the file
        return {
            "options": self._shaping(),
            "run": run,
            "random_numbers": world.gather(random_numbers()),
        }

    def _shaping(self) -> dict[str, object]:
        return self._options.shaping() | {"dataset": self._options.dataset}

    def load_state_dict(self, state: dict) -> None:
        self._kept = state

    def on_predict_end(self, trainer: Trainer, module: LightningModule) -> None:
        digits = sum(world.gather(torch.cat(trainer.predict_loop.predictions).tolist()), [])
        if world.is_first():
            tell(f"predicted {len(digits)} digits, the first of them {digits[:10]}")

    def finish(self, net: nn.Module) -> None:
        """Save the weights if asked to, and say where everything is.

        Raises:
            Stopped: if a signal asked to stop.
        """
        folder = self._options.checkpoint_dir
        if self._stopped_after:
            text = (
                f"stopped after epoch {self._stopped_after} by a signal; --resume auto goes on from {folder}"
            )
            world.on_first(lambda: leave_word(text, folder))
            world.leave()
            raise Stopped(text)
        world.on_first(lambda: self._log.finish(net.state_dict()))
        if world.is_first() and folder and not self._options.keep_checkpoints and ends_with_its_job(folder):
            with suppress(OSError):  # the run went well
                self._newest.unlink()
                folder.rmdir()

    def _tested(self, trainer: Trainer) -> Tested:
        loss, right, images = (trainer.callback_metrics[name].item() for name in SUMS)
        if not math.isfinite(loss):
            raise not_a_number(f"the test loss is {loss / images}")
        return Tested(int(images), self._eval_seconds, loss / images, 100 * right / images)

    def _save(self, trainer: Trainer) -> None:
        try:
            trainer.save_checkpoint(self._newest)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint {self._newest} cannot be written ({reason(error)}): free the space or give "
                "another --checkpoint-dir. The checkpoint and results before stay."
            ) from None

    def _has_ended(self) -> bool:
        """Whether --stop-at or --patience end the run: rank 0 has the record."""
        return world.from_first(self._log is not None and self._log.ended != "")

    def _ask_to_stop(self, *_: object) -> None:
        self._stop_asked = True
