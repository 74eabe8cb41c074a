"""What the choice of a number of GPUs has to keep; a sweep that waits for jobs loads no more than this."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constraints:
    """The limits that the choice has to keep.

    With a `target`, a test accuracy (%), the time until it is reached counts, else that of `epochs`. `gpus`,
    `batches` and `gpus_per_node` are what there is to choose from: if empty, what was measured, and twice the
    largest count. `price` is the money for a GPU-hour, and decides nothing.
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
