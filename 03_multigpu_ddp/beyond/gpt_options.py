"""The options of gpt.py; those that other scripts have, too, fit this training here."""

from trainkit import options
from trainkit.runtime.command_line import above_0, at_least
from trainkit.rank.options import MOST_IMAGES

import gpt_data

# fmt: off
OPTIONS = {
    "layers": options.own(2, at_least(1), "N", "transformer blocks", shapes_training=True),
    "heads": options.own(4, at_least(1), "N", "of the attention in each block", shapes_training=True),
    "width": options.own(
        64, at_least(1), "N", "numbers for each token", shapes_training=True, column="width"
    ),
    "context": options.own(
        64, at_least(2, 2**16), "T", "tokens that the network sees at a time", shapes_training=True
    ),
    "vocabulary": options.own(
        128, at_least(len(gpt_data.WORDS), 2**16), "N", "rows of the table of words; GPT-2 has 50304",
        shapes_training=True,
    ),
    "shards": options.own(
        2, at_least(1, 10_000), "N", f"files of {gpt_data.SHARD:,} tokens to train on", shapes_training=True
    ),
    "how": options.own("ddp", ("ddp", "shard"), None, "all of the network on each rank, or a share of it"),
    "compile": options.own(False, None, None, "have torch.compile make fewer and larger kernels"),
    "checkpoint_activations": options.own(
        False, None, None, "keep one tensor of each block, and compute the others anew when they are needed"
    ),
    "precision": options.own(
        "fp32", ("fp32", "tf32", "bf16"), None, "what the layers compute in; bf16 on GPUs that have it"
    ),
    "recipe": options.own("adamw", ("adamw",), None, "warm-up, then a cosine", column="recipe"),
    "loader": options.own("mapped", ("mapped",), None, "tokens are read from disk", column="loader"),
    "epochs": options.own(
        3, at_least(1), "N", "passes over the text, or over --train-size windows", shapes_training=True
    ),
    "lr": options.own(
        0.003, above_0(), "X", "learning rate, with --lr-scale that of batch 64", shapes_training=True
    ),
    "lr_warmup_images": options.own(
        1024, at_least(0, MOST_IMAGES), "N", "windows over which the learning rate rises from 0",
        shapes_training=True, column="lr_warmup_images",
    ),
}
# fmt: on
