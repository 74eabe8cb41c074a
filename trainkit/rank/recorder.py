"""The record of a training with a loop from elsewhere: Accelerate's, Fabric's, or your own."""

import math
import os
import signal
from pathlib import Path

import torch
from torch import nn

from trainkit.rank import identity, options
from trainkit.rank.checkpoint import came_from, report_stop
from trainkit.rank.drift import Drift
from trainkit.rank.epoch import Metric, Tested, Trained
from trainkit.rank.model import trained_weights
from trainkit.rank.run import Agreement, rows_of_ranks
from trainkit.rank.runlog import RunLog
from trainkit.rank.state_file import fitting, load_parts, load_verified, save
from trainkit.rank.weights import check_equal, check_whole, inner_optimizer
from trainkit.runtime import process_group
from trainkit.runtime.device import reset_peak_memory
from trainkit.runtime.errors import UserError, first_line
from trainkit.runtime.signals import STOP_SIGNALS, hear_stop
from trainkit.schema.columns import OWN_LOOP

IF_SPLIT = "keep it with torch.distributed.checkpoint, and here what is whole on rank 0."
# What has to be equal in a training that goes on.
OF_THE_TRAINING = ("stage", "dataset", "model", "global_batch", "settings", "precision")
OF_THE_OPTIMIZER = ("optimizer", "lr")


class Recorder:
    """Writes the record of a training with another loop, and reports when it has to stop.

    Every rank creates one after the process group, and calls its methods at the same points; rank 0
    writes. `first_epoch` is 1, or follows the last epoch of `load`.

    Args:
        name: the training's name in the record.
        model, optimizer: on the device that they train on, wrapped or not.
        batch_size: the global batch size: samples per optimizer step of all ranks together.
        epochs: the number planned.
        dataset: its name.
        settings: other settings that identify the training, such as {"hidden": 256}.
        precision: such as "bf16", if the layers do not compute in the type of the weights.
        schedule: of the learning rate, for the record; without it the rates tell two schedules apart.
        weights_differ: between the ranks, rightly, as in local SGD or in a pipeline. Otherwise the training
            ends after the first epoch if each rank has trained by itself.
        results_dir: by default that of the job, or `results` in this checkout.

    Raises:
        UserError: if several processes have no process group, a setting cannot be recorded, or the results
            cannot be written.
    """

    _asked = False  # to stop, of all in this process

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
        precision: str = "",
        schedule: object | None = None,
        weights_differ: bool = False,
        results_dir: Path | str | None = None,
    ) -> None:
        self._optimizer = inner_optimizer(optimizer)
        self._device, self._batch_size = next(model.parameters()).device, batch_size
        here = process_group.joined(self._device)
        folder = Path(results_dir or os.environ.get("TRAINKIT_RESULTS_DIR") or options.DEFAULT_RESULTS)
        own = {"recipe": OWN_LOOP, "gamma": math.nan, "loader": "workers", "results_dir": folder.absolute()}
        lr, settings = identity.base_lr(self._optimizer), settings or {}
        opts = options.Options(epochs=epochs, batch_size=batch_size, lr=lr, **own)
        facts = {"stage": name, "devices": here.size, "accumulate": 1}
        facts |= {"parameters": trained_weights(model), "settings": options.in_words(settings)}
        facts |= {
            "optimizer": identity.of_optimizer(self._optimizer),
            "schedule": identity.of_schedule(schedule),
            "network": identity.of_network({"model": model}),
        }
        known = self._optimizer.defaults | settings | {"lr": lr, "learning_rate": lr}
        known |= {"wd": known.get("weight_decay"), "optimizer": type(self._optimizer).__name__}
        facts["arguments"] = identity.of_arguments(known, here.size, here.nodes, batch_size)
        facts |= {"precision": precision} if precision else {}
        self._log = process_group.on_rank_0(lambda: RunLog(opts, here, dataset, model, facts))
        # What one that has made steps began with is known from the record alone.
        self._must_be_equal = OF_THE_TRAINING + (() if self._optimizer.state else OF_THE_OPTIMIZER)
        self.first_epoch = self._epoch = 1
        self._drift = None if weights_differ else Drift([model])  # until the first epoch is compared
        self._agreement, self._stop = None, False

    def should_stop(self) -> bool:
        """Return whether USR2 or SIGTERM asked any rank to stop; the answer is the same on all ranks.

        Call it in every step. From the first call on, such a signal does not end the process.
        """
        if self._agreement is None:
            self._agreement = Agreement(self._device)
            hear_stop(self._ask_to_stop)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if not self._stop and self._agreement.due():
            (self._stop,) = self._agreement.ask(Recorder._asked)
        return self._stop

    def _ask_to_stop(self, *_: object) -> None:
        Recorder._asked = True

    def epoch(self, samples: int, seconds: float, loss: float, **metrics: float) -> None:
        """Write the row of the next epoch, from each rank's own numbers.

        Args:
            samples: that this rank trained on; the record has the sum over all ranks.
            seconds: that it took, by a clock that waited for the GPU; the slowest rank counts.
            loss: its mean loss per sample; the record has the mean over the samples of all ranks.
            metrics: `test_samples`, `test_seconds`, `test_loss` and `accuracy` (%) of its share of the test
                become columns. Others, means over its samples, go to `<run_id>.metrics.tsv`.

        Raises:
            UserError: if a number makes no sense, the row cannot be written, or each rank has trained by
                itself. Earlier epochs are kept.
        """
        known = {"test_samples": 0, "test_seconds": 0, "test_loss": math.nan, "accuracy": math.nan}
        given = {"samples": samples, "seconds": seconds, "loss": loss} | known | metrics
        try:
            own = {name: float(value) for name, value in given.items()}
            own |= {name: int(own[name]) for name in ("samples", "test_samples")}
            for name, value in own.items():
                below = value < 0 and name in ("samples", "seconds", *known) and name != "test_loss"
                if math.isinf(value) or below or (name == "accuracy" and value > 100):
                    raise ValueError(f"{name} is {value}")
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            mistake = f"epoch {self._epoch} has a value that makes no sense ({first_line(error)})"
            raise UserError(f"{mistake}: give one for each name.") from None
        of_ranks = process_group.gather(own)
        if any(one.keys() != given.keys() for one in of_ranks):
            raise UserError(f"the ranks give epoch {self._epoch} other metrics: give the same names on all.")
        if self._drift:
            self._drift.check()
            self._drift = None
        count, tests = (int(sum(one[name] for one in of_ranks)) for name in ("samples", "test_samples"))
        slowest, testing = (max(one[name] for one in of_ranks) for name in ("seconds", "test_seconds"))
        means = {name: _mean(of_ranks, name) for name in given}
        tested = Tested(tests, testing, means["test_loss"], means["accuracy"])
        rate = float(self._optimizer.param_groups[0].get("lr") or 0)
        trained = Trained(max(1, count // self._batch_size), slowest, means["loss"], rate, count)
        of_epoch = [Metric(name, "epoch", means[name]) for name in metrics if name not in known]
        rows = rows_of_ranks(self._epoch, self._device, math.nan, math.nan)
        process_group.on_rank_0(lambda: self._log.epoch(self._epoch, trained, tested, rows, of_epoch))
        self._epoch += 1
        reset_peak_memory()

    def state_dict(self) -> dict[str, object]:
        """Return the state that a checkpoint has to keep to continue the record; rank 0's counts."""
        return self._log.state() if self._log else {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue the record of an earlier process, on every rank from rank 0's `state_dict`.

        Raises:
            UserError: if it is not such a state, or the record cannot be written.
        """
        try:
            process_group.on_rank_0(lambda: self._log.check_same(state["rows"], self._must_be_equal))
            process_group.on_rank_0(lambda: self._log.go_on(state, *state.get("came_from", ())))
            self.first_epoch = self._epoch = len(state["rows"]) + 1
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"this state is of another training, or of none ({error}): start over.") from None

    def save(self, path: Path | str, parts: dict[str, object]) -> None:
        """Write rank 0's state_dict of each of `parts`, and of this record, to `path`, whole or not at all.

        Raises:
            UserError: if that fails, or a part is split over the ranks; an earlier file is kept.
        """
        if "record" in parts:
            raise UserError("`record` is the name of the Recorder's own part: give another.")
        _check(parts)
        path = Path(path)
        record = self.state_dict() | {"file": str(Path(os.path.realpath(path.parent), path.name))}
        state = {name: part.state_dict() for name, part in parts.items()} | {"record": record}
        advice = "free the space, or give another. The earlier file and the record are kept."
        process_group.on_rank_0(lambda: save("the training", state, path, advice))

    def load(self, path: Path | str, parts: dict[str, object]) -> None:
        """Continue on every rank from what `save` has written, if `path` exists.

        Raises:
            UserError: if it cannot be read, or is of another training; or if a part is split over the ranks,
                which `save` would refuse later.
        """
        _check(parts)
        if not process_group.broadcast(os.path.lexists(path)):
            return
        with fitting(Path(path), "move it away to start over."):
            # Rank 0's file, as another node may have another of this name, or none yet.
            state = process_group.on_rank_0(lambda: self._read(Path(path)))
            state, parts = process_group.broadcast(state), parts | {"record": self}
            load_parts(parts, state)

    def _read(self, path: Path) -> dict:
        """Return what `save` has written, and whether it was written there."""
        state = load_verified(path)
        record = state["record"]
        self._log.check_same(record["rows"], self._must_be_equal)
        record["came_from"] = came_from(Path(record.get("file", path)), path)
        return state

    def finish(self, saved: Path | str | None = None) -> None:
        """Print where the record is, or where a stopped training has `saved`: its job is then requeued.

        Raises:
            UserError: if the job's folder cannot be written to.
        """
        if saved and not process_group.broadcast(Path(saved).exists()):
            raise UserError(f"stopped by a signal before there was a {saved}: give the job more time.")
        words = f"stopped by a signal; saved in {saved}"
        end = (lambda: report_stop(words, Path(saved))) if saved else (lambda: self._log.finish({}))
        process_group.on_rank_0(end)


def _check(parts: dict[str, object]) -> None:
    check_whole(parts, IF_SPLIT)
    check_equal(parts, IF_SPLIT)


def _mean(of_ranks: list[dict[str, float]], name: str) -> float:
    """Return the mean over the samples of all ranks, or over the ranks if their samples are unknown."""
    of_test = name in ("test_loss", "accuracy")
    weights = [one["test_samples" if of_test else "samples"] for one in of_ranks]
    weights = weights if any(weights) else [1] * len(weights)
    pairs = zip(of_ranks, weights, strict=True)
    return sum(one[name] * weight for one, weight in pairs if weight) / sum(weights)
