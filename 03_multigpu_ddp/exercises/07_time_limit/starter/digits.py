"""Write the images that train.py reads: generated digits, not MNIST.

Try: python exercises/07_time_limit/mine/digits.py
"""

from pathlib import Path

import numpy as np

from manygpus.data import synthetic

FOLDER = Path(__file__).resolve().parent / "digits"


def write(folder: Path, **counts: int) -> None:
    """Write `<name>-images.npy` and `<name>-labels.npy` for each name, with so many images."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate(counts.items()):
        images, labels = synthetic.digits(count, seed)
        np.save(folder / f"{name}-images.npy", images.numpy())
        np.save(folder / f"{name}-labels.npy", labels.numpy())


if __name__ == "__main__":
    write(FOLDER, train=6_000, validation=1_001)
