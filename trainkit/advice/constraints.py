"""The limits on the choice of a number of GPUs; a sweep that waits for jobs loads only this module."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constraints:
    """The limits that the choice has to keep.

    With a `target`, a test accuracy (%), the time until it is reached counts, else that of `epochs`. `gpus`,
    `batches` and `gpus_per_node` are the values to choose from: if empty, those measured, and twice the
    largest count. `price` is the cost of a GPU-hour, and does not affect the choice.
    """

    target: float | None = None
    epochs: int | None = None
    deadline_s: float | None = None
    budget_hours: float | None = None
    min_efficiency: float = 0.7
    gpus: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    gpus_per_node: int | None = None
    price: float | None = None
