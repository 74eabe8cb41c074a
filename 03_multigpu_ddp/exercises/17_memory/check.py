"""Calculates each part of the memory."""

from manygpus.workshop.work import Answers, Workspace, Wrong, is_close

ANSWERS = """\
# MB in use at the fullest moment of the second step
prediction = 70
# MB of each part
weights = 8.4
gradients = 8.4
optimizer = 16.8
activations = 33.6  # without the batch itself
# MB of the activations with a batch of 4096
doubled = 67.1
# MB of weights, gradients and optimizer together: with SGD without momentum instead of AdamW
sgd = 16.8
# and with AdamW, on each of 4 ranks over which fully_shard splits them
sharded = 8.4
# Two GPUs with DDP and the same global batch: which of the four parts is only half as large on each?
# weights, gradients, optimizer or activations
halved = activations
"""
HINTS = """\
## 1

A layer has 512 x 512 weights of 4 bytes, and there are 8 layers. How many numbers does AdamW keep for each
weight?

## 2

Go through the forward pass. The first layer's input is the batch, which counts separately. Each ReLU returns
2048 x 512 numbers. It keeps them, and they are also the input of the next layer.

## 3

weights = gradients = 8 x 512 x 512 x 4 bytes, optimizer = 2 x weights, activations = 8 x 2048 x 512
x 4 bytes. `fully_shard` leaves a quarter of all three on each of four ranks. DDP splits the batch.
"""
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "weights = 8.4", "weights = 2.1", "4 bytes each"),
    ("answers.txt", "weights = 8.4", "weights = 8.0", "in MiB"),
    ("answers.txt", "optimizer = 16.8", "optimizer = 8.4", "two means"),
    ("answers.txt", "activations = 33.6", "activations = 37.7", "includes the batch"),
    ("answers.txt", "activations = 33.6", "activations = 67.1", "twice"),
    ("answers.txt", "doubled = 67.1", "doubled = 33.6", "for every sample"),
    ("answers.txt", "sgd = 16.8", "sgd = 8.4", "gradients also count"),
    ("answers.txt", "sgd = 16.8", "sgd = 33.6", "keeps nothing"),
    ("answers.txt", "sharded = 8.4", "sharded = 33.6", "as with DDP"),
    ("answers.txt", "halved = activations", "halved = weights", "all of the network"),
]  # fmt: skip
WEIGHTS, ACTIVATIONS = (8 * rows * 512 * 4 / 1e6 for rows in (512, 2048))
BATCH = ACTIVATIONS / 8
# Each answer: the right number, and the hints for wrong ones.
PARTS = {
    "weights": (WEIGHTS, {WEIGHTS / 4: "that is the number of weights in millions, of 4 bytes each"}),
    "gradients": (WEIGHTS, {0: "the backward pass leaves one number for each weight"}),
    "optimizer": (2 * WEIGHTS, {WEIGHTS: "AdamW keeps two means for each weight"}),
    "activations": (
        ACTIVATIONS,
        {
            ACTIVATIONS + BATCH: "that includes the batch",
            2 * ACTIVATIONS: "the output of a ReLU is the input of the next layer, so you count it twice",
        },
    ),
    "doubled": (2 * ACTIVATIONS, {ACTIVATIONS: "a layer keeps its input for every sample"}),
    "sgd": (
        2 * WEIGHTS,
        {WEIGHTS: "gradients also count", 4 * WEIGHTS: "SGD without momentum keeps nothing for a weight"},
    ),
    "sharded": (WEIGHTS, {4 * WEIGHTS: "then each rank keeps all of it, as with DDP"}),
}


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    for name in PARTS:
        judge(answers, name)
    if answers.word("halved", "weights", "gradients", "optimizer", "activations") != "activations":
        raise Wrong("`halved`: with DDP, each of two GPUs has all of the network, and half of the samples.")
    before_backward = 3 * WEIGHTS + BATCH + ACTIVATIONS
    return (
        f"The fullest moment has {before_backward + 2 * BATCH:.0f} MB, as memory.py prints; you predicted "
        f"{prediction:g}. It is the start of the backward pass. Then weights, AdamW's means, the batch and "
        f"all activations are in memory ({before_backward:.0f} MB), with no gradient of a weight yet, but "
        "two gradients of activations. Later, each layer frees more than its gradient takes. So a smaller "
        "batch, or checkpointing, lowers this peak. If the weights are larger than the activations, sharding "
        "lowers it."
    )


def judge(answers: Answers, name: str) -> None:
    true, hints = PARTS[name]
    answer = answers.number(name)
    if not is_close(answer, true):
        hints = {true / 1.048576: "that is in MiB (2**20 bytes). A MB is a million bytes"} | hints
        hint = next((hint for wrong, hint in hints.items() if is_close(answer, wrong)), "see `hint memory`")
        raise Wrong(f"`{name}` is not {answer:g} MB: {hint}.")
