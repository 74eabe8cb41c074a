"""Runs the learner's function in 2 and in 3 ranks, and compares with the whole batch in one."""

from collections.abc import Callable

import torch
from torch import nn

from trainkit.workshop.ranks import in_ranks
from trainkit.workshop.work import Workspace, Wrong

ANSWERS = """\
# Before you run the starter, which averages nothing: will the weights of the two ranks be equal or different?
prediction = different

# 4 ranks sum their gradients and forget to divide. With SGD, how many times as large a learning rate would
# have the same effect?
forgot_to_divide = 4
"""
HINTS = """\
## 1

`model.parameters()` goes through the weights and biases, in the same order on every rank. After
`backward`, the gradient of each is in its `.grad`.

## 2

A sum is not yet a mean: divide it by the number of ranks, whatever that is. A frozen layer has no gradient:
its `.grad` is `None`, on every rank.

## 3

    for weights in model.parameters():
        if weights.grad is not None:
            dist.all_reduce(...)

and one more line, with `dist.get_world_size()`.
"""
SOLUTION = {
    "average.py": '''\
@@
-"""Train in several processes without DistributedDataParallel. Write the function `average`.
+"""Train in several processes without DistributedDataParallel.
@@
     """Make every gradient of the model its mean over all ranks."""
+    for weights in model.parameters():
+        if weights.grad is not None:
+            dist.all_reduce(weights.grad)
+            weights.grad /= dist.get_world_size()
''',
}
STARTS_WITH = "`prediction`"
SCRIPT = "average.py"
REDUCE = "dist.all_reduce(weights.grad)"
BOTH = "weights.grad)\n            weights.grad"
WRONG = [
    (SCRIPT, "weights.grad /= dist.get_world_size()", "pass", "2.00 times that of the whole batch"),
    (SCRIPT, "dist.get_world_size()\n\n", "2\n\n", "On 3 ranks"),
    (SCRIPT, BOTH, BOTH.replace("grad", "data"), "not the weights"),
    (SCRIPT, "in model.parameters()", "in list(model.parameters())[-1:]", "Only some of the gradients"),
    (SCRIPT, "if weights.grad is not None", "if True", "the frozen layer"),
    (SCRIPT, REDUCE, "dist.reduce(weights.grad, dst=0)", "The gradients of rank 1 differ"),
    (SCRIPT, REDUCE, "dist.get_rank() == 0 and " + REDUCE, "the same calls"),
    (SCRIPT, REDUCE, "dist.all_reduce(weights.grad.clone())", "not a copy"),
    ("answers.txt", "= 4", "= 1", "`forgot_to_divide`"),
    ("answers.txt", "= different", "= perhaps", "one of equal, different"),
]  # fmt: skip


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", "equal", "different")
    average = workspace.module(SCRIPT).average
    for size in (2, 3):
        judge(in_ranks(lambda rank, size: averaged(average, rank, size), size), size)
    if answers.number("forgot_to_divide") != 4:
        raise Wrong(
            "`forgot_to_divide`: the sum of 4 gradients is 4 times their mean, and SGD's step is the "
            "learning rate times the gradient."
        )
    came = "as you predicted" if prediction == "different" else "you predicted equal weights"
    return (
        f"Without `average`, the ranks drift apart: their weights are different ({came}). With it, N ranks "
        "make the same steps as one process with the whole batch, and no rank has to send its weights. DDP "
        "does the same, but sends many gradients in one call, while the others are still being computed: "
        "see 03_multigpu_ddp/beyond/by_feature/by_hand.py."
    )


def averaged(average: Callable[[nn.Module], None], rank: int, size: int) -> dict[str, list]:
    """Return this rank's own gradients, what `average` makes of them, and those of the whole batch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    inputs = torch.randn(6, 3)
    trained = list(model[1].parameters())
    whole = torch.autograd.grad(model(inputs).square().mean(), trained)
    model(inputs[rank::size]).square().mean().backward()
    own_gradients = [weights.grad.clone() for weights in trained]
    trained[0].data += rank  # would become equal, were it averaged
    before = trained[0].detach().clone()
    try:
        average(model)
    except (AttributeError, TypeError) as error:
        if "NoneType" in str(error):
            raise Wrong(
                "Something is None: either the gradient of the frozen layer, which you have to leave out, or "
                "the result of all_reduce, which returns nothing and writes into its argument."
            ) from None
        raise
    gradients = [weights.grad for weights in trained]
    return {
        "own": [tensor.tolist() for tensor in own_gradients],
        "got": [tensor.tolist() for tensor in gradients],
        "whole": [tensor.tolist() for tensor in whole],
        "weights kept": torch.equal(before, trained[0]),
    }


def judge(ranks: list[dict[str, list]], size: int) -> None:
    if not all(rank["weights kept"] for rank in ranks):
        raise Wrong("The weights change. Average the gradients, not the weights.")
    for number, rank in enumerate(ranks):
        for factor in (1, size):
            if all(equal(factor * torch.tensor(a), b) for a, b in zip(rank["got"], rank["own"], strict=True)):
                raise Wrong(
                    f"On {size} ranks, the gradients of rank {number} contain nothing from the other ranks. "
                    "all_reduce writes into its argument: give it the gradient, not a copy."
                )
        is_mean = [equal(got, whole) for got, whole in zip(rank["got"], rank["whole"], strict=True)]
        if all(is_mean):
            continue
        if rank["own"][0] == rank["got"][0] or rank["own"][1] == rank["got"][1]:
            raise Wrong("Only some of the gradients are averaged. The others still belong to one rank alone.")
        if number and all(
            equal(got, whole) for got, whole in zip(ranks[0]["got"], rank["whole"], strict=True)
        ):
            raise Wrong(
                f"The gradients of rank {number} differ from those of rank 0. Every rank needs the mean."
            )
        factor = torch.tensor(rank["got"][1]).sum() / torch.tensor(rank["whole"][1]).sum()
        raise Wrong(
            f"On {size} ranks, the gradient is {factor:.2f} times that of the whole batch in one process. "
            "Is it a mean, for any number of ranks?"
        )


def equal(gradients: list | torch.Tensor, other: list) -> bool:
    return torch.allclose(torch.as_tensor(gradients), torch.tensor(other), rtol=1e-4, atol=1e-6)
