"""How long an epoch and a run take by the size of the data, and from which size on more devices pay."""

import pandas as pd

from trainkit.analysis.comparison import label


def lines(section: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows that are equal in all but the size of their data, if there are two sizes, with a label.

    `section` is a part of the table of `comparison.compare`.
    """
    sizes = [f"{images} images" for images in section.train_images]
    variants = [
        text.removesuffix(size).rstrip(", ") for text, size in zip(section.variant, sizes, strict=True)
    ]
    equal = ["stage", "devices", "nodes", "global_batch", "variant", "epochs"]
    groups = section.assign(variant=variants).sort_values("train_images").groupby(equal, sort=False)
    return [(label(rows.iloc[0]), rows) for _, rows in groups if rows.train_images.nunique() > 1]


def sentences(section: pd.DataFrame) -> list[str]:
    """For each line of several devices, from which size on it is sooner done than one device."""
    told = []
    for text, rows in lines(section):
        epoch, run = (_from(rows, saved) for saved in ("epoch_saved_s", "run_saved_s"))
        if epoch and run and rows.devices.iloc[0] > 1:
            told.append(
                f"{text} is sooner done than one device: with an epoch {epoch}; with a run of "
                f"{rows.epochs.iloc[0]} epochs, its start included, {run}."
            )
    return told


def _from(rows: pd.DataFrame, saved: str) -> str:
    """The size from which on the seconds `saved` are above 0, by interpolation between those measured."""
    known = rows[rows[saved].notna()]
    if len(known) < 2:
        return ""
    points = list(zip(known.train_images, known[saved], strict=True))
    if points[-1][1] <= 0:
        return "not within the measured sizes"
    lost = [i for i, (_, seconds) in enumerate(points) if seconds <= 0]
    if not lost:
        return "at all measured sizes"
    (below, loss), (above, gain) = points[lost[-1] : lost[-1] + 2]
    return f"from about {below + (above - below) * -loss / (gain - loss):,.0f} images on"
