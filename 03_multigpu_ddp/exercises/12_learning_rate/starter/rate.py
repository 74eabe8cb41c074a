"""The learning rate for a batch that grew. The gaps are to be filled in.

Try: python exercises/12_learning_rate/mine/rate.py
"""

BATCH = 64  # a global batch size,
LR = 0.02  # and a learning rate that is good there


def scaled(lr: float, rule: str, batch_per_rank: int, ranks: int) -> float:
    """Return the learning rate by the rule `none`, `linear` or `sqrt`; `lr` is for a global batch of 64."""
    if rule == "linear":
        return lr  # gap
    if rule == "sqrt":
        return lr  # gap
    return lr


def warmed_up(lr: float, step: int, warmup_steps: int) -> float:
    """Return the learning rate of step 1, 2, 3, ..., which rises by the same amount in each.

    It is `lr` at step `warmup_steps`, and stays `lr` after it.
    """
    return lr  # gap


if __name__ == "__main__":
    print(
        "global batch   linear     sqrt   updates in 20,000 images   linear, first of 40 updates of warm-up"
    )
    for ranks in (1, 4, 16, 64):
        linear, root = [scaled(LR, rule, BATCH, ranks) for rule in ("linear", "sqrt")]
        first = warmed_up(linear, 1, 40)
        updates = 20_000 // (BATCH * ranks)
        print(f"{BATCH * ranks:12,}   {linear:6.4f}   {root:6.4f}   {updates:24}   {first:.6f}")
