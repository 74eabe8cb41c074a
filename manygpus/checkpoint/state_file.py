"""States of a training in files: written whole or not at all, and loaded without running anything.

A state is a dictionary of state_dicts and numbers, as torch.save writes it. The checkpoints and the weights
at the end of a run are such files.
"""

import copy
import io
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from manygpus.errors import UserError, first_line, lost_peers, reason
from manygpus.files import replacing
from manygpus.network.optim import KERNELS
from manygpus.network.rank_weights import IF_SHARDED, inner_optimizer, is_sharded, is_zero_optimizer

PLAIN = (type(None), bool, int, float, str, bytes)
DICTIONARIES = (dict, OrderedDict, Counter)  # those that torch.load makes again


def save(what: str, state: dict[str, object], path: Path, advice: str, check: bool = True) -> None:
    """Write `state` to `path`: after a kill or on a full disk `path` has what it had before.

    Args:
        what: what is written, for the error: "the checkpoint".
        advice: what to do after the error, for its text.
        check: refuse what `load_verified` would not load again.

    Raises:
        UserError: "<what> cannot be written to <path> (<reason>): <advice>"; also as `write` does.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "wb") as file:
            write(state, file, check)
    except (OSError, RuntimeError) as error:  # PyTorch raises the second on a full disk
        raise UserError(f"{what} cannot be written to {path} ({reason(error)}): {advice}") from None


def write(state: dict[str, object], file: BinaryIO, check: bool = True) -> None:
    """Write `state` to an open file, as torch.save does; with `check`, refuse what could not be loaded again.

    Raises:
        UserError: if a tensor in `state` is split over the ranks, or it has other than tensors, numbers and
            texts, which could run a program when they are loaded.
    """
    refuse_shards(state)
    torch.save(state, file)
    # PyTorch before 2.6 cannot tell. This reads the names in the file, not its tensors.
    if check and hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        file.seek(0)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(getattr(file, "name", file))
        if unsafe:
            raise UserError(
                f"tensors, numbers and texts can be saved, not all here ({unsafe[0]}): convert them."
            )


def refuse_shards(parts: dict[str, object]) -> None:
    """Check that no state in `parts` has a tensor of which this rank has only a shard.

    Raises:
        UserError: "<name> is split over the ranks, ...". It was split after Checkpointer had looked.
    """
    for name, part in parts.items():
        if any(is_sharded(tensor) for tensor in _tensors(part)):
            raise UserError(f"{name} is split over the ranks, and only a part of it is here: {IF_SHARDED}")


def _tensors(state: object) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for inner in state.values():
            yield from _tensors(inner)
    elif isinstance(state, (list, tuple)):
        for inner in state:
            yield from _tensors(inner)


def load_verified(path: Path) -> dict[str, object]:
    """Return what `save` has written to `path`, in the memory of the CPU.

    Raises:
        ValueError: if the file is damaged, or holds more than tensors and numbers, which could run a program.
            For a file of another kind PyTorch also raises other errors.
    """
    # torch.save writes a zip with a checksum of each tensor, and PyTorch is built not to compare them
    # (MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS in its CMakeLists): a wrong weight would be loaded in silence.
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise ValueError(first_line(error)) from None
    if damaged:
        raise ValueError(f"wrong checksum of {damaged}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # PyTorch's own message advises loading it anyway
        raise ValueError("it holds more than tensors and numbers, and that is never loaded") from None


def checksum(path: Path) -> int:
    """Return a number that is the same for all copies of a file that `save` has written, and for no other."""
    with zipfile.ZipFile(path) as archive:
        return hash(tuple(entry.CRC for entry in archive.infolist()))


@contextmanager
def fitting(path: Path, advice: str) -> Iterator[None]:
    """Turn what is raised for a state of another training into one sentence.

    Raises:
        UserError: "<path> does not fit this training (<reason>): <advice>".
    """
    try:
        yield
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        if lost_peers(error):
            raise
        raise UserError(f"{path} does not fit this training ({first_line(error)}): {advice}") from None


def check_parts(parts: dict[str, object]) -> None:
    """Check that `states_of` can save what each of `parts` will be, and `load_parts` can restore it.

    What an object saves is known only when it is asked for its state.

    Raises:
        UserError: "<name> is a <type>, ...".
    """
    for name, part in parts.items():
        if isinstance(part, (list, dict)):
            storable(_state_of(part), name)
        # A number cannot change: each save would write the first one, in silence.
        elif not isinstance(part, torch.Tensor) and not _has_state(part):
            raise UserError(
                f"{name} is a {type(part).__name__}, and its later values could not be saved: keep it in a "
                "dictionary, a list or a tensor that the loop changes in place, or give it state_dict and "
                "load_state_dict."
            )


def states_of(parts: dict[str, object]) -> dict[str, object]:
    """Return the state_dict of each of `parts`; of a tensor, a list or a dictionary, what is in it.

    Raises:
        UserError: as `storable`.
    """
    return {name: storable(_state_of(part), name) for name, part in parts.items()}


def _has_state(part: object) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _state_of(part: object) -> object:
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if isinstance(part, dict):  # of any class: `load_parts` fills the one that is there
        return dict(part)
    return list(part) if isinstance(part, list) else part


def storable(value: object, place: str) -> object:
    """Return `value` as a file can hold it: NumPy's numbers as Python's, and all else as it is.

    A learning rate from `np.cos` in a LambdaLR is such a number. Files keep no others, as any class in a file
    can run a program.

    Args:
        place: where the value is, for the error: "settings['data']".

    Raises:
        UserError: "<place> is a <type>, ...", if it could not be loaded again.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor) or type(value) in PLAIN:
        return value
    if type(value) in (list, tuple):
        return type(value)(storable(inner, f"{place}[{number}]") for number, inner in enumerate(value))
    if type(value) in DICTIONARIES:
        stored = copy.copy(value)  # with the _metadata of a network
        for key, inner in value.items():
            _check_loads_again(key, f"the key {key!r} of {place}")
            stored[key] = storable(inner, f"{place}[{key!r}]")
        return stored
    _check_loads_again(value, place)
    return value


def _check_loads_again(value: object, place: str) -> None:
    if type(value) in PLAIN:
        return
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception:  # pickle raises many kinds
        raise UserError(
            f"{place} is a {type(value).__name__}, and only tensors, numbers and texts can be saved, and "
            "lists and dictionaries of them: convert it (a path by str, a Namespace by vars, an array by "
            "torch.from_numpy)."
        ) from None


@torch.no_grad()
def load_parts(parts: dict[str, object], state: dict[str, object]) -> None:
    """Load into each of `parts` what `state` has under its name: what `states_of` has returned.

    Raises:
        ValueError: if `state` has other names. For what does not fit, PyTorch also raises other errors.
    """
    for name in parts:
        if name not in state:
            raise ValueError(f"it has no state of {name}")
    for name in state:
        if name not in parts:
            raise ValueError(f"it also has the state of {name}")
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            _load_optimizer(part, state[name])
        elif _has_state(part):
            part.load_state_dict(state[name])
        elif isinstance(part, torch.Tensor) and part.shape != state[name].shape:
            raise ValueError(f"{name} has a different shape")
        else:
            _restored(part, state[name])


def _restored(current: object, saved: object) -> object:
    """Return `saved`, in the tensors, lists and dictionaries of `current` as far as it has them.

    So the loop sees it in its own objects, and a tensor stays on its device. Others are on the CPU.
    """
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        return current.copy_(saved) if current.shape == saved.shape else saved.to(current.device)
    if isinstance(current, list) and isinstance(saved, list):
        current[:] = [_restored(*pair) for pair in zip_longest(current[: len(saved)], saved)]
        return current
    if isinstance(current, dict) and isinstance(saved, dict):
        restored = {key: _restored(current.get(key), value) for key, value in saved.items()}
        current.clear()
        current.update(restored)
        return current
    return saved


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
    """Load the state of an optimizer, which computes with the kernels that this process has chosen for it.

    The checkpoint may come from another stage or device: with DataParallel, for example, older releases of
    PyTorch refuse fused kernels.
    """
    inner = inner_optimizer(optimizer)
    for saved, group in zip(state["param_groups"], inner.param_groups, strict=False):  # PyTorch compares them
        saved.update({name: group[name] for name in KERNELS & group.keys()})
    optimizer.load_state_dict(state)
    _lay_out(inner.optim.state if is_zero_optimizer(inner) else inner.state)


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
