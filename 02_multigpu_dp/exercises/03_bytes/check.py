"""Counts the bytes for other tensors, and for parts of unequal sizes."""

from collections.abc import Callable

import torch

from trainkit.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# Before you count: with four GPUs, the first GPU of DataParallel sends how many times the bytes of a GPU of
# DDP?
prediction = 2

# From the table.
dp_sends = 15.0       # MB that the first GPU of DataParallel sends in a step, with 4 GPUs
ddp_sends = 7.2      # MB that each GPU of DDP sends, with 4 GPUs
nearly_equal = 2   # With how many GPUs do both send nearly the same?
bounded = ddp        # Which of them stays below 10 MB, however many GPUs there are? dp, ddp or both
# MB that each of the other 3 GPUs of DataParallel receives: weights, images, gradients of outputs
each_takes_in = 5.0
# With NCCL, the weights go from GPU to GPU. MB that the first of 4 GPUs sends then: the weights once, the
# slices of the images and of the outputs' gradients as before
nccl_sends = 5.4
"""
HINTS = """\
## 1

Draw four GPUs. From the first, draw an arrow to each of the others for everything that goes out. How
many arrows are there, and what does each carry: all of it, or a slice?

## 2

A tensor has `numel()` numbers of `element_size()` bytes. All the weights go to each of `gpus - 1`
others, and as many gradients come back. Of images and outputs, only (gpus - 1) / gpus travels.
A gradient is as large as the tensor that it belongs to.

## 3

sent = (gpus - 1) * weights + (gpus - 1) / gpus * (images + outputs), where `outputs` stands for
their gradients; taken in = (gpus - 1) * weights + (gpus - 1) / gpus * outputs, where `weights`
stands for their gradients; DDP: 2 * (gpus - 1) / gpus * weights. Take the bytes of each.
"""
SOLUTION = {
    "traffic.py": '''\
@@
-"""The bytes that DataParallel and DDP move in one step. Four gaps `...`."""
+"""The bytes that DataParallel and DDP move in one step."""
@@
 def bytes_of(tensor: torch.Tensor) -> int:
-    return ...
+    return tensor.numel() * tensor.element_size()
@@
 def sent(weights: int, images: int, outputs: int, gpus: int) -> float:
-    return ...
+    return (gpus - 1) * weights + (gpus - 1) / gpus * (images + outputs)
@@
 def taken_in(weights: int, images: int, outputs: int, gpus: int) -> float:
-    return ...
+    return (gpus - 1) * weights + (gpus - 1) / gpus * outputs
@@
     """Return what each GPU of DDP sends and receives."""
-    return ...
+    return 2 * (gpus - 1) / gpus * weights
''',
}
STARTS_WITH = "`prediction`"
WRONG = [
    ("traffic.py", "tensor.numel() * tensor.element_size()", "tensor.numel()", "not bytes"),
    ("traffic.py", "tensor.numel() * tensor.element_size()", "tensor.numel() * 4", "float64"),
    ("traffic.py", "tensor.numel() * tensor.element_size()", "...", "still a gap"),
    ("traffic.py", "return (gpus - 1) * weights", "return gpus * weights", "not to itself"),
    ("traffic.py", " + (gpus - 1) / gpus * (images + outputs)", "", "the images, and the gradients"),
    ("traffic.py", "(images + outputs)", "images", "which go back out"),
    ("traffic.py", "(images + outputs)", "outputs", "the images are missing."),
    ("traffic.py", " + (gpus - 1) / gpus * (", " + (gpus - 1) * (", "not the whole batch"),
    ("traffic.py", "+ (gpus - 1) / gpus * outputs", "", "the outputs are missing"),
    ("traffic.py", "gpus - 1) * weights + (gpus - 1) / gpus * o", "gpus - 1) / gpus * o", "weights are"),
    ("traffic.py", "2 * (gpus - 1) / gpus * w", "2 * w", "N - 1 of N"),
    ("traffic.py", "2 * (gpus - 1) / gpus * w", "(gpus - 1) / gpus * w", "goes round twice"),
    ("traffic.py", "2 * (gpus - 1) / gpus * w", "2 * (gpus - 1) * w", "one Nth"),
    ("answers.txt", "nearly_equal = 2", "nearly_equal = 4", "first line"),
    ("answers.txt", "bounded = ddp", "bounded = both", "for every additional GPU"),
    ("answers.txt", "dp_sends = 15.0", "dp_sends = 14.4", "What else"),
    ("answers.txt", "each_takes_in = 5.0", "each_takes_in = 4.8", "its slice"),
    ("answers.txt", "nccl_sends = 5.4", "nccl_sends = 15.0", "only once"),
]  # fmt: skip


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    program = workspace.module("traffic.py")
    for kind, expected in ((torch.float32, 60), (torch.float64, 120)):
        hints = {
            15: "these are numbers, not bytes",
            60: "a float64 has 8 bytes, not 4: ask the tensor",
        }
        _right(program.bytes_of, (torch.zeros(3, 5, dtype=kind),), expected, hints)
    weights = 1000
    images = 210
    outputs = 77
    for gpus in (3, 2, 5):
        part = (gpus - 1) / gpus
        more = gpus - 1
        everything = more * weights + part * (images + outputs)
        hints = {
            gpus * weights + part * (images + outputs): "the first GPU sends to the others, not to itself",
            more * weights: "the images, and the gradients of the outputs, are missing",
            more * weights + part * images: "the gradients of the outputs, which go back out, are missing",
            more * weights + part * outputs: "the images are missing",
            more * (weights + images + outputs): "each GPU gets its slice, not the whole batch",
            part * (weights + images + outputs): "every other GPU gets all weights, not a slice of them",
        }
        _right(program.sent, (weights, images, outputs, gpus), everything, hints)
        hints = {
            part * outputs: "the gradients of the weights are missing",
            more * weights: "the outputs are missing",
            everything: "the images and the gradients of the outputs go out; what comes in?",
        }
        _right(program.taken_in, (weights, images, outputs, gpus), more * weights + part * outputs, hints)
        hints = {
            2 * weights: "a GPU sends N - 1 of N slices of its bytes, twice",
            part * weights: "the ring goes round twice, once to add up and once to hand out",
            2 * more * weights: "slices go round the ring, each one Nth of the bytes",
        }
        _right(program.all_reduced, (weights, gpus), 2 * part * weights, hints)
    return _judge(answers, prediction)


def _right(count: Callable, of: tuple, expected: float, hints: dict[float, str]) -> None:
    name = count.__name__
    answer = count(*of)
    if answer is ...:
        raise Wrong(f"`{name}` in mine/traffic.py is still a gap `...`.")
    if not isinstance(answer, (int, float)):
        raise Wrong(f"`{name}` in mine/traffic.py returns {answer!r}, not a number.")
    if not is_close(answer, expected, 0.001):
        hint = next((hint for wrong, hint in hints.items() if is_close(answer, wrong, 0.001)), "count again")
        arguments = f"({', '.join(map(str, of))})" if len(of) > 1 else " of a tensor of 15 numbers"
        raise Wrong(f"`{name}`{arguments} is {answer:g} and should be {expected:g}: {hint}.")


def _judge(answers: dict[str, str], prediction: float) -> str:
    if not is_close(answers.number("dp_sends"), 15.0, 0.01):
        raise Wrong(
            "dp_sends: 3 times 4.8 MB of weights are 14.4. What else goes out? See the line of 4 GPUs."
        )
    if not is_close(answers.number("ddp_sends"), 7.2, 0.01):
        raise Wrong("ddp_sends: see the last column in the line of 4 GPUs.")
    if not is_close(answers.number("each_takes_in"), 5.0, 0.01):
        raise Wrong(
            "each_takes_in: it is a third of what the first GPU sends. Each GPU gets the weights and its "
            "slice."
        )
    if not is_close(answers.number("nccl_sends"), 5.4, 0.01):
        raise Wrong("nccl_sends: 4.8 MB of weights only once, and the same images and outputs as above.")
    if answers.number("nearly_equal") != 2:
        raise Wrong("nearly_equal: compare `sends` with the last column, from the first line down.")
    if answers.word("bounded", "dp", "ddp", "both") != "ddp":
        raise Wrong(
            "bounded: DataParallel's first GPU sends 4.8 MB more for every additional GPU. How large is "
            "2 (N - 1) / N for a large N?"
        )
    return (
        "With four GPUs, the first GPU of DataParallel sends 2.1 times as much as each GPU of DDP (you "
        f"predicted {prediction:g}); with eight, 4.1 times: N / 2, and a little for the images. A GPU of DDP "
        "sends less than twice the weights, however many GPUs there are, and sends while backward still "
        "computes. The size of the network decides, not the batch: so a larger batch makes both cheaper per "
        "image. With NCCL, the usual build, DataParallel's first GPU sends less than a GPU of DDP, 5.4 MB "
        "against 7.2. But it sends before the forward pass and sums after the backward pass, when no GPU "
        "computes."
    )
