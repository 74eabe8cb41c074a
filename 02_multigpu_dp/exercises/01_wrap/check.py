"""Saves a network that the learner has not seen with the learner's functions, and loads it."""

import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from trainkit.workshop.work import Workspace, Wrong

ANSWERS = """\
# Before you change anything: what will the first name in state_dict() of the wrapped network be?
prediction = module.hidden.weight

# The model is wrapped, and there are four GPUs. Between two steps,
weights_on = first       # first or all: which GPUs hold the weights that the next step begins with?
optimizer_state_on = first   # first or all: which GPUs hold what Adam stores for every weight?

# guess() is a method of Net. Which GPUs compute in these calls: all, first (only the first GPU), or error?
model_guess = error      # model.guess(images)
module_guess = first     # model.module.guess(images)
"""
HINTS = """\
## 1

`print(model)` after wrapping, and look at the names in `model.state_dict()`. Where is the network
that you gave to `nn.DataParallel`? And what does `load_state_dict` return with `strict=False`?

## 2

The wrapper keeps the network as `model.module`, so every name begins with `module.`. Do not cut
names: ask the right object for its `state_dict()`. A strict `load_state_dict` raises an error if
the names do not fit.

## 3

`return nn.DataParallel(model)`, `torch.save(model.module.state_dict(), path)`, and no
`strict=False`. All GPUs except the first get copies of the weights for one step, and discard them.
Only `model(...)` is split over the GPUs: the wrapper has no `guess`, and `model.module` is the plain
network.
"""
SOLUTION = {
    "wrap.py": '''\
@@
-"""Train on all GPUs of a node, save the network, and load it into a plain one. Three things are wrong."""
+"""Train on all GPUs of a node, save the network, and load it into a plain one."""
@@
-    return model  # nothing is wrapped yet
+    return nn.DataParallel(model)
@@
-    torch.save(model.state_dict(), path)
+    torch.save(model.module.state_dict(), path)
@@
-    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), strict=False)
+    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
''',
}
STARTS_WITH = "`prediction`"
WRONG = [
    ("wrap.py", "nn.DataParallel(model)", "model", "still returns a plain"),
    ("wrap.py", "model.module.state_dict()", "model.state_dict()", "begin with `module.`"),
    (
        "wrap.py",
        "model.module.state_dict()",
        '{name.replace("module.", ""): weights for name, weights in model.state_dict().items()}',
        "cuts every",
    ),
    ("wrap.py", "model.module.state_dict()", "model.module", "the network itself"),
    ("wrap.py", "=True))", "=True), strict=False)", "silently loads nothing"),
    ("answers.txt", "weights_on = first", "weights_on = all", "copies for one step"),
    ("answers.txt", "optimizer_state_on = first", "optimizer_state_on = all", "made with model.parameters()"),
    ("answers.txt", "model_guess = error", "model_guess = first", "Try both calls"),
    ("answers.txt", "module_guess = first", "module_guess = all", "plain network"),
]


def other() -> nn.Module:
    """Make a different network, with parts called `module` and `submodule`."""
    return nn.Sequential(OrderedDict(module=nn.Linear(2, 3), submodule=nn.BatchNorm1d(3)))


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    program = workspace.module("wrap.py")
    network = other()
    wrapped = program.wrap(network)
    if not isinstance(wrapped, nn.DataParallel):
        raise Wrong(f"`wrap` still returns a plain {type(wrapped).__name__}, without a wrapper.")
    if wrapped.module is not network:
        raise Wrong("`wrap` has to wrap the network that it is given, and only once.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        program.save(wrapped, path)
        _look_into(path, network)
        loaded = other()
        program.load(loaded, path)
        if any((loaded.state_dict()[name] != kept).any() for name, kept in network.state_dict().items()):
            raise Wrong(
                "After `load`, the plain network has different weights from the network that was saved."
            )
        torch.save({"nothing.that.fits": torch.zeros(1)}, path)
        try:
            program.load(loaded, path)
        except RuntimeError:
            pass
        else:
            raise Wrong(
                "`load` accepts a file whose names do not fit: with strict=False it silently loads nothing, "
                "and the network keeps its random weights."
            )
    return _judge(answers)


def _look_into(path: Path, network: nn.Module) -> None:
    try:
        saved = set(torch.load(path, weights_only=True))
    except FileNotFoundError:
        raise Wrong("`save` wrote no file to the path that it was given.") from None
    except Exception:
        raise Wrong(
            "The file holds the network itself, not only its weights. Whoever loads it needs the same class "
            "in the same module. Save a state_dict()."
        ) from None
    names = set(network.state_dict())
    if saved == {f"module.{name}" for name in names}:
        raise Wrong(
            "All names in the file begin with `module.`, which comes from the wrapper: the plain network has "
            "no such names. Which object's state_dict() is that?"
        )
    if saved != names:
        raise Wrong(
            "A network with parts called `module` and `submodule` came back with "
            f"{sorted(saved - names)[0]!r} instead of {sorted(names - saved)[0]!r}: `save` cuts every "
            "`module.` out of the names. You need not cut anything."
        )


def _judge(answers: dict[str, str]) -> str:
    if answers.word("weights_on", "first", "all") == "all":
        raise Wrong(
            "`weights_on`: the other GPUs hold copies for one step, and get new ones for the next. What does "
            "wrap.py print about the parameters?"
        )
    if answers.word("optimizer_state_on", "first", "all") == "all":
        raise Wrong(
            "`optimizer_state_on`: the optimizer was made with model.parameters(). It stores its state on "
            "the device of each parameter, and knows nothing of the copies."
        )
    if answers.word("model_guess", "all", "first", "error") != "error":
        raise Wrong(
            "`model_guess`: the wrapper is a DataParallel, not a Net. Try both calls at the end of main()."
        )
    if answers.word("module_guess", "all", "first", "error") != "first":
        raise Wrong(
            "`module_guess`: model.module is the plain network on the first GPU. Only model(...) goes "
            "through the wrapper, which splits the images."
        )
    as_predicted = "as" if answers["prediction"] == "module.hidden.weight" else "not as"
    return (
        f"The wrapper's first name is module.hidden.weight, {as_predicted} you predicted. Saved from "
        "model.module, the weights load into the plain network everywhere; --save-model does the same "
        "(trainkit/training/model.py, `unwrapped`). Only the first GPU keeps the weights and the optimizer's "
        "state, so it needs more memory than the others. DDP also puts `module.` before the names."
    )
