"""Trains the learner's network on two ranks, counts what each keeps, and compares with one process."""

from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainkit.workshop.ranks import in_ranks
from trainkit.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# MB that each of two ranks will keep with fully_shard
prediction = 8
# MB of weights, gradients and AdamW on each rank: with DDP on four ranks, with fully_shard on two and on four
ddp_four = 12.7
fsdp_two = 6.3
fsdp_four = 3.2
# Which part is still as large on each rank as with DDP: weights, gradients, optimizer or activations?
as_large = activations
# DDP's all-reduce sends as much as a reduce-scatter and an all-gather. fully_shard makes one reduce-scatter,
# and an all-gather in each of the two passes. How many times the bytes of DDP is that?
traffic = 1.5
"""
HINTS = """\
## 1

`from torch.distributed.fsdp import fully_shard`. `fully_shard(module)` shards all parameters of a module
that are not sharded yet, and changes the module in place. Each module that you call it with is gathered as a
whole.

## 2

Call it for each of `model.blocks`, so that only one block is whole at a time. Then call it for the model, to
shard what is outside the blocks: the embedding and the head.

## 3

`for block in model.blocks: fully_shard(block)`, then `fully_shard(model)`, then `return model`. Weights,
gradients and optimizer state take 16 bytes for each weight, divided by the number of ranks. Activations
belong to a rank's own sequences. DDP sends two parts, fully_shard three.
"""
SOLUTION = {
    "split.py": '''\
@@
-"""Train a small GPT with DDP, and say what each rank keeps. Only `shard` needs a change.
+"""Train a small GPT with fully_shard, and say what each rank keeps.
@@
+from torch.distributed.fsdp import fully_shard
 from torch.nn.parallel import DistributedDataParallel
@@
-    return DistributedDataParallel(model)
+    for block in model.blocks:
+        fully_shard(block)
+    fully_shard(model)
+    return model
''',
}
STARTS_WITH = "`prediction`"
BLOCKS = "    for block in model.blocks:\n        fully_shard(block)\n"
WRONG = [
    ("split.py", BLOCKS, "", "the whole network is gathered at once"),
    ("split.py", "    fully_shard(model)\n", "", "outside the blocks"),
    ("split.py", "    return model\n", "", "returns nothing"),
    (
        "split.py",
        BLOCKS + "    fully_shard(model)\n    return model",
        "    return DistributedDataParallel(model)",
        "as with DDP",
    ),
    ("split.py", BLOCKS + "    fully_shard(model)\n", "", "The losses are not those"),
    ("answers.txt", "ddp_four = 12.7", "ddp_four = 3.2", "has the whole network"),
    ("answers.txt", "fsdp_two = 6.3", "fsdp_two = 12.7", "half of it"),
    ("answers.txt", "fsdp_four = 3.2", "fsdp_four = 0.8", "weights alone"),
    ("answers.txt", "as_large = activations", "as_large = optimizer", "this part is sharded"),
    ("answers.txt", "traffic = 1.5", "traffic = 1", "three parts"),
    ("answers.txt", "traffic = 1.5", "traffic = 3", "two parts"),
]
STEPS = 4
BYTES = 16  # for each weight: itself, its gradient, and the two means of AdamW


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    program = workspace.module("split.py")
    torch.manual_seed(1)
    model = program.GPT()
    whole = BYTES * sum(weight.numel() for weight in model.parameters()) / 1e6
    true, _ = program.train(model, program.sequences(0, 1), STEPS)
    ranks = in_ranks(lambda rank, size: behave(program, rank, size), size=2)
    check_shards(ranks[0], whole)
    for step, losses in enumerate(zip(*(seen["losses"] for seen in ranks), strict=True)):
        mean = sum(losses) / len(losses)
        if not is_close(mean, true[step], 1e-3):
            raise Wrong(
                f"The losses are not those of one process: {mean:.4f} in step {step + 1} instead of "
                f"{true[step]:.4f}. Do the ranks still average their gradients?"
            )
    check_answers(answers, whole)
    return (
        f"Each of two ranks keeps {ranks[0]['kept']:.1f} MB instead of {whole:.1f} (you predicted "
        f"{prediction:g}), with the losses of one process. Each of N ranks keeps one Nth, besides its "
        "activations and the one block that is whole at a time. The price is half as much traffic again, "
        "which travels while other blocks compute. beyond/GPT.md measures it with 124 million weights."
    )


def behave(program: ModuleType, rank: int, size: int) -> dict[str, object]:
    """Train the learner's network in this rank, and return what it keeps and its losses."""
    torch.manual_seed(1)
    model = program.shard(program.GPT())
    if not isinstance(model, nn.Module):
        raise Wrong("`shard` returns nothing, but it has to return the network.")
    losses, kept = program.train(model, program.sequences(rank, size), STEPS)
    inner = model if isinstance(model, program.GPT) else model.module
    dist.barrier()
    return {
        "losses": losses,
        "kept": sum(kept.values()),
        "is_whole": isinstance(inner, FSDPModule),
        "blocks": sum(isinstance(block, FSDPModule) for block in inner.blocks),
        "of": len(inner.blocks),
        "is_ddp": inner is not model,
    }


def check_shards(seen: dict[str, object], whole: float) -> None:
    kept = seen["kept"]
    if seen["is_ddp"]:
        raise Wrong(f"Each rank keeps all {kept:.1f} MB, as with DDP: use fully_shard instead.")
    if seen["is_whole"] and seen["blocks"] < seen["of"]:
        raise Wrong(
            f"{seen['blocks']} of {seen['of']} blocks are sharded by themselves. Each rank keeps its "
            "shard, but in every step the whole network is gathered at once, so the peak is that of DDP."
        )
    if seen["blocks"] and not is_close(kept, whole / 2, 0.05):
        raise Wrong(
            f"Each rank keeps {kept:.1f} MB, not half of {whole:.1f}: what is outside the blocks, the "
            "embedding and the head, is still whole on each rank, and its gradients are not averaged."
        )


def check_answers(answers: Answers, whole: float) -> None:
    for name, true, hint in (
        ("ddp_four", whole, "with DDP every rank has the whole network, however many ranks there are"),
        ("fsdp_two", whole / 2, "two ranks split the network, so each keeps half of it"),
        (
            "fsdp_four",
            whole / 4,
            "count weights, gradients and AdamW, not the weights alone, and divide by four",
        ),
    ):
        if not is_close(answers.number(name), true, 0.03):
            raise Wrong(f"`{name}` is not {answers[name]}: {hint}.")
    as_large = answers.word("as_large", "weights", "gradients", "optimizer", "activations")
    if as_large != "activations":
        raise Wrong(f"`as_large = {as_large}`: this part is sharded. What belongs to a rank's own sequences?")
    if not is_close(answers.number("traffic"), 1.5):
        raise Wrong(
            "`traffic`: a reduce-scatter and two all-gathers are three parts, while DDP's all-reduce is two "
            "parts."
        )
