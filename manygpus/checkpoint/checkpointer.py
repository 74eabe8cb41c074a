"""Save the state of the training, and resume from it later.

`epoch-E-step-S.pt` is a checkpoint made when S steps of epoch E were done: one file, which `torch.load`
opens; `Checkpoint` says what is in it. Of a network that is split over the ranks it is a folder
`epoch-E-step-S`: that file is in it as `state.pt`, with all but the split parts, and each of these has a
folder of its own, to which every rank has written its shard (sharded.py). It has that name when it is whole.

The two newest are kept: if the last one is damaged, a resume sets it aside, and takes the one before it.
"""

import io
import os
import re
import shutil
import sys
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from manygpus import job_folder
from manygpus.checkpoint.random_states import rng_states, seed_anew, set_rng_states
from manygpus.checkpoint.state_file import (
    check_parts,
    checksum,
    fitting,
    load_parts,
    load_verified,
    refuse_shards,
    save,
    states_of,
    storable,
    write,
)
from manygpus.checkpoint.stop_signal import Agreement, StopSignal
from manygpus.distributed import process_group
from manygpus.errors import PeerError, UserError, diverged, first_line, print_line
from manygpus.files import check_writable, explained, locked
from manygpus.network import training_identity
from manygpus.network.model import class_name, unwrapped
from manygpus.network.rank_weights import IF_SHARDED, check_equal, check_whole, gather_on_rank_0

if TYPE_CHECKING:
    from manygpus.checkpoint.sharded import Sharded  # takes long to import, and few scripts need it

VERSION = 6  # of the fields of Checkpoint
CHECKPOINTS_KEPT = 2
LOCK = ".lock"
NAME = re.compile(r"epoch-(\d+)-step-(\d+)(\.pt)?")
STATE = "state.pt"
DIFFERENT_FOLDER = "give a different folder for checkpoints."
IF_NOT_WRITTEN = "free the space or give a different folder. Earlier checkpoints and results are kept."


@dataclass
class Checkpoint:
    """The content of one file. All of it is tensors, numbers, texts, and lists or dictionaries of them."""

    epoch: int  # the epoch to resume with, counted from 1
    step: int  # the steps of it that are done
    # The state_dict of each part by its name, but of those that are split over the ranks. Networks are
    # without wrappers.
    parts: dict[str, object]
    # What the script keeps for each rank, as bytes of torch.save.
    per_rank_state: list[torch.Tensor] | None
    # The states of the generators of each rank.
    rng_states: list[dict[str, object]]
    # What makes another training: see Checkpointer._describe_training.
    settings: dict[str, object]
    version: int = VERSION


class Progress(NamedTuple):
    """How far a training is: `step` steps of `epoch` are done, which counts from 1."""

    epoch: int = 1
    step: int = 0


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint that can be read, and what its file has."""

    path: Path
    state: dict[str, object]


class Checkpointer:
    """The checkpoints of one training, in any loop, on one process or many.

        checkpointer = Checkpointer({"model": model, "optimizer": optimizer}, every_steps=100)
        epoch, step = checkpointer.resume()
        for epoch in range(epoch, epochs + 1):
            for batch in ...:  # without those of the first `step` steps
                ...  # the training step, with optimizer.step()
                step += 1
                if checkpointer.step(epoch, step):
                    return  # a signal came, and all is saved: a job comes back by itself
            step = 0
        checkpointer.finish()

    Every rank creates one after the process group, and calls its methods at the same points. From the first
    `step` on USR2 and SIGTERM do not end the process: `step` acts on them.

    Args:
        parts: what is saved, by name: anything with a state_dict and load_state_dict, such as the network
            (wrapped or not), the optimizer, the lr_scheduler, a GradScaler, averaged weights; or a tensor, a
            list or a dictionary that the loop changes in place: of a name that it binds anew, the first
            object would be saved. They are the same on all ranks, or rank 0's count. Of a network that is
            split over the ranks, `Sharded(model, optimizer)` is one part in place of both.
        folder: where the checkpoints are: by default `checkpoints` in the job's own folder; by hand in the
            one you are in. All ranks share it: each reads the checkpoint itself.
        every_steps, every_minutes: the steps and the minutes after which `step` saves: whichever comes first.
        settings: what else makes another training, by name, such as {"batch size": 64}: a checkpoint that was
            made with others is refused. Paths count by their texts. The kinds of network, optimizer and
            lr_scheduler are compared anyway, and the number of ranks.
        any_world_size: resume with any number of ranks. With a different number, each rank begins with new
            random numbers.
        per_rank_state: what differs by rank, by name, as `parts`: each rank gets its own back, and so does
            the state of its random numbers (Python, NumPy, PyTorch, its GPU).

    Raises:
        UserError: if the folder cannot be written to, or not all ranks see it, or another run saves there, or
            a part is split over the ranks and not in `Sharded`, or something could not be saved, or not be
            loaded again.
    """

    def __init__(
        self,
        parts: "dict[str, object | Sharded]",
        folder: Path | str | None = None,
        *,
        every_steps: int | None = None,
        every_minutes: float = 10,
        settings: dict[str, object] | None = None,
        any_world_size: bool = False,
        per_rank_state: dict[str, object] | None = None,
    ) -> None:
        folder = folder or Path(os.environ.get(job_folder.VARIABLE, ".")) / job_folder.CHECKPOINTS
        self.folder = Path(folder).absolute()
        self._every_steps = every_steps
        self._every_minutes = every_minutes
        self._sharded: dict[str, Sharded] = {name: part for name, part in parts.items() if _is_split(part)}
        # Without the wrappers, so that a script that wraps its network otherwise can load it.
        self._parts = {name: _unwrapped(part) for name, part in parts.items() if not _is_split(part)}
        self._per_rank_state = {name: _unwrapped(part) for name, part in (per_rank_state or {}).items()}
        check_parts(self._parts | self._per_rank_state)
        check_whole(self._parts | self._per_rank_state, IF_SHARDED)
        check_equal(self._parts, IF_SHARDED)
        # Before anything is loaded, as the optimizer and the schedule are now as the script has made them.
        self._settings = self._describe_training(settings or {}, any_world_size)
        self._seed = process_group.broadcast(torch.initial_seed())
        device = _device_of(parts)
        self._stop_signal: StopSignal | None = None
        self._agreement = Agreement(device)
        self._is_stopped = False
        self._has_resumed = False
        self._has_tried = False
        self._progress = Progress()
        self._saved_at = time.monotonic()
        self._steps_since_save = 0
        # What writes the split parts while the training goes on.
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[str] | None = None
        process_group.on_rank_0(self._open_folder)
        for part in self._sharded.values():
            part.connect()
        self._check_shared(process_group.gather(self._sees_folder()))

    def resume(self) -> Progress:
        """Resume from the newest checkpoint, and return where it was made; `Progress(1, 0)` if there is none.

        Raises:
            UserError: if there are checkpoints and none can be read, or the newest is of another training.
        """
        self._has_resumed = True
        self._load_newest()
        return self._progress

    def step(self, epoch: int, step: int) -> bool:
        """Save if it is time to, or a signal asks to stop; return whether all ranks have to leave the loop.

        Call it after each `optimizer.step()`, when `step` of them are done in `epoch` and everything that
        changes with a step has changed. Gradients are not saved: with gradient accumulation, do not call it
        between the micro-batches of a step. If it is time to leave, everything is saved, and a job goes back
        to the queue when the script ends.

        Raises:
            UserError: as `save`, and as `is_due`.
        """
        if self._is_stopped:
            return True
        self._check_resumed()
        if self._stop_signal is None:
            self._stop_signal = StopSignal()
        self._steps_since_save += 1
        is_time = self._every_steps is not None and self._steps_since_save >= self._every_steps
        stop = False
        if self._agreement.is_due():
            stop, minutes_are_over = self._agreement.ask(self._stop_signal.was_sent, self.is_due())
            is_time = is_time or stop or minutes_are_over
        if is_time:
            self.save(epoch, step)
        if stop:
            self.report_stop()
        return stop

    def should_stop(self) -> bool:
        """Return whether `step` has saved and asked to leave the loop: the same on all ranks."""
        return self._is_stopped

    def save(self, epoch: int, step: int = 0) -> None:
        """Save now: `step` steps of `epoch` are done. Split parts are written while the training goes on.

        Raises:
            UserError: if the weights are not finite, or a file cannot be written, of this checkpoint or of
                the one before it; earlier checkpoints are kept.
        """
        self._check_resumed()
        self._wait()
        self._progress = Progress(epoch, step)
        self._check_finite()
        # What all ranks have to give; rank 0 has the rest.
        gather_on_rank_0(self._parts)
        states_of_ranks = process_group.gather(rng_states())
        per_rank_state = process_group.gather(self._packed_per_rank_state()) if self._per_rank_state else None
        path = self.folder / f"epoch-{epoch}-step-{step}.pt"
        if not self._sharded:
            process_group.on_rank_0(lambda: self._write(path, states_of_ranks, per_rank_state))
            process_group.on_rank_0(lambda: self._count(path))
        else:
            path = path.with_suffix("")
            unfinished = path.with_name(f".{path.name}.tmp")
            process_group.on_rank_0(lambda: shutil.rmtree(unfinished, ignore_errors=True))
            process_group.on_rank_0(lambda: self._write(unfinished / STATE, states_of_ranks, per_rank_state))
            written = [part.start_saving(unfinished / name) for name, part in self._sharded.items()]
            self._writing = self._executor.submit(self._complete, written, unfinished, path)
            # A loop that ends without finish() would lose this checkpoint, and not a word of it.
            self._warning = weakref.finalize(self, print_line, _may_be_lost(path), sys.stderr)
        self._saved_at = time.monotonic()
        self._steps_since_save = 0

    def finish(self) -> None:
        """Wait until the last checkpoint is written; call it before the process group is destroyed.

        Raises:
            UserError: if it cannot be written.
        """
        self._wait()

    # --- what a Run asks for by itself ------------------------------------------------------------------

    def is_due(self) -> bool:
        """Return whether `every_minutes` are over since the last one; False on all ranks but 0.

        All ranks call it at the first meeting, which is after the first step, and at later ones.

        Raises:
            UserError: at the first meeting, if something in `parts` or `per_rank_state` cannot be saved.
        """
        if not self._has_tried:
            # The first save may be at the time limit. It would fail, and all work would be lost.
            self._has_tried = True
            gather_on_rank_0(self._parts)
            process_group.on_rank_0(self._states)
            states_of(self._per_rank_state)
        return process_group.is_rank_0() and time.monotonic() - self._saved_at > 60 * self._every_minutes

    def report_stop(self, resumes: str = "the next start") -> str:
        """Wait until the last checkpoint is written, then say that the training has stopped.

        Args:
            resumes: what resumes from there.

        Returns:
            What was said.

        Raises:
            UserError: if it cannot be written, or the note for scripts/job_env.sh cannot.
        """
        self._wait()
        text = f"stopped after {self._where()} by a signal; {resumes} resumes from {self.folder}"
        process_group.on_rank_0(lambda: _note_stop(text, self.folder))
        self._is_stopped = True
        return text

    def has_any(self) -> bool:
        """Return whether there are checkpoints in the folder."""
        return bool(_checkpoints(self.folder))

    def keep_newest(self) -> None:
        """Remove all checkpoints but the newest; rank 0 does."""
        if process_group.is_rank_0():
            for path in _checkpoints(self.folder)[:-1]:
                _remove(path)

    # --- saving -------------------------------------------------------------------------------------

    def _check_resumed(self) -> None:
        if not self._has_resumed:
            # It would begin anew, and its checkpoints could count as older than those of an earlier start.
            raise UserError("this training saves checkpoints: call resume() of its Checkpointer before.")

    def _where(self) -> str:
        """Say what is done: before the first step of an epoch, that is the epoch before it."""
        epoch, step = self._progress
        return f"step {step} of epoch {epoch}" if step else f"epoch {epoch - 1}"

    def _check_finite(self) -> None:
        networks = [*self._parts.values(), *(part.model for part in self._sharded.values())]
        trained = [
            weights
            for network in networks
            if isinstance(network, nn.Module)
            for weights in network.parameters()
            if weights.requires_grad
        ]
        is_finite = all(weights.isfinite().all() for weights in trained)
        if not all(process_group.gather(is_finite)):
            raise diverged(f"the weights are no longer numbers after {self._where()}")

    def _packed_per_rank_state(self) -> torch.Tensor:
        """Return this rank's own state as bytes, as its tensors may be on a device that rank 0 has not."""
        content = io.BytesIO()
        write(states_of(self._per_rank_state), content)
        return torch.frombuffer(content.getbuffer(), dtype=torch.uint8)

    def _write(
        self,
        path: Path,
        states_of_ranks: list[dict[str, object]],
        per_rank_state: list[torch.Tensor] | None,
    ) -> None:
        """Write the file of a checkpoint, on rank 0."""
        checkpoint = Checkpoint(
            epoch=self._progress.epoch,
            step=self._progress.step,
            parts=self._states(),
            per_rank_state=per_rank_state,
            rng_states=states_of_ranks,
            settings=self._settings,
        )
        save("the checkpoint", vars(checkpoint), path, IF_NOT_WRITTEN)

    def _states(self) -> dict[str, object]:
        """Return the state of each part, on rank 0."""
        states = states_of(self._parts)
        refuse_shards(states)
        return states

    def _complete(self, written: list[Future], unfinished: Path, path: Path) -> str:
        """Wait for the files of all ranks; then have the checkpoint count, or remove what there is of it.

        Returns:
            Why it could not be written; "" if it was.
        """
        from manygpus.checkpoint.sharded import failure_of

        failures = [failure_of(error) for error in map(Future.exception, written) if error is not None]
        if not process_group.is_rank_0():
            return "".join(failures[:1])
        if failures:
            shutil.rmtree(unfinished, ignore_errors=True)
            return failures[0]
        try:
            if path.exists():  # saved at the same step before
                replaced = path.with_name(f".{path.name}.replaced.tmp")
                path.rename(replaced)
                unfinished.rename(path)
                _remove(replaced)
            else:
                unfinished.rename(path)
            self._count(path)
        except (OSError, UserError) as error:
            return first_line(error)
        return ""

    def _wait(self) -> None:
        """Wait until the split parts of the last checkpoint are written; on all ranks.

        Raises:
            UserError: if that has failed.
        """
        if self._writing is None:
            return
        failure = self._writing.result()
        self._writing = None
        self._warning.detach()
        failed = [rank for rank, other in enumerate(process_group.gather(failure)) if other]
        if failed and failed[0] == process_group.rank():
            raise UserError(
                f"the checkpoint after {self._where()} cannot be written to {self.folder} ({failure}): "
                f"{IF_NOT_WRITTEN}"
            )
        if failed:
            raise PeerError(f"rank {failed[0]} had to stop: see its error.")

    def _count(self, path: Path) -> None:
        """Note that this checkpoint is whole, and remove those before it that are no longer needed."""
        job_folder.note_checkpoint(path)
        with explained(f"old checkpoints in {self.folder} cannot be removed", "mend its permissions."):
            for old in _checkpoints(self.folder)[:-CHECKPOINTS_KEPT]:
                _remove(old)

    def _open_folder(self) -> None:
        check_writable(self.folder, "checkpoints", DIFFERENT_FOLDER)
        held = f"another run saves its checkpoints in {self.folder}: wait for its end, or {DIFFERENT_FOLDER}"
        self._lock = locked(self.folder / LOCK, held)
        for leftover in self.folder.glob(".epoch-*-step-*.tmp"):  # of a process that was killed
            _remove(leftover)

    def _sees_folder(self) -> bool:
        """Return whether this rank sees the folder, which rank 0 has made."""
        # Asked to make it, a file server answers that it is there. Where a node has looked for it before,
        # as the monitor does, NFS may remember for a minute that it is not.
        try:
            self.folder.mkdir()
        except FileExistsError:
            return True
        except OSError:
            return False
        self.folder.rmdir()
        return False

    def _check_shared(self, answers: list[object]) -> None:
        """Raise a UserError if a rank sees no folder, or another one than the others, by these answers."""
        if not all(answers) or len(set(answers)) > 1:
            raise UserError(f"not all ranks see the same {self.folder}: give a folder that they share.")

    # --- resuming -----------------------------------------------------------------------------------

    def _load_newest(self) -> None:
        newest = self._newest_readable()
        if newest is None:
            return
        path = newest.path
        process_group.on_rank_0(lambda: self._check_same_training(newest))
        checkpoint = Checkpoint(**newest.state)
        with fitting(path, DIFFERENT_FOLDER):
            load_parts(self._parts, checkpoint.parts)
            for name, part in self._sharded.items():
                part.load(path / name)
            self._load_per_rank_state(checkpoint.per_rank_state)
        self._set_rng_states(checkpoint)
        self._progress = Progress(checkpoint.epoch, checkpoint.step)
        process_group.on_rank_0(lambda: _tell_resume(path))

    def _newest_readable(self) -> NewestCheckpoint | None:
        """Find the newest checkpoint that can be read, on all ranks; name damaged ones and set them aside.

        Raises:
            UserError: if there are checkpoints, and none can be read.
        """
        paths = process_group.on_rank_0(lambda: _checkpoints(self.folder)) or []
        damaged = []
        for name in process_group.broadcast([path.name for path in reversed(paths)]):
            path = self.folder / name
            problem = ""
            try:
                state = load_verified(_file_of(path))
            except Exception as error:  # PyTorch raises many kinds for a damaged file
                problem = first_line(error) or type(error).__name__
            if _is_folder(path):
                problem = problem or _problem_of_split_parts(path)
            problem = next(filter(None, process_group.gather(problem)), "")
            if not problem:
                # Nodes may have files of one name on disks of their own. The ranks would train on from
                # different weights, without a word.
                self._check_shared(process_group.gather(checksum(_file_of(path))))
                process_group.on_rank_0(lambda: _set_aside(damaged))
                return NewestCheckpoint(path, state)
            if process_group.is_rank_0() and not damaged:
                print_line(f"warning: the checkpoint {path} cannot be read ({problem})", sys.stderr)
            damaged.append(path)
        process_group.on_rank_0(lambda: self._refuse(damaged))
        return None

    def _refuse(self, damaged: list[Path]) -> None:
        if damaged:
            raise UserError(f"no checkpoint in {self.folder} can be read: {DIFFERENT_FOLDER}")

    def _check_same_training(self, newest: NewestCheckpoint) -> None:
        """Check that a checkpoint is of this training; on rank 0.

        Raises:
            UserError: if it is of another one, or of another version.
        """
        path, state = newest
        version = state.get("version")
        if version != VERSION:
            raise UserError(
                f"{path} has version {version}, and this program reads {VERSION}: {DIFFERENT_FOLDER}"
            )
        checkpoint = Checkpoint(**state)
        if _is_folder(path) != bool(self._sharded):
            split_or_not = "split" if _is_folder(path) else "not split"
            raise UserError(f"the network of {path} is {split_or_not} over ranks: {DIFFERENT_FOLDER}")
        saved = checkpoint.settings
        differ = []
        for name in self._settings | saved:
            if self._settings.get(name) != saved.get(name):
                value = "not given" if saved.get(name) is None else saved[name]
                differ.append(f"{name} {value}")
        if differ:
            raise UserError(
                f"{path} was made with {', '.join(differ)}: give the same, or a different folder."
            )

    def _load_per_rank_state(self, per_rank_state: list[torch.Tensor] | None) -> None:
        if bool(self._per_rank_state) != bool(per_rank_state):
            raise ValueError(f"it has {'a' if per_rank_state else 'no'} state of each rank")
        if not per_rank_state:
            return
        if len(per_rank_state) != process_group.count():
            raise ValueError(
                f"each of its {len(per_rank_state)} ranks has its own state: start as many ranks"
            )
        content = io.BytesIO(per_rank_state[process_group.rank()].numpy().tobytes())
        load_parts(self._per_rank_state, torch.load(content, map_location="cpu", weights_only=True))

    def _set_rng_states(self, checkpoint: Checkpoint) -> None:
        """Restore this rank's generators; seed them anew if the ranks or GPUs were others at the save."""
        states = checkpoint.rng_states
        if len(states) == process_group.count() and set_rng_states(states[process_group.rank()]):
            return
        seed_anew((self._seed + 1000 * checkpoint.epoch) % 2**63)

    # --- which training it is -----------------------------------------------------------------------

    def _describe_training(self, settings: dict[str, object], any_world_size: bool) -> dict[str, object]:
        """Return what makes another training, by words for a sentence."""
        described = {name: storable(_plain(value), f"settings[{name!r}]") for name, value in settings.items()}
        if not any_world_size:
            described["ranks"] = process_group.count()
        for name, part in self._parts.items():
            if isinstance(part, nn.Module):
                described[f"the {name}"] = class_name(part)
            elif isinstance(part, torch.optim.Optimizer):
                described[f"the {name}"] = training_identity.of_optimizer(part)
            elif isinstance(part, LRScheduler):
                described[f"the {name}"] = type(part).__name__
        for name, part in self._sharded.items():
            optimizer = training_identity.of_optimizer(part.optimizer, sharded=True)
            described[f"the {name}"] = f"{class_name(part.model)} and {optimizer}"
        return described


def _is_split(part: object) -> bool:
    return hasattr(part, "start_saving")  # its class takes long to import


def _unwrapped(part: object) -> object:
    return unwrapped(part) if isinstance(part, nn.Module) else part


def _plain(setting: object) -> object:
    """Return a setting, which is only compared, with paths as texts, and with arrays and tensors as lists."""
    if isinstance(setting, PurePath):
        return str(setting)
    if isinstance(setting, (np.ndarray, torch.Tensor)):
        return setting.tolist()
    if type(setting) in (list, tuple):
        return type(setting)(map(_plain, setting))
    if type(setting) is dict:
        return {name: _plain(value) for name, value in setting.items()}
    return setting


def _device_of(parts: dict[str, object]) -> torch.device:
    """Return the device of the first network, by which the ranks can meet."""
    for part in parts.values():
        network = part.model if _is_split(part) else part
        if isinstance(network, nn.Module):
            for weights in network.parameters():
                return weights.device
    return torch.device("cpu")


def _may_be_lost(path: Path) -> str:
    return f"warning: the checkpoint {path} may not be complete: call the Checkpointer's finish() at the end."


def _is_folder(path: Path) -> bool:
    return path.suffix == ""


def _file_of(path: Path) -> Path:
    return path / STATE if _is_folder(path) else path


def _problem_of_split_parts(path: Path) -> str:
    """Return what is wrong with the files of split parts that this rank looks at; "" if nothing is."""
    from manygpus.checkpoint.sharded import check_files

    try:
        parts = [part for part in sorted(path.iterdir()) if part.is_dir()]
    except OSError as error:
        return first_line(error)
    return next(filter(None, map(check_files, parts)), "")


def _checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in `folder`, oldest first; nothing else has such a name."""
    by_age = []
    for path in folder.iterdir():
        name = NAME.fullmatch(path.name)
        if name:
            by_age.append((int(name[1]), int(name[2]), path))
    return [path for _, _, path in sorted(by_age)]


def _set_aside(damaged: list[Path]) -> None:
    """Rename them: otherwise they would count as the newest when old ones are removed."""
    for path in damaged:
        aside = path.with_suffix(".damaged")
        _remove(aside)
        path.replace(aside)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _tell_resume(path: Path) -> None:
    print_line(f"resumed from {path}")
    job_folder.note_checkpoint(path, resumed=True)


def _note_stop(text: str, folder: Path) -> None:
    """Print that the run has stopped, and have scripts/job_env.sh put its job back into the queue.

    Raises:
        UserError: if the note for scripts/job_env.sh cannot be written.
    """
    print_line(text)
    problem = f"{text}, but not by itself, as {job_folder.here()} cannot be written to"
    with explained(problem, f"submit it again, to resume from {folder.absolute()}."):
        job_folder.note_stop(folder)
