"""The data sets that `--dataset` takes: what is known of them without reading them."""

from dataclasses import dataclass

from manygpus import project

# Where MNIST is, unless --data-dir says otherwise.
DEFAULT_DATA_DIR = project.folder() / "data"


@dataclass(frozen=True)
class KnownDataset:
    """What is known of a data set without reading it."""

    train_images: int
    is_generated: bool = False  # so that it has no files


# By the value of --dataset. data/datasets.py has a reader for each; `check` knows the files of MNIST alone.
DATASETS = {
    "mnist": KnownDataset(train_images=60_000),
    "synthetic": KnownDataset(train_images=60_000, is_generated=True),
}
