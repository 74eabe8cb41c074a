"""What identifies a training, taken from what is at hand: optimizer, schedule, network, script and arguments.

Each but the arguments is a text of words, `name=value` or a name alone, so that a table can show the words in
which two trainings differ (reports/variants.py).
"""

import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from manygpus import frozen_code
from manygpus.distributed import process_group
from manygpus.network.model import unwrapped
from manygpus.network.optim import KERNELS
from manygpus.record.digest import digest, shortened

LONGEST_TEXT_CHARACTERS = 2_000  # of what the record holds in one cell
MOST_KINDS = 20  # of modules, that are named in words
# What the state_dict of a schedule of PyTorch's has besides its constants.
OF_A_STEP = {"last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"}
# Under these names a wrapper of PyTorch's has the module itself; network/model.py knows the others.
WRAPPED = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def base_lr(optimizer: torch.optim.Optimizer, group: int = 0) -> float:
    """Return the learning rate of a group of weights before any schedule; NaN if it finds its own."""
    settings = optimizer.param_groups[group]
    # One that has made steps may follow a schedule that is no object of PyTorch's.
    current_lr = optimizer.defaults.get("lr") if optimizer.state else settings.get("lr")
    lr = settings.get("initial_lr", current_lr)
    return math.nan if lr is None else float(lr)


def of_optimizer(optimizer: torch.optim.Optimizer, sharded: bool = False) -> str:
    """Describe an optimizer without its learning rate, as `SGD momentum=0.9 dampening=0 weight_decay=0`.

    What differs between its groups of weights is listed in their order, as `weight_decay=0.1|0`, and the
    learning rates by their ratio to the first, as `lr=x1|x0.1`.

    Args:
        sharded: each rank has some of the weights, so that their number is not told.
    """
    groups = optimizer.param_groups
    # OneCycleLR and CyclicLR change these in every step.
    cycled = {"momentum", "betas"} if any("max_momentum" in group for group in groups) else set()
    # AdamW is Adam with this one, and lists it from PyTorch 2.7 on.
    implied = {"decoupled_weight_decay"} if isinstance(optimizer, torch.optim.AdamW) else set()
    said = {}
    for name, default in optimizer.defaults.items():
        if name not in KERNELS | implied | {"lr"}:
            values = [default if name in cycled else group.get(name, default) for group in groups]
            said[name] = _of_groups(values)
    rates = [base_lr(optimizer, number) for number in range(len(groups))]
    if len(set(rates)) > 1:
        said["lr"] = _of_groups([f"x{rate / rates[0] if rates[0] else rate:.4g}" for rate in rates])
    if len(groups) > 1 and not sharded:
        said["tensors"] = shortened("|".join(str(len(group["params"])) for group in groups))
    return shortened(" ".join([type(optimizer).__name__, *_words(said)]), LONGEST_TEXT_CHARACTERS)


def of_lr_scheduler(lr_scheduler: object) -> str:
    """Describe an lr_scheduler by class and constants, as `StepLR step_size=30 gamma=0.1`."""
    lr_scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)  # Accelerate wraps it
    if lr_scheduler is None:
        return ""
    state = lr_scheduler.state_dict() if hasattr(lr_scheduler, "state_dict") else {}
    constants = {
        name: value if value is True else _word(value)
        for name, value in state.items()
        if not name.startswith("_") and name not in OF_A_STEP and value is not None and value is not False
    }
    described = [" ".join([type(lr_scheduler).__name__, *_words(constants)])]
    described += [of_lr_scheduler(chained) for chained in getattr(lr_scheduler, "_schedulers", ())]
    return shortened(" + ".join(described), LONGEST_TEXT_CHARACTERS)


def of_network(networks: Mapping[str, nn.Module], sharded: bool = False) -> str:
    """Describe networks by the kinds of their layers and a digest of their structure, as `Linear=2 Tanh=1`.

    Args:
        sharded: each rank has some of the layers, under names that no other rank has.
    """
    modules = {}
    for name, network in networks.items():
        for path, module in _layers(network, name, set()):
            settings = re.sub(" at 0x[0-9a-f]+", "", module.extra_repr())  # the address of a function
            is_layer = not module._modules
            modules[path] = _kind(module), settings, is_layer
    if sharded:
        modules_by_rank = process_group.gather(modules)
        modules = {path: module for rank_modules in modules_by_rank for path, module in rank_modules.items()}
    kinds = Counter(kind for kind, _, is_layer in modules.values() if is_layer)
    words = [f"{kind}={count}" for kind, count in sorted(kinds.most_common(MOST_KINDS))]
    structure = digest(repr(sorted(modules.items())).encode())
    return shortened(" ".join([*words, f"structure={structure}"]), LONGEST_TEXT_CHARACTERS)


def of_script() -> str:
    """Return the name of the running script and a digest of its text; "" in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file:
        with suppress(OSError):
            return f"{Path(file).name[:100]} {digest(Path(file).read_bytes())}"
    return ""


def of_arguments() -> str:
    """Return the arguments of the running script, as on a command line; "" in a notebook.

    Those that name a file in the job's frozen code are as its user has typed them: each job has another copy.
    """
    code = frozen_code.running()
    words = [code.as_typed(word) for word in sys.argv[1:]] if code else sys.argv[1:]
    return shortened(shlex.join(words), LONGEST_TEXT_CHARACTERS) if of_script() else ""


def _layers(network: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of a network once, with its path, and without those that only wrap another one."""
    network = unwrapped(network)
    wrapped = WRAPPED & network._modules.keys()
    if wrapped:
        yield from _layers(network._modules[min(wrapped)], path, seen)
    elif network not in seen:
        seen.add(network)
        yield path, network
        for name, child in network.named_children():
            yield from _layers(child, f"{path}.{name}", seen)


def _kind(module: nn.Module) -> str:
    # On several devices it is SyncBatchNorm, which makes it the same training as on one.
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "BatchNorm"
    return type(module).__name__.removeprefix("FSDP")


def _of_groups(values: Sequence[object]) -> object:
    """Return the value that all groups have, or one word for all."""
    words = [_word(value) for value in values]
    if len(set(words)) > 1:
        return shortened("|".join(words))
    return values[0] if values[0] is None or isinstance(values[0], bool) else words[0]


def _words(said: Mapping[str, object]) -> list[str]:
    said = {name: value for name, value in said.items() if value is not None and value is not False}
    return [name if value is True else f"{name}={value}" for name, value in said.items()]


def _word(value: object) -> str:
    """Return a value without spaces, and without the address of an object."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, Counter):  # the milestones of MultiStepLR
        value = sorted(value.elements())
    if isinstance(value, (list, tuple)):
        return shortened(",".join(map(_word, value)))
    if isinstance(value, (bool, type(None))):
        return str(value)
    if isinstance(value, (int, float)):
        return f"{value:.6g}"
    if isinstance(value, str):
        return shortened("_".join(value.split()))
    return getattr(value, "__name__", type(value).__name__)
