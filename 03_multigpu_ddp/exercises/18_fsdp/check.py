"""Reads what the learner's runs on two and on four ranks have written, and the answers."""

import json

from manygpus.workshop.work import Answers, Workspace, Wrong, is_close

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
RECORDED = {"03_multigpu_ddp/exercises/18_fsdp/recorded": []}
WHOLE = 792_064 * 16 / 1e6  # MB: each weight, its gradient, and the two means of AdamW
SHARDED_MODULES = 5  # the four blocks, and the network around them
TWO = "runs/2-ranks.json"
FOUR = "runs/4-ranks.json"
ALL_FIVE = f'"sharded_modules": {SHARDED_MODULES}'
WRONG = [
    (TWO, ALL_FIVE, '"sharded_modules": 0', "as with DDP"),
    (TWO, ALL_FIVE, '"sharded_modules": 1', "the whole network is gathered at once"),
    (TWO, ALL_FIVE, '"sharded_modules": 4', "outside the blocks"),
    (FOUR, '"losses": [7', '"losses": [8', "not those of one process"),
    ("answers.txt", "ddp_four = 12.7", "ddp_four = 3.2", "has the whole network"),
    ("answers.txt", "fsdp_two = 6.3", "fsdp_two = 12.7", "half of it"),
    ("answers.txt", "fsdp_four = 3.2", "fsdp_four = 0.8", "weights alone"),
    ("answers.txt", "as_large = activations", "as_large = optimizer", "this part is sharded"),
    ("answers.txt", "traffic = 1.5", "traffic = 1", "three parts"),
    ("answers.txt", "traffic = 1.5", "traffic = 3", "two parts"),
]
# Those of one process with these weights and sequences, by the number of the step.
LOSSES = {1: 7.081, 10: 1.458}


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    for ranks in (2, 4):
        check_run(workspace, ranks)
    check_answers(answers)
    return (
        f"Each of two ranks keeps {WHOLE / 2:.1f} MB instead of {WHOLE:.1f} (you predicted "
        f"{prediction:g}), with the losses of one process. Each of N ranks keeps one Nth, besides its "
        "activations and the one block that is whole at a time. The price is half as much traffic again, "
        "which travels while other blocks compute. beyond/GPT.md measures it with 124 million weights."
    )


def check_run(workspace: Workspace, ranks: int) -> None:
    name = f"runs/{ranks}-ranks.json"
    if not (workspace.folder / name).exists():
        raise Wrong(
            f"There is no mine/{name}: run mine/split.py on {ranks} ranks, or use our runs with `recorded`."
        )
    run = json.loads(workspace.text(name))
    kept = run["megabytes"]
    sharded = run["sharded_modules"]
    if not sharded:
        raise Wrong(
            f"On {ranks} ranks, each keeps all {kept:.1f} MB, as with DDP: use fully_shard instead, and run "
            "both commands again."
        )
    if sharded == 1:
        raise Wrong(
            "The blocks are not sharded by themselves. Each rank keeps its shard, but in every step the "
            "whole network is gathered at once, so the peak is that of DDP."
        )
    if sharded < SHARDED_MODULES or not is_close(kept, WHOLE / ranks, 0.05):
        raise Wrong(
            f"Each of {ranks} ranks keeps {kept:.1f} MB, and {sharded} modules are sharded by themselves: "
            "what is outside the blocks, the embedding and the head, or a block is still whole on each rank, "
            "and its gradients are not averaged."
        )
    for step, true in LOSSES.items():
        loss = run["losses"][step - 1]
        if not is_close(loss, true, 0.01):
            raise Wrong(
                f"On {ranks} ranks, the losses are not those of one process: {loss:.3f} in step {step} "
                f"instead of {true:.3f}. Is everything but `shard` as in the starter?"
            )


def check_answers(answers: Answers) -> None:
    for name, true, hint in (
        ("ddp_four", WHOLE, "with DDP every rank has the whole network, however many ranks there are"),
        ("fsdp_two", WHOLE / 2, "two ranks split the network, so each keeps half of it"),
        (
            "fsdp_four",
            WHOLE / 4,
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
