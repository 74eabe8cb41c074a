"""Save the state of the training, resume from it later, and stop when Slurm asks.

A checkpoint is one file, `epoch-E-step-S.pt`, made before step S (counted from 0) of epoch E. It holds the
network, the optimizer, the learning rate schedule, every rank's random numbers, and the rows of the run's
CSV, so that the run continues under the same name. A network that is split over the ranks is whole in it.
"""

import io
import pickle
import re
import signal
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trainkit.rank import identity
from trainkit.rank.epoch import PartialEpoch, diverged
from trainkit.rank.model import class_name, unwrapped
from trainkit.rank.options import Options
from trainkit.rank.precision import precision_of, set_precision
from trainkit.rank.recipes import KERNELS
from trainkit.rank.runlog import RunLog
from trainkit.rank.weights import inner_optimizer, pack, save
from trainkit.runtime import job_folder, process_group
from trainkit.runtime.device import random_states, seed_gpus, set_random_states
from trainkit.runtime.errors import Stopped, UserError, first_line, lost_peers, tell
from trainkit.runtime.files import check_writable, explained, locked
from trainkit.runtime.signals import STOP_SIGNALS, hear_stop

if TYPE_CHECKING:
    from trainkit.rank.sharded import Sharded

VERSION = 2
# The names that a checkpoint itself uses.
ITS_OWN = {"version", "epoch", "part", "random_numbers", "each_rank", "split", "options", "run"}
ITS_OWN |= {"precision", "folder"}
TAKEN = ITS_OWN | {"model", "optimizer", "schedule"}
LOCK = ".lock"
KEPT = 2  # if the newest is damaged, the one before it is used


class Checkpoints:
    """The checkpoints of one run, in `--checkpoint-dir`; without that option nothing is saved.

    Every rank creates one and calls its methods at the same points. With `--resume auto` it loads the newest
    checkpoint into `model`, `parts`, `each_rank` (by name; each has a state_dict) and `log`.
    From then on the signals USR2 and SIGTERM mean: save at the next step and stop.

    Raises:
        UserError: if the folder cannot be written to, is another run's, holds another training, or
            no checkpoint in it can be read.
    """

    def __init__(
        self,
        options: Options,
        dataset: str,
        model: nn.Module,
        parts: dict[str, object],
        log: RunLog | None,
        sharded: "Sharded | None" = None,
        each_rank: dict[str, object] | None = None,
    ) -> None:
        # Without the wrappers, so every stage can load it.
        self._model = unwrapped(model)
        self._parts = {"model": self._model} | parts
        if sharded:
            del self._parts["model"], self._parts["optimizer"]
        # What identifies this training.
        self._identity = options.shaping() | {"dataset": dataset, "model": class_name(model)}
        for name, part in parts.items():
            # Before it loads anything: as the script has made it.
            if isinstance(part, torch.optim.Optimizer):
                self._identity[name] = identity.of_optimizer(part, split=sharded is not None)
            elif isinstance(part, LRScheduler):
                self._identity[name] = type(part).__name__
        self._options, self._log, self._folder = options, log, options.checkpoint_dir
        self._sharded, self._each_rank = sharded, each_rank or {}
        self._first_epoch, self._part = 1, None
        self._stop_asked = False
        self._saved_at = time.monotonic()
        if self._folder:
            process_group.on_rank_0(self._open_folder)
            # Only one rank reads the file, so all ranks get the same one.
            path, state = process_group.on_rank_0(lambda: _newest(self._folder)) or (None, {})
            # Of these each rank takes its part.
            split = {name: state.pop(name, {}) for name in ("model", "optimizer") if sharded}
            path, state = process_group.broadcast((path, state))
            if path:
                self._load(path, state | split)
            hear_stop(self._ask_to_stop)
        # A job blocks them until the training can handle them (slurm/job_env.sh).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def epochs(self) -> range:
        """Return the epochs that remain to be trained."""
        return range(self._first_epoch, self._options.epochs + 1)

    def partial_epoch(self, epoch: int) -> PartialEpoch | None:
        """Return the part of `epoch` that an earlier process trained, or None."""
        return self._part if epoch == self._first_epoch else None

    def requests(self) -> tuple[bool, bool]:
        """Return whether this rank was asked to stop, and whether it is time to save within the epoch."""
        overdue = time.monotonic() - self._saved_at > 60 * self._options.checkpoint_minutes
        return self._stop_asked, self._folder is not None and process_group.is_rank_0() and overdue

    def save(self, epoch: int, part: PartialEpoch | None = None, stop: bool = False) -> None:
        """Save the state before `epoch`, or after `part` of it; with `stop`, all ranks then stop.

        Raises:
            Stopped: with `stop`.
            UserError: if the weights are not finite, or the file cannot be written; earlier checkpoints
                are kept.
        """
        if not self._folder:
            return
        where = f"step {part.steps} of epoch {epoch}" if part else f"epoch {epoch - 1}"
        path = self._folder / f"epoch-{epoch}-step-{part.steps if part else 0}.pt"
        finite = all(own.isfinite().all() for own in self._model.parameters() if own.requires_grad)
        if not all(process_group.gather(finite)):
            raise diverged(f"the weights are no longer numbers after {where}")
        state = {"version": VERSION, "epoch": epoch, "part": part and asdict(part)}
        state |= {"random_numbers": process_group.gather(random_states())}
        if self._each_rank:
            content = io.BytesIO()  # as bytes, whichever device its tensors are on
            pack({name: one.state_dict() for name, one in self._each_rank.items()}, content)
            own = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
            state |= {"each_rank": process_group.gather(own)}
        if self._sharded:
            state |= {"split": True} | self._sharded.state_dict()
        process_group.on_rank_0(lambda: self._write(path, state))
        self._saved_at = time.monotonic()
        if stop:
            text = f"stopped after {where} by a signal; --resume auto goes on from {self._folder}"
            process_group.on_rank_0(lambda: report_stop(text, self._folder))
            process_group.leave()  # after rank 0 has saved: a rank that left earlier would end the whole step
            raise Stopped(text)
        self._first_epoch, self._part = epoch, part

    def finish(self, ended: bool) -> None:
        """Remove the checkpoints in a job's own folder, which are not needed after the end.

        `ended`: the run has ended before its last epoch.
        """
        job = job_folder.here()
        over = ended or not self.epochs()
        if not (over and self._folder and job and process_group.is_rank_0()):
            return
        if self._folder.resolve().is_relative_to(job.resolve()):
            with suppress(OSError):  # the run went well
                for path in _checkpoints(self._folder):
                    path.unlink(missing_ok=True)
                (self._folder / LOCK).unlink(missing_ok=True)
                self._folder.rmdir()

    def _ask_to_stop(self, *_: object) -> None:
        self._stop_asked = True

    def _open_folder(self) -> None:
        fix = "give another --checkpoint-dir."
        check_writable(self._folder, "checkpoints", fix)
        held = f"another run saves its checkpoints in {self._folder}: wait for its end, or {fix}"
        self._lock = locked(self._folder / LOCK, held)
        for leftover in self._folder.glob(".epoch-*-step-*.pt.*.tmp"):  # of a process that was killed
            leftover.unlink(missing_ok=True)
        if _checkpoints(self._folder) and self._options.resume == "never":
            raise UserError(
                f"{self._folder} holds the checkpoints of an earlier run: add --resume auto to go on "
                "with it, or give another --checkpoint-dir."
            )

    def _load(self, path: Path, state: dict) -> None:
        """Resume from `state`, the content of `path`, which may hold anything."""
        with fitting(path, "give another --checkpoint-dir."):
            if state["version"] != VERSION:
                raise ValueError(f"it has version {state['version']}, and this program reads {VERSION}")
            if type(state["epoch"]) is not int or state["epoch"] != len(state["run"]["rows"]) + 1:
                raise ValueError(f"its epoch is {state['epoch']}, after {len(state['run']['rows'])} rows")
            was = state["options"] | {"precision": state["precision"]}
            self._check_identity(path, was)
            if ("split" in state) != (self._sharded is not None):
                raise ValueError(f"its network is {'split' if 'split' in state else 'not split'} over ranks")
            if left := state.keys() - ITS_OWN - {"model", "optimizer"} - self._parts.keys():
                raise ValueError(f"it also has the state of {min(left)}")
            load_parts(self._parts, state)
            if self._sharded:
                self._sharded.load_state_dict(state)
            if bool(self._each_rank) != ("each_rank" in state):
                raise ValueError(f"it has {'a' if 'each_rank' in state else 'no'} state of each rank")
            if self._each_rank:
                self._load_each_rank(state["each_rank"])
            _set_random_numbers(state["random_numbers"], self._options.seed + 1000 * state["epoch"])
            self._first_epoch = state["epoch"]
            self._part = state["part"] and PartialEpoch(**state["part"])
            there = Path(state["folder"])
            process_group.on_rank_0(lambda: self._log.go_on(state["run"], *came_from(there, self._folder)))
        process_group.on_rank_0(lambda: tell(f"resumed from {path}"))

    def _load_each_rank(self, packed: list[torch.Tensor]) -> None:
        if len(packed) != process_group.count():
            raise ValueError(f"each of its {len(packed)} ranks has its own state: start as many ranks")
        content = io.BytesIO(packed[process_group.rank()].numpy().tobytes())
        load_parts(self._each_rank, load_verified(content))

    def _check_identity(self, path: Path, was: dict) -> None:
        wanted = self._options.precision
        # "auto": as the run chose at its start, whatever is faster today.
        asked = self._identity | {"precision": was["precision"] if wanted == "auto" else wanted}
        differ = [name for name in asked if was.get(name, asked[name]) != asked[name]]
        unknown = [name for name in asked if name not in was and asked[name] is not None]
        earlier = [f"{self._option_name(name)} {was[name]}" for name in differ]
        if earlier or unknown:
            earlier = earlier or [f"another script, without {self._option_name(unknown[0])}"]
            earlier = ", ".join(earlier).replace("None", "not given")
            raise UserError(f"{path} was made with {earlier}: give the same, or another --checkpoint-dir.")
        set_precision(self._model, was["precision"])

    def _option_name(self, name: str) -> str:
        is_option = name == "precision" or name in self._options.shaping()
        return f"--{name.replace('_', '-')}" if is_option else f"the {name}"

    def _write(self, path: Path, state: dict) -> None:
        state |= {name: thing.state_dict() for name, thing in self._parts.items()}
        state |= {"options": self._identity, "run": self._log.state()}
        state |= {"precision": precision_of(self._model), "folder": str(self._folder.resolve())}
        advice = "free the space or give another --checkpoint-dir. Earlier checkpoints and results are kept."
        save("the checkpoint", state, path, advice)
        with explained(f"old checkpoints in {self._folder} cannot be removed", "mend its permissions."):
            for old in _checkpoints(self._folder)[:-KEPT]:
                old.unlink()


def report_stop(text: str, folder: Path) -> None:
    """Print that the run has stopped, and have slurm/job_env.sh put its job back into the queue.

    Raises:
        UserError: if the note for slurm/job_env.sh cannot be written.
    """
    tell(text)
    what = f"{text}, but not by itself, as {job_folder.here()} cannot be written to"
    with explained(what, f"submit it again, to go on from {folder.absolute()}."):
        job_folder.note_stop(folder)


def _checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in `folder`, oldest first; no other file has such a name."""
    pattern, files = r"epoch-(\d+)-step-(\d+)\.pt", (path for path in folder.iterdir() if not path.is_dir())
    found = {path: name for path in files if (name := re.fullmatch(pattern, path.name))}
    return sorted(found, key=lambda path: [*map(int, found[path].groups())])


def _newest(folder: Path) -> tuple[Path | None, dict]:
    """Return the newest readable checkpoint and its content; name damaged ones and set them aside."""
    found, unreadable = _checkpoints(folder), []
    for path in reversed(found):
        try:
            state = load_verified(path)
            if not isinstance(state, dict) or "version" not in state:
                raise ValueError("it has no version")
        except Exception as error:  # PyTorch raises many kinds for a damaged file
            if not unreadable:
                tell(f"warning: the checkpoint {path} cannot be read ({first_line(error)})", sys.stderr)
            unreadable.append(path)
            continue
        for broken in unreadable:  # otherwise it would count as the newest when old ones are deleted
            broken.replace(broken.with_suffix(".damaged"))
        return path, state
    if found:
        raise UserError(f"no checkpoint in {folder} can be read: give another --checkpoint-dir.")
    return None, {}


def came_from(there: Path, here: Path) -> tuple[bool, bool]:
    """Return whether a state that is loaded `here` was saved elsewhere, and whether `there` still is one."""
    try:
        same = there.samefile(here)  # perhaps by another name
        return not same, not same and (there.is_file() or bool(_checkpoints(there)))
    except OSError as error:  # it is gone, or in a folder of another user
        return True, isinstance(error, PermissionError)


def load_verified(file: Path | io.BytesIO) -> object:
    """Return the tensors and numbers that torch.save has written to `file`.

    Raises:
        ValueError: if it holds anything else, which could run a program. For a damaged file PyTorch also
            raises other errors.
    """
    with zipfile.ZipFile(file) as archive:  # torch.save writes a zip, but torch.load skips its checksums
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
    if isinstance(file, io.BytesIO):
        file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # PyTorch's own message advises loading it anyway
        raise ValueError("it holds more than tensors and numbers, and that is never loaded") from None


@contextmanager
def fitting(path: Path, advice: str) -> Iterator[None]:
    """Turn what is raised for a state that does not fit into one sentence; PyTorch raises many kinds.

    Raises:
        UserError: "<path> does not fit this training (<reason>): <advice>".
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or lost_peers(error):
            raise
        raise UserError(f"{path} does not fit this training ({first_line(error)}): {advice}") from None


def load_parts(parts: dict[str, object], state: dict[str, object]) -> None:
    """Load into each of `parts` what `state` has under its name.

    Raises:
        ValueError: if there is nothing. For what does not fit, PyTorch also raises other errors.
    """
    for name, part in parts.items():
        if name not in state:
            raise ValueError(f"it has no state of {name}")
        if isinstance(part, torch.optim.Optimizer):
            _load_optimizer(part, state[name])
        else:
            part.load_state_dict(state[name])


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
    """Load the state of an optimizer, which computes with the kernels that this process has chosen for it.

    The checkpoint may come from another stage or device: with DataParallel, for example, older releases of
    PyTorch refuse fused kernels.
    """
    inner = inner_optimizer(optimizer)
    for saved, own in zip(state["param_groups"], inner.param_groups, strict=False):  # PyTorch compares them
        saved.update({name: own[name] for name in KERNELS & own.keys()})
    optimizer.load_state_dict(state)
    _lay_out(inner.state)


@torch.no_grad()
def _lay_out(state: dict[torch.Tensor, dict[str, object]]) -> None:
    """Lay out in memory what an optimizer keeps for each number of a parameter as the parameter itself is.

    The network is in channels_last in stage 03 and not in the others, and PyTorch loads a tensor with the
    strides that it was saved with. A fused optimizer pairs the numbers of both by their place in memory: it
    would train on with the wrong ones, without a word.
    """
    for parameter, kept in state.items():
        for key, value in kept.items():
            same_shape = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if same_shape and value.stride() != parameter.stride():
                kept[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _set_random_numbers(of_all_ranks: list[list[torch.Tensor]], seed: int) -> None:
    """Restore this rank's generators; seed new ones if the ranks or GPUs were others when they were saved."""
    rank, ranks = process_group.rank(), process_group.count()
    if len(of_all_ranks) == ranks and set_random_states(of_all_ranks[rank]):
        return
    torch.manual_seed(seed + rank)
    if ranks == 1:  # DataParallel's GPUs all belong to one process
        seed_gpus(seed)
