"""Save the state of the training, go on from it later, and stop when Slurm asks.

A checkpoint is one file, `epoch-E-step-S.pt`: the training stood before step S (counted from 0) of
epoch E. It holds the network, the optimizer, the learning rate schedule, every rank's random
numbers, and the rows of the run's CSV, so that the run goes on under its own name.
"""

import os
import pickle
import re
import signal
import sys
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trainkit import world
from trainkit.epoch import PartialEpoch
from trainkit.errors import Stopped, UserError, first_line
from trainkit.files import check_writable, replacing
from trainkit.model import bare
from trainkit.options import Options
from trainkit.precision import precision_of
from trainkit.runlog import RunLog

VERSION = 1
KEPT = 2  # if the newest turns out damaged, there is the one before
# Ranks must save at the same step, so they have to ask each other; this often, in seconds, because
# asking after every step would make each wait for the others.
BETWEEN_MEETINGS = 1.0


class Checkpoints:
    """The checkpoints of one run, in `--checkpoint-dir`; without that option it does nothing.

    All ranks make one and call its methods at the same points. With `--resume auto` the newest
    checkpoint is loaded here, into `model`, `optimizer`, `schedule` and `log`. From here on the
    signal USR2 means: save at the next step and stop.

    Raises:
        UserError: if the folder cannot be written to, holds another training, or nothing in it can
            be read.
    """

    def __init__(
        self,
        options: Options,
        dataset: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler,
        log: RunLog | None,
    ) -> None:
        # Without the wrappers, so that every stage can load it.
        self._parts = {"model": bare(model), "optimizer": optimizer, "schedule": schedule}
        # What makes it this training and no other.
        names = {"dataset": dataset, "model": type(bare(model)).__name__}
        self._identity = options.shaping() | names
        self._device = next(model.parameters()).device
        self._options, self._log, self._folder = options, log, options.checkpoint_dir
        self._first_epoch, self._part = 1, None
        self._stop_asked = self._stopping = False
        self._saved_at = self._met_at = time.monotonic()
        self._steps, self._meet_after = 0, 1  # steps since the last meeting, and when the next one is
        if self._folder:
            self._open_folder()
            signal.signal(signal.SIGUSR2, self._ask_to_stop)

    def epochs(self) -> range:
        """The epochs that are still to be trained."""
        return range(self._first_epoch, self._options.epochs + 1)

    def part_of(self, epoch: int) -> PartialEpoch | None:
        """What an earlier process did of `epoch`, or None."""
        return self._part if epoch == self._first_epoch else None

    def due(self) -> bool:
        """True, on every rank at the same step, if it is time to save within the epoch.

        To be called after every step; the ranks ask each other about once a second.
        """
        self._steps += 1
        return self._folder is not None and self._steps >= self._meet_after and self._meet()

    def save(self, epoch: int, part: PartialEpoch | None = None) -> None:
        """Save the state before `epoch`, or after `part` of it.

        Raises:
            Stopped: if a signal asked for it.
            UserError: if the file cannot be written; the checkpoints before stay.
        """
        random_numbers = world.gather(_random_numbers())
        if world.is_first():
            path = self._folder / f"epoch-{epoch}-step-{part.steps if part else 0}.pt"
            state = {name: thing.state_dict() for name, thing in self._parts.items()}
            self._write(path, state | {
                "version": VERSION,
                "epoch": epoch,
                "part": part and asdict(part),
                "precision": precision_of(self._parts["model"]),
                "random_numbers": random_numbers,
                "options": self._identity,
                "run": self._log.state(),
            })  # fmt: skip
        self._saved_at = time.monotonic()
        if self._stopping:
            self._stop(epoch, part)

    def end_of_epoch(self, epoch: int) -> None:
        """Save after `epoch`; call it when the epoch's row is written."""
        if self._folder:
            self._meet()
            self._stopping = self._stopping and epoch < self._options.epochs
            self.save(epoch + 1)

    def _ask_to_stop(self, *_: object) -> None:
        self._stop_asked = True

    def _meet(self) -> bool:
        """Whether any rank was asked to stop, or rank 0's clock says that it is time to save."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # steps done, not steps queued
        now = time.monotonic()
        wishes = [self._stop_asked, 0, 0]
        if world.is_first():  # its clock decides, so that all ranks meet at the same step again
            overdue = now - self._saved_at > 60 * self._options.checkpoint_minutes
            steps_per_second = self._steps / (now - self._met_at)
            # At most twice as many as the last time: the first steps tell little about the others.
            meet_after = min(2 * self._meet_after, steps_per_second * BETWEEN_MEETINGS)
            wishes[1:] = overdue, max(1, meet_after)
        wishes = torch.tensor(wishes, dtype=torch.float64, device=self._device)
        stop, save, meet_after = world.sum_in_place(wishes).tolist()
        self._stopping = stop > 0
        self._steps, self._meet_after, self._met_at = 0, int(meet_after), now
        return stop > 0 or save > 0

    def _stop(self, epoch: int, part: PartialEpoch | None) -> None:
        job_folder = os.environ.get("TRAINKIT_JOB_DIR")
        where = f"after step {part.steps} of epoch {epoch}" if part else f"after epoch {epoch - 1}"
        text = f"stopped {where} by the signal USR2; --resume auto goes on from {self._folder}"
        if world.is_first():
            print(text, flush=True)
            if job_folder:  # tells slurm/job_env.sh to put the job back into the queue
                Path(job_folder, "stopped").write_text(f"{self._folder.absolute()}\n")
        world.leave()  # when rank 0 has saved: a rank that went before would end the whole step
        raise Stopped(text)

    def _open_folder(self) -> None:
        if world.is_first():
            check_writable(self._folder, "checkpoints", "give another --checkpoint-dir.")
            for leftover in self._folder.glob("*.pt.tmp"):  # of a process that was killed
                leftover.unlink(missing_ok=True)
            if _checkpoints(self._folder) and self._options.resume == "never":
                raise UserError(
                    f"{self._folder} holds the checkpoints of an earlier run: add --resume auto to go on "
                    "with it, or give another --checkpoint-dir."
                )
        # One rank reads the file, so that all have the same one.
        path, state = world.from_first(_newest(self._folder) if world.is_first() else None)
        if state:
            self._load(path, state)

    def _load(self, path: Path, state: dict) -> None:
        # Checkpoints of earlier programs do not name the model: theirs was Net.
        was = {"model": "Net"} | state["options"] | {"precision": state["precision"]}
        asked = self._identity | {"precision": self._options.precision}
        if asked["precision"] == "auto":  # as the run chose at its start, whatever is faster today
            asked["precision"] = state["precision"]
            if hasattr(self._parts["model"], "precision"):
                self._parts["model"].precision = state["precision"]
        told = [f"{_called(name)} {was.get(name)}" for name in asked if was.get(name) != asked[name]]
        if told:
            told = ", ".join(told).replace("None", "not given")
            raise UserError(f"{path} was made with {told}: give the same, or another --checkpoint-dir.")
        try:
            for name, thing in self._parts.items():
                thing.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"{path} does not fit this training ({first_line(error)}): give another --checkpoint-dir."
            ) from None
        if not _set_random_numbers(state["random_numbers"]):  # other ranks or GPUs than before: new numbers
            torch.manual_seed(self._options.seed + world.rank() + 1000 * state["epoch"])
        self._first_epoch, self._part = state["epoch"], state["part"] and PartialEpoch(**state["part"])
        if self._log:
            self._log.go_on(state["run"])
            print(f"resumed from {path}", flush=True)

    def _write(self, path: Path, state: dict) -> None:
        try:
            with replacing(path, "wb") as file:
                torch.save(state, file)
            for old in _checkpoints(self._folder)[:-KEPT]:
                old.unlink()
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint {path} cannot be written ({first_line(error)}): free the space or give "
                "another --checkpoint-dir. The checkpoints and results before stay."
            ) from None


def _called(name: str) -> str:
    return f"the {name}" if name in ("dataset", "model") else f"--{name.replace('_', '-')}"


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""

    def position(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.stem)]

    return sorted(folder.glob("epoch-*-step-*.pt"), key=position)


def _newest(folder: Path) -> tuple[Path | None, dict | None]:
    """The newest checkpoint that can be read, and its file; a damaged one is named and put aside."""
    found, unreadable = _checkpoints(folder), []
    for path in reversed(found):
        try:
            with zipfile.ZipFile(
                path
            ) as archive:  # torch.save writes a zip, but torch.load skips its checksums
                damaged = archive.testzip()
            if damaged:
                raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state.get("version") == VERSION:
                for broken in unreadable:  # else it would count as the newest when old ones are deleted
                    broken.replace(broken.with_suffix(".damaged"))
                return path, state
            problem = f"version {state.get('version')}, this program reads {VERSION}"
        except (OSError, RuntimeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
            problem = first_line(error)
        unreadable.append(path)
        print(f"warning: the checkpoint {path} cannot be read ({problem})", file=sys.stderr)
    if found:
        raise UserError(
            f"no checkpoint in {folder} can be read: give another --checkpoint-dir to start anew."
        )
    return None, None


def _random_numbers() -> list[torch.Tensor]:
    """The states of this rank's generators: the CPU's, then those of its GPUs."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _set_random_numbers(of_all_ranks: list[list[torch.Tensor]]) -> bool:
    """Set this rank's; False if there were other ranks, or other GPUs, when they were saved."""
    if len(of_all_ranks) != world.count():
        return False
    cpu, *gpus = of_all_ranks[world.rank()]
    if len(gpus) != (torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        return False
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(gpus)
    return True
