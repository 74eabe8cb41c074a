"""The learning rate for a batch that grew. The gaps are to be filled in.

Try: python exercises/05_learning_rate/mine/rate.py
"""

LR, BATCH = 0.02, 64  # a learning rate that is good at this global batch


def scaled(lr: float, rule: str, batch_per_rank: int, ranks: int) -> float:
    """Return the learning rate by the rule `none`, `linear` or `sqrt`; `lr` is for a global batch of 64."""
    if rule == "linear":
        return lr  # gap
    if rule == "sqrt":
        return lr  # gap
    return lr


def warmed_up(lr: float, step: int, global_batch: int, warmup_images: int) -> float:
    """Return the learning rate of step 1, 2, 3, ... of a warm-up, which rises in equal steps.

    It is `lr` at the step that ends with image number `warmup_images`, and stays `lr` after it.
    """
    return lr  # gap


if __name__ == "__main__":
    print("global batch   linear     sqrt     linear, first step of a warm-up of 10,240 images")
    for ranks in (1, 4, 16, 64):
        linear, root = [scaled(LR, rule, BATCH, ranks) for rule in ("linear", "sqrt")]
        first = warmed_up(linear, 1, BATCH * ranks, 10_240)
        print(f"{BATCH * ranks:12,}   {linear:6.4f}   {root:6.4f}     {first:.6f}")
