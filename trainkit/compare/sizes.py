"""How long an epoch and a run take by the size of the data, and from which size on more devices pay."""

import math

import pandas as pd

from trainkit.compare.comparison import label


def lines(section: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the rows that differ in nothing but the size of their data, of two or more, with a label.

    `section` is a part of the table of `comparison.compare`.
    """
    sizes = [f"{images} images" for images in section.train_images]
    variants = [
        text.removesuffix(size).rstrip(", ") for text, size in zip(section.variant, sizes, strict=True)
    ]
    equal = ["stage", "devices", "nodes", "global_batch", "variant", "epochs"]
    groups = section.assign(variant=variants).sort_values("train_images").groupby(equal, sort=False)
    return [(label(rows.iloc[0]), rows) for _, rows in groups if rows.train_images.nunique() > 1]


def break_even(rows: pd.DataFrame, saved: str) -> float:
    """Interpolate the size from which on the seconds `saved` are above 0.

    0 if they are at every size of a line of several devices, infinite if not even at the largest, NaN if that
    is not known.
    """
    known = rows[rows[saved].notna()]
    if len(known) < 2 or known.devices.iloc[0] == 1:
        return math.nan
    points = list(zip(known.train_images, known[saved], strict=True))
    if points[-1][1] <= 0:
        return math.inf
    lost = [i for i, (_, seconds) in enumerate(points) if seconds <= 0]
    if not lost:
        return 0
    (below, loss), (above, gain) = points[lost[-1] : lost[-1] + 2]
    return below + (above - below) * -loss / (gain - loss)


def sentences(section: pd.DataFrame) -> list[str]:
    """Tell of each line of several devices from which size on it is sooner done than one device."""
    told = []
    for text, rows in lines(section):
        epoch, run = (break_even(rows, saved) for saved in ("epoch_saved_s", "run_saved_s"))
        if not math.isnan(epoch) and not math.isnan(run):
            told.append(
                f"{text} is sooner done than one device: with an epoch {_size_words(epoch)}; with a run of "
                f"{rows.epochs.iloc[0]} epochs, its start included, {_size_words(run)}."
            )
    return told


def _size_words(size: float) -> str:
    if size == 0:
        return "at all measured sizes"
    return "not within the measured sizes" if math.isinf(size) else f"from about {size:,.0f} images on"
