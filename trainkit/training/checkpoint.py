"""Save the state of the training, and resume from it later.

A checkpoint is one file, `epoch-E-step-S.pt`, made before step S (counted from 0) of epoch E; `Checkpoint`
says what is in it. Of those that `Checkpointer` saves the two newest are kept: if the last one is damaged, a
resume takes the one before it.
"""

import io
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trainkit import job_folder
from trainkit.config.options import Options
from trainkit.devices import random_states, seed_gpus, set_random_states
from trainkit.distributed import process_group
from trainkit.errors import Stopped, UserError, first_line, print_line
from trainkit.files import check_writable, explained, locked
from trainkit.record.records import RecordWriter
from trainkit.training import identity
from trainkit.training.evaluation import PartialEpoch, diverged
from trainkit.training.model import class_name, unwrapped
from trainkit.training.state_file import fitting, load_parts, load_verified, refuse_shares, save, write

if TYPE_CHECKING:
    from trainkit.training.sharded import Sharded

VERSION = 5  # of the fields of Checkpoint
CHECKPOINTS_KEPT = 2
LOCK = ".lock"
NAME = re.compile(r"epoch-(\d+)-step-(\d+)\.pt")
# The names of the parts that every training with a Run has, so that a script's own parts have others.
PARTS_OF_RUN = ("model", "optimizer", "lr_scheduler", "early_stopping")


@dataclass
class Checkpoint:
    """The content of one file. All of it is tensors, numbers, texts, and lists or dictionaries of them."""

    epoch: int  # the epoch to go on with, counted from 1
    partial_epoch: dict[str, object] | None  # the fields of PartialEpoch, if it was saved within that epoch
    # The state_dict of each part by its name: the network without wrappers, the optimizer, the lr_scheduler,
    # and what else the script keeps. A network that is split over the ranks is whole in it.
    parts: dict[str, dict[str, object]]
    # Whether the states of network and optimizer are those of Sharded, by the names of the weights.
    sharded: bool
    # What the script keeps for each rank, as bytes of torch.save.
    per_rank_state: list[torch.Tensor] | None
    # The states of the generators of each rank.
    rng_states: list[list[torch.Tensor]]
    # What makes another training: see Checkpointer._describe_training.
    training: dict[str, object]
    # What the record of the next start has to know of this one's; empty without a record.
    record: dict[str, object]
    version: int = VERSION


class Newest(NamedTuple):
    """The newest checkpoint that can be read, and its file."""

    path: Path
    checkpoint: Checkpoint


class Checkpointer:
    """The checkpoints of one training, in `--checkpoint-dir`; without that option nothing is saved.

        checkpointer = Checkpointer(opts, dataset="digits", model=model, parts={"optimizer": optimizer})
        checkpointer.resume()
        for epoch in checkpointer.epochs():
            ...  # train
            checkpointer.save(epoch + 1)
        checkpointer.finish()

    Every rank creates one after the process group, and calls its methods at the same points.

    Args:
        options: what shapes the training is compared at a resume; the others say where checkpoints are, when
            one is due, and how many epochs there are.
        dataset: its name; a checkpoint of another data set is refused.
        model: the network, wrapped or not.
        parts: what else is saved, by name: the optimizer and others with a state_dict and load_state_dict.
        record: the record of the training, which only rank 0 has.
        sharded: the network and optimizer, if they are split over the ranks.
        per_rank_state: what differs by rank, by name: each rank gets its own back.

    Raises:
        UserError: if the folder cannot be written to, or another run saves there.
    """

    def __init__(
        self,
        options: Options,
        *,
        dataset: str,
        model: nn.Module,
        parts: dict[str, object],
        record: RecordWriter | None = None,
        sharded: "Sharded | None" = None,
        per_rank_state: dict[str, object] | None = None,
    ) -> None:
        self._options = options
        self._folder = options.checkpoint_dir
        self._record = record
        # Without the wrappers, so that every stage can load it.
        self._model = unwrapped(model)
        self._sharded = sharded
        self._per_rank_state = per_rank_state or {}
        self._parts = {"model": self._model} | parts
        # Before anything is loaded, as the optimizer and the schedule are now as the script has made them.
        self._training = self._describe_training(dataset)
        if sharded:
            del self._parts["model"], self._parts["optimizer"]
        self._first_epoch = 1
        self._partial_epoch: PartialEpoch | None = None
        self._saved_at = time.monotonic()
        if self._folder:
            process_group.on_rank_0(self._open_folder)

    def resume(self) -> None:
        """With `--resume auto`, go on from the newest checkpoint, if there is one.

        Raises:
            UserError: if no checkpoint can be read, the newest is of another training, or one is there and
                `--resume` was not given.
        """
        if self._folder:
            process_group.on_rank_0(self._refuse_checkpoints_of_an_earlier_run)
            self._load_newest()

    def epochs(self) -> range:
        """Return the epochs that remain to be trained."""
        return range(self._first_epoch, self._options.epochs + 1)

    def partial_epoch(self, epoch: int) -> PartialEpoch | None:
        """Return the part of `epoch` that an earlier process trained, or None."""
        return self._partial_epoch if epoch == self._first_epoch else None

    def is_due(self) -> bool:
        """Return whether --checkpoint-minutes are over since the last one; False on all ranks but 0."""
        if not (self._folder and process_group.is_rank_0()):
            return False
        return time.monotonic() - self._saved_at > 60 * self._options.checkpoint_minutes

    def save(self, epoch: int, partial_epoch: PartialEpoch | None = None) -> None:
        """Save the state before `epoch`, or within it after the steps of `partial_epoch`.

        Raises:
            UserError: if the weights are not finite, or the file cannot be written; earlier checkpoints
                are kept.
        """
        if not self._folder:
            return
        # What `epochs`, `finish` and `stop` go by from now on.
        self._first_epoch = epoch
        self._partial_epoch = partial_epoch
        self._check_finite()
        # What all ranks have to give; rank 0 has the rest, and writes the file.
        rng_states = process_group.gather(random_states())
        per_rank_state = process_group.gather(self._packed_per_rank_state()) if self._per_rank_state else None
        of_sharded = self._sharded.state_dict() if self._sharded else {}
        process_group.on_rank_0(
            lambda: self._write(of_sharded, per_rank_state=per_rank_state, rng_states=rng_states)
        )
        self._saved_at = time.monotonic()

    def stop(self) -> NoReturn:
        """End the training on all ranks after a `save`, so that a later start goes on from it.

        Raises:
            Stopped: on every rank.
            UserError: if the note for slurm/job_env.sh cannot be written.
        """
        text = f"stopped after {self._where()} by a signal; --resume auto goes on from {self._folder}"
        process_group.on_rank_0(lambda: report_stop(text, self._folder))
        # After rank 0 has saved: a rank that left earlier would end the whole job step.
        process_group.destroy_distributed()
        raise Stopped(text)

    def finish(self, ended_early: bool = False) -> None:
        """Remove the checkpoints in a job's own folder, which are not needed after the end.

        Args:
            ended_early: no further epoch will be trained, though there would be one.
        """
        job = job_folder.here()
        is_over = ended_early or not self.epochs()
        if not (is_over and self._folder and job and process_group.is_rank_0()):
            return
        if self._folder.resolve().is_relative_to(job.resolve()):
            with suppress(OSError):  # the run went well
                for path in _checkpoints(self._folder):
                    path.unlink(missing_ok=True)
                (self._folder / LOCK).unlink(missing_ok=True)
                self._folder.rmdir()

    # --- saving -------------------------------------------------------------------------------------

    def _where(self) -> str:
        """Say what is done: before the first step of an epoch, that is the epoch before it."""
        if self._partial_epoch:
            return f"step {self._partial_epoch.steps} of epoch {self._first_epoch}"
        return f"epoch {self._first_epoch - 1}"

    def _check_finite(self) -> None:
        trained = [weights for weights in self._model.parameters() if weights.requires_grad]
        is_finite = all(weights.isfinite().all() for weights in trained)
        if not all(process_group.gather(is_finite)):
            raise diverged(f"the weights are no longer numbers after {self._where()}")

    def _packed_per_rank_state(self) -> torch.Tensor:
        """Return this rank's own state as bytes, as its tensors may be on a device that rank 0 has not."""
        content = io.BytesIO()
        write({name: part.state_dict() for name, part in self._per_rank_state.items()}, content)
        return torch.frombuffer(content.getbuffer(), dtype=torch.uint8)

    def _write(
        self,
        of_sharded: dict[str, dict],
        *,
        per_rank_state: list[torch.Tensor] | None,
        rng_states: list[list[torch.Tensor]],
    ) -> None:
        """Write a checkpoint, on rank 0, and remove those that are no longer needed."""
        partial_epoch = self._partial_epoch
        checkpoint = Checkpoint(
            epoch=self._first_epoch,
            partial_epoch=vars(partial_epoch) if partial_epoch else None,
            parts=of_sharded | {name: part.state_dict() for name, part in self._parts.items()},
            sharded=self._sharded is not None,
            per_rank_state=per_rank_state,
            rng_states=rng_states,
            training=self._training,
            record=self._record.state_dict() if self._record else {},
        )
        refuse_shares(checkpoint.parts)
        step = partial_epoch.steps if partial_epoch else 0
        path = self._folder / f"epoch-{self._first_epoch}-step-{step}.pt"
        advice = "free the space or give another --checkpoint-dir. Earlier checkpoints and results are kept."
        save("the checkpoint", vars(checkpoint), path, advice)
        with explained(f"old checkpoints in {self._folder} cannot be removed", "mend its permissions."):
            for old in _checkpoints(self._folder)[:-CHECKPOINTS_KEPT]:
                old.unlink()

    def _open_folder(self) -> None:
        fix = "give another --checkpoint-dir."
        check_writable(self._folder, "checkpoints", fix)
        held = f"another run saves its checkpoints in {self._folder}: wait for its end, or {fix}"
        self._lock = locked(self._folder / LOCK, held)
        for leftover in self._folder.glob(".epoch-*-step-*.pt.*.tmp"):  # of a process that was killed
            leftover.unlink(missing_ok=True)

    # --- resuming -----------------------------------------------------------------------------------

    def _refuse_checkpoints_of_an_earlier_run(self) -> None:
        if _checkpoints(self._folder) and self._options.resume == "never":
            raise UserError(
                f"{self._folder} holds the checkpoints of an earlier run: add --resume auto to go on "
                "with it, or give another --checkpoint-dir."
            )

    def _load_newest(self) -> None:
        # Only one rank reads the file, so that all ranks get the same one; on the others this is None.
        newest = process_group.on_rank_0(self._read_newest)
        # Of these each rank gets its own share, and none but rank 0 has all.
        of_sharded: dict[str, dict] = {"model": {}, "optimizer": {}}
        if newest and self._sharded:
            of_sharded = {name: newest.checkpoint.parts.pop(name) for name in of_sharded}
        newest = process_group.broadcast(newest)
        if newest is None:
            return
        path, checkpoint = newest
        with fitting(path, "give another --checkpoint-dir."):
            load_parts(self._parts, checkpoint.parts)
            if self._sharded:
                self._sharded.load_state_dict(of_sharded)
            self._load_per_rank_state(checkpoint.per_rank_state)
        _set_rng_states(checkpoint.rng_states, self._options.seed + 1000 * checkpoint.epoch)
        self._first_epoch = checkpoint.epoch
        self._partial_epoch = PartialEpoch(**checkpoint.partial_epoch) if checkpoint.partial_epoch else None
        process_group.on_rank_0(lambda: self._resume_record(checkpoint.record))
        process_group.on_rank_0(lambda: print_line(f"resumed from {path}"))

    def _resume_record(self, state: dict[str, object]) -> None:
        if self._record and state:
            self._record.load_state_dict(state)

    def _read_newest(self) -> Newest | None:
        """Return the newest checkpoint that can be read, if it is of this training; on rank 0."""
        newest = _newest(self._folder)
        if newest:
            self._check_training(newest.path, newest.checkpoint)
        return newest

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

    # --- which training it is -----------------------------------------------------------------------

    def _describe_training(self, dataset: str) -> dict[str, object]:
        """Return what makes another training: options, data, the network, optimizers and schedules."""
        training = self._options.shaping() | {"dataset": dataset, "model": class_name(self._model)}
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer):
                training[name] = identity.of_optimizer(part, sharded=self._sharded is not None)
            elif isinstance(part, LRScheduler):
                training[name] = type(part).__name__
        return training

    def _check_training(self, path: Path, checkpoint: Checkpoint) -> None:
        """Raise a UserError if a checkpoint is of another training than this one."""
        if checkpoint.sharded != (self._sharded is not None):
            how = "split" if checkpoint.sharded else "not split"
            raise UserError(f"the network of {path} is {how} over ranks: give another --checkpoint-dir.")
        saved = checkpoint.training
        differ = []
        for name in self._training | saved:
            if self._training.get(name) != saved.get(name):
                value = "not given" if saved.get(name) is None else saved[name]
                differ.append(f"{self._in_words(name)} {value}")
        if differ:
            raise UserError(
                f"{path} was made with {', '.join(differ)}: give the same, or another --checkpoint-dir."
            )

    def _in_words(self, name: str) -> str:
        is_option = name in self._options.shaping()
        return f"--{name.replace('_', '-')}" if is_option else f"the {name}"


def _newest(folder: Path) -> Newest | None:
    """Return the newest readable checkpoint; name damaged ones and set them aside.

    Raises:
        UserError: if there are checkpoints, and none can be read; or if it is of another version.
    """
    paths = _checkpoints(folder)
    damaged = []
    for path in reversed(paths):
        try:
            state = load_verified(path)
        except Exception as error:  # PyTorch raises many kinds for a damaged file
            if not damaged:
                print_line(f"warning: the checkpoint {path} cannot be read ({first_line(error)})", sys.stderr)
            damaged.append(path)
            continue
        for broken in damaged:  # otherwise it would count as the newest when old ones are removed
            broken.replace(broken.with_suffix(".damaged"))
        version = state.get("version")
        if version != VERSION:
            raise UserError(
                f"{path} has version {version}, and this program reads {VERSION}: give another "
                "--checkpoint-dir."
            )
        return Newest(path, Checkpoint(**state))
    if paths:
        raise UserError(f"no checkpoint in {folder} can be read: give another --checkpoint-dir.")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in `folder`, oldest first; no other file has such a name."""
    by_age = []
    for path in folder.iterdir():
        name = NAME.fullmatch(path.name)
        if name:
            epoch, step = int(name[1]), int(name[2])
            by_age.append((epoch, step, path))
    return [path for _, _, path in sorted(by_age)]


def _set_rng_states(of_all_ranks: list[list[torch.Tensor]], seed: int) -> None:
    """Restore this rank's generators; seed new ones if the ranks or GPUs were others when they were saved."""
    rank = process_group.rank()
    ranks = process_group.count()
    if len(of_all_ranks) == ranks and set_random_states(of_all_ranks[rank]):
        return
    torch.manual_seed(seed + rank)
    if ranks == 1:  # DataParallel's GPUs all belong to one process
        seed_gpus(seed)


def report_stop(text: str, folder: Path) -> None:
    """Print that the run has stopped, and have slurm/job_env.sh put its job back into the queue.

    Raises:
        UserError: if the note for slurm/job_env.sh cannot be written.
    """
    print_line(text)
    problem = f"{text}, but not by itself, as {job_folder.here()} cannot be written to"
    with explained(problem, f"submit it again, to go on from {folder.absolute()}."):
        job_folder.note_stop(folder)
