"""Compares the learner's split layers with the whole ones in two ranks, and counts what travels."""

from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from trainkit.workshop.ranks import in_ranks
from trainkit.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# How many all-reduces do the two layers need in a training step, forward and backward together?
prediction = 2
# A block of GPT-2: width 768, hidden 3072, 16 windows of 1024 tokens, 4 bytes for each number.
# MB of the tensors that are all-reduced in one step: by tensor parallelism, for the two layers
tensor_parallel = 100.7
# and by DDP, for the gradients of these two layers
ddp = 18.9
"""
HINTS = """\
## 1

GELU works on each hidden number separately. So a rank can compute its part of the hidden numbers from `up` to
`down`, and needs nothing from the other ranks in between. Which part of each weight does it need?

## 2

The weight of a linear layer has the shape (outputs, inputs), so `up` is cut along dimension 0, and `down`
along dimension 1. What `down` then returns is a part of a sum. As x goes into every rank's `up`, the gradient
of x is also a sum. Each sum is a `dist.all_reduce`, on a copy.

## 3

`tensor = tensor.clone()`, `dist.all_reduce(tensor)`, `return tensor` in `Leave.forward` and in
`Enter.backward`. PyTorch calls the first cut `ColwiseParallel`, as x is multiplied by the transposed
weight, and the second `RowwiseParallel`. What travels is as large as x, twice.
"""
SOLUTION = {
    "split.py": """\
@@
-    mine = Layers(width, hidden)
-    mine.up.weight.data = layers.up.weight.data  # all of it: where to cut?
-    mine.down.weight.data = layers.down.weight.data
+    mine = Layers(width, hidden // size)
+    mine.up.weight.data = layers.up.weight.data.chunk(size, dim=0)[rank].clone()
+    mine.down.weight.data = layers.down.weight.data.chunk(size, dim=1)[rank].clone()
@@
-        return gradient  # what is missing?
+        gradient = gradient.clone()
+        dist.all_reduce(gradient)
+        return gradient
@@
-        return part.view_as(part)  # what is missing?
+        part = part.clone()
+        dist.all_reduce(part)
+        return part
@@
-    plan = {}  # for each of "up" and "down": parallel.ColwiseParallel() or parallel.RowwiseParallel()
+    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
""",
}
STARTS_WITH = "`prediction`"
PLAN = '{"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}'
SCRIPT = "split.py"
SUM = "        dist.all_reduce(part)\n"
END = "return gradient\n\n\ndef"
WRONG = [
    (SCRIPT, "data.chunk(size, dim=0)[rank]", "data", "`up` has the shape (12, 4)"),
    (SCRIPT, "chunk(size, dim=1)[rank]", "chunk(size, dim=1)[0]", "Rank 1 has the wrong part"),
    (SCRIPT, SUM, "", "only a part of the sum"),
    (SCRIPT, SUM, SUM + "        part /= dist.get_world_size()\n", "not averaged"),
    (SCRIPT, "        dist.all_reduce(gradient)\n", "", "gradient of x"),
    (SCRIPT, END, END.replace("return", "return dist.all_reduce(gradient) or"), "2.00 times"),
    (SCRIPT, PLAN, "{}", "PyTorch has not split `up`"),
    (SCRIPT, PLAN, '{"up": parallel.ColwiseParallel()}', "do not fit together"),
    ("answers.txt", "tensor_parallel = 100.7", "tensor_parallel = 50.3", "backward pass has"),
    ("answers.txt", "tensor_parallel = 100.7", "tensor_parallel = 201.3", "GELU"),
    ("answers.txt", "ddp = 18.9", "ddp = 9.4", "two layers"),
]  # fmt: skip
WIDTH = 4
HIDDEN = 12
SIZE = 2
NUMBERS = 6
CUT = {"up": 0, "down": 1}


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    program = workspace.module(SCRIPT)
    for rank, seen in enumerate(in_ranks(lambda rank, size: behave(program, rank, size), SIZE)):
        judge(rank, seen)
    once = 16 * 1024 * 768 * 4 / 1e6
    weights = 2 * 768 * 3072 * 4 / 1e6
    answer = answers.number("tensor_parallel")
    if not is_close(answer, 2 * once):
        hints = {
            once: "the backward pass has an all-reduce as well",
            4 * once: "no all-reduce is needed before the GELU",
        }
        hint = next(
            (hint for wrong, hint in hints.items() if is_close(answer, wrong)),
            "each all-reduce is as large as x, which has `width` numbers for each token",
        )
        raise Wrong(f"`tensor_parallel` is not {answer:g} MB: {hint}.")
    answer = answers.number("ddp")
    if not is_close(answer, weights):
        raise Wrong(
            f"`ddp` is not {answer:g} MB: there are two layers of 768 x 3072 gradients, 4 bytes each."
        )
    return (
        f"There are two all-reduces, each as large as x (you predicted {prediction:g} all-reduces): "
        f"{2 * once:.0f} MB for this block, and {weights:.0f} MB with DDP. The traffic of DDP is as large as "
        "the weights, for any batch, and hides behind the backward pass. The traffic of tensor parallelism "
        "grows with the batch, and the next layer waits for it. So keep it within a node, on NVLink. In "
        "return, each of N GPUs keeps only 1 / N of the weights and of the hidden numbers."
    )


def behave(program: ModuleType, rank: int, size: int) -> dict[str, object]:
    """Return what whole and split layers do in this rank, and the bytes of the learner's all-reduces."""
    torch.manual_seed(1)
    layers = program.Layers(WIDTH, HIDDEN)
    x = torch.randn(NUMBERS, WIDTH, requires_grad=True)
    reduce = dist.all_reduce
    travelled = []

    def counted(tensor: torch.Tensor, *arguments: object, **how: object) -> object:
        travelled.append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *arguments, **how)

    seen = {"whole": run(layers, lambda: layers(x), x), "bytes": travelled}
    shard = program.shard(layers, rank, size)
    for name, dim in CUT.items():
        judge_shard(
            name, rank, getattr(shard, name).weight, getattr(layers, name).weight.chunk(size, dim)[rank]
        )
        gradient = getattr(layers, name).weight.grad
        seen["whole"][name] = gradient.chunk(size, dim)[rank].tolist()
    with patch.object(dist, "all_reduce", counted):
        seen["by hand"] = run(shard, lambda: program.by_hand(shard, x), x)
    split = program.by_pytorch(layers, size)
    try:
        return seen | {"by PyTorch": run(split, lambda: split(x), x)}
    except RuntimeError as error:
        raise Wrong(
            f"The two parts of the plan in `by_pytorch` do not fit together ({error}): the input of `down` "
            "has to be what `up` leaves on each rank."
        ) from None


def run(layers: nn.Module, forward: object, x: torch.Tensor) -> dict[str, object]:
    """Return the result, and the gradients of x and of what this rank has of the weights."""
    layers.zero_grad()
    x.grad = None
    result = forward()
    result.square().mean().backward()
    gradients = {name: getattr(layers, name).weight.grad for name in CUT}
    whole_gradients = {
        name: getattr(grad, "to_local", lambda grad=grad: grad)() for name, grad in gradients.items()
    }
    tensors = {"result": result, "x": x.grad, **whole_gradients}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def judge_shard(name: str, rank: int, of_rank: torch.Tensor, of_whole: torch.Tensor) -> None:
    if of_rank.shape != of_whole.shape:
        raise Wrong(
            f"On each of two ranks, `{name}` has the shape {tuple(of_rank.shape)}. With half of the hidden "
            f"numbers it would be {tuple(of_whole.shape)}."
        )
    if not of_rank.equal(of_whole):
        raise Wrong(
            f"Rank {rank} has the wrong part of `{name}`: give the parts out in the order of the ranks."
        )


def judge(rank: int, seen: dict[str, object]) -> None:
    for way in ("by hand", "by PyTorch"):
        for name, whole in seen["whole"].items():
            of_whole = torch.tensor(whole)
            of_rank = torch.tensor(seen[way][name])
            if of_rank.shape != of_whole.shape:
                raise Wrong(f"PyTorch has not split `{name}` as you have: see the plan in `by_pytorch`.")
            if torch.allclose(of_rank, of_whole, rtol=1e-4, atol=1e-7):
                continue
            factor = ((of_rank * of_whole).sum() / of_whole.square().sum()).item()
            if name == "result":
                mean = torch.allclose(SIZE * of_rank, of_whole, rtol=1e-4, atol=1e-7)
                reason = (
                    "the parts have to be summed, not averaged" if mean else "it is only a part of the sum"
                )
                raise Wrong(f"{way}: the result on rank {rank} is not that of the whole layers: {reason}.")
            reason = "x" if name == "x" else f"the weights of `{name}`"
            raise Wrong(
                f"{way}: on rank {rank}, the gradient of {reason} is not that of the whole layers, but about "
                f"{factor:.2f} times that. Which sums does the backward pass need, and which does it not "
                "need?"
            )
    if seen["bytes"] != [NUMBERS * WIDTH * 4] * 2:
        raise Wrong(f"The all-reduces carry {seen['bytes']} bytes: you need two, each as large as x.")
