"""Counts the all-reduces of the learner's step in two ranks, and compares with the whole batch."""

from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.workshop.ranks import in_ranks
from trainkit.workshop.work import Workspace, Wrong

ANSWERS = """\
# Before you run the starter: how many times does it average the gradients in one step of 4 parts?
prediction = 4
"""
HINTS = """\
## 1

Print `model.module.weight.grad.norm()` after each `backward`. With one part and with four, which
two numbers should be equal, and by what factor do they differ?

## 2

The mean over 64 images is the mean of the 4 means over 16, not their sum. And the ranks have to average their
gradients only once, when those of all parts are added up. After which of the 4 backward passes is that?

## 3

Loop with `for part, (inputs, targets) in enumerate(..., start=1):`. In the loop, put
`with model.no_sync() if part < parts else nullcontext():` around both the call of the model and `backward`,
and divide the loss by `parts`. `zero_grad` stays before the loop.
"""
SOLUTION = {
    "accumulate.py": '''\
@@
-"""A batch in micro-batches with DistributedDataParallel. The function `step` has two mistakes.
+"""A batch in micro-batches with DistributedDataParallel.
@@
 Try: torchrun --standalone --nproc-per-node=2 exercises/11_no_sync/mine/accumulate.py
 """
+
+from contextlib import nullcontext
@@
-    for inputs, targets in zip(images.chunk(parts), labels.chunk(parts), strict=True):
-        loss = F.cross_entropy(model(inputs), targets)
-        loss.backward()
+    micro_batches = zip(images.chunk(parts), labels.chunk(parts), strict=True)
+    for part, (inputs, targets) in enumerate(micro_batches, start=1):
+        with model.no_sync() if part < parts else nullcontext():
+            loss = F.cross_entropy(model(inputs), targets) / parts
+            loss.backward()
''',
}
STARTS_WITH = "`prediction`"
STALE = 8
SCRIPT = "accumulate.py"
PARTS = 4
PLACE = "with model.no_sync() if part < parts else nullcontext():"
LOSS = "loss = F.cross_entropy(model(inputs), targets) / parts\n"
WRONG = [
    (SCRIPT, PLACE, "with nullcontext():", "the gradients 4 times"),
    (SCRIPT, PLACE + "\n            " + LOSS, LOSS + "        " + PLACE + "\n", "the forward pass"),
    (SCRIPT, PLACE, "with model.no_sync():", "not average the gradients at all"),
    (SCRIPT, "part < parts", "part > 1", "left out of the all-reduce"),
    (SCRIPT, ") / parts", ")", "4.00 times that"),
    (SCRIPT, ") / parts", ") / parts / dist.get_world_size()", "0.50 times that"),
    (SCRIPT, PLACE, "optimizer.zero_grad()\n        " + PLACE, "only the last part"),
    (SCRIPT, "    optimizer.zero_grad()\n", "", "the step before"),
    (SCRIPT, "loss.backward()\n", "loss.backward()\n        optimizer.step()\n", "only one step"),
]  # fmt: skip


class Optimizer:
    """Changes nothing, and notes the gradient of each step and how often it was set to zero before."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.zeroed = 0
        self.gradients = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        self.model.zero_grad(set_to_none)

    def step(self) -> None:
        self.gradients.append(self.model.module.weight.grad.flatten().tolist())


def check(workspace: Workspace) -> str:
    prediction = workspace.answers().number("prediction")
    program = workspace.module(SCRIPT)
    text = workspace.text(SCRIPT)
    for parts in (PARTS, 2):
        ranks = in_ranks(partial(behave, program, parts))
        judge(ranks, parts, "no_sync()" in text)
    came = "as you predicted" if prediction == PARTS else f"you predicted {prediction:g}"
    return (
        f"Without no_sync, DDP averages the gradients in every backward pass, {PARTS} times in a step "
        f"({came}). Now it averages them once, and the step equals that with the whole batch. How much time "
        "this saves depends on how long an all-reduce takes, compared with a part: "
        "03_multigpu_ddp/beyond/README.md has measurements on two CPU workers."
    )


def behave(program: ModuleType, parts: int, rank: int, size: int) -> dict[str, object]:
    """Take one step of the learner's in this rank."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(3, 2))
    all_reduces = program.count_all_reduces(model)
    optimizer = Optimizer(model)
    images = torch.randn(8 * size, 3)[rank::size]
    labels = torch.randint(2, (8 * size,))[rank::size]
    of_whole_shard = torch.autograd.grad(F.cross_entropy(model.module(images), labels), model.module.weight)[
        0
    ]
    for weights in model.parameters():
        weights.grad = torch.full_like(weights, STALE)  # of a step before
    program.step(model, optimizer, (images, labels), parts)
    return {
        "all_reduces": len(all_reduces),
        "zeroed": optimizer.zeroed,
        "gradients": optimizer.gradients,
        "own": of_whole_shard.flatten().tolist(),
    }


def judge(ranks: list[dict[str, object]], parts: int, forgot_forward: bool) -> None:
    seen = ranks[0]
    if len(seen["gradients"]) != 1:
        raise Wrong(f"The optimizer makes {len(seen['gradients'])} steps with one batch. Make only one step.")
    if seen["zeroed"] > 1:
        raise Wrong(
            "The gradients are set to zero between the parts, so the step uses the gradient of only the last "
            "part."
        )
    if seen["all_reduces"] == 0:
        raise Wrong(
            f"In a step of {parts} parts, DDP does not average the gradients at all: each rank makes a "
            "different step, and they drift apart."
        )
    if seen["all_reduces"] > 1:
        advice = " no_sync has to include the forward pass, in which DDP decides." if forgot_forward else ""
        raise Wrong(
            f"In a step of {parts} parts, DDP averages the gradients {seen['all_reduces']} times. Once is "
            f"enough: the gradients of the parts add up on each rank.{advice}"
        )
    gradient, gradient_of_rank_1 = (torch.tensor(rank["gradients"][0]) for rank in ranks)
    if not torch.allclose(gradient, gradient_of_rank_1, rtol=1e-4, atol=1e-6):
        raise Wrong(
            "The ranks have different gradients after the step: what each rank added later was left out of "
            "the all-reduce. In which part should the all-reduce happen?"
        )
    true = torch.tensor([rank["own"] for rank in ranks]).mean(dim=0)
    if torch.allclose(gradient - STALE, true, rtol=1e-3, atol=1e-4):
        raise Wrong("The gradient still includes that of the step before: set the gradients to zero first.")
    if not torch.allclose(gradient, true, rtol=1e-3, atol=1e-6):
        factor = (gradient @ true / (true @ true)).item()
        raise Wrong(
            f"With {parts} parts, the gradient is {factor:.2f} times that of the whole batch in one part. "
            "How do you get the mean of the whole batch from the means of the parts?"
        )
