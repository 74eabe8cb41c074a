"""The runs of a sweep before they are checked: one configuration each, and the lists that they come from."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from manygpus.jobs.stages import Resources, Stage, resources
from manygpus.jobs.sweeps.varied_options import Settings

# What stays the same on every number of GPUs: the global batch size, that of each GPU, or each in turn.
STRONG, WEAK, BOTH = "strong", "weak", "both"


@dataclass(frozen=True)
class PlannedRun:
    """One configuration and the number of its repeat.

    Attributes:
        batch_size: the global one; None for a plain script that is given none.
        num_workers: loader processes of each process; None for the resident loader.
        train_size: images per epoch; None for all.
        repeat: the number of the repeat, from 1 on.
        settings: what it varies besides (--vary).
    """

    stage: Stage
    shape: Resources
    batch_size: int | None
    num_workers: int | None
    train_size: int | None
    repeat: int
    settings: Settings = ()

    @property
    def name(self) -> str:
        """Return a name that no other run of the sweep has."""
        settings = [self.stage.label, f"{self.shape.gpus}gpu"]
        if self.shape.nodes > 1:
            settings.append(f"{self.shape.nodes}nodes")
        if self.batch_size is not None:
            settings.append(f"batch{self.batch_size}")
        if self.num_workers is not None:
            settings.append(f"workers{self.num_workers}")
        if self.train_size is not None:
            settings.append(f"train{self.train_size}")
        settings += [setting.label for setting in self.settings]
        settings.append(f"r{self.repeat}")
        return "-".join(settings)

    def options(self) -> list[str]:
        """Return the options for the stage."""
        arguments = ["--batch-size", str(self.batch_size)]
        if self.num_workers is not None:
            arguments += ["--loader", "workers", "--num-workers", str(self.num_workers)]
        if self.train_size is not None:
            arguments += ["--train-size", str(self.train_size)]
        return arguments


@dataclass(frozen=True)
class Grid:
    """The lists of which a sweep tries every combination; `PlannedRun` explains them.

    Attributes:
        scaling: strong (batch sizes are global), weak (they are per GPU) or both.
        gpus_per_node: a run on more GPUs is spread over several nodes.
        settings: the combinations of what is varied besides.
    """

    stages: tuple[Stage, ...]
    gpus: tuple[int, ...]
    batch_sizes: tuple[int | None, ...]
    num_workers: tuple[int | None, ...] = (None,)
    train_sizes: tuple[int | None, ...] = (None,)
    repeats: int = 1
    scaling: str = STRONG
    gpus_per_node: int | None = None
    settings: tuple[Settings, ...] = ((),)

    def combinations(self) -> Iterator["Combination"]:
        """Yield every combination; strong and weak scaling may give the same one.

        All of a repeat come before the next repeat, so that a busy hour of the cluster does not hit a single
        configuration, and those on one GPU, the baselines, come first.
        """
        lists = product(
            range(1, self.repeats + 1),
            sorted(self.gpus),
            self.stages,
            self.batch_sizes,
            self.num_workers,
            self.train_sizes,
            self.settings,
        )
        for repeat, gpus, stage, batch_size, num_workers, train_size, settings in lists:
            for factor in self.batch_factors(gpus):
                yield Combination(
                    stage=stage,
                    gpus=gpus,
                    nodes=self.nodes(gpus),
                    batch_size=None if batch_size is None else batch_size * factor,
                    num_workers=num_workers,
                    train_size=train_size,
                    repeat=repeat,
                    settings=settings,
                )

    def nodes(self, gpus: int) -> int:
        """Return the nodes of a run on `gpus` in all."""
        if self.gpus_per_node is None:
            return 1
        return math.ceil(gpus / self.gpus_per_node)

    def batch_factors(self, gpus: int) -> list[int]:
        """Return by which a batch size is multiplied for the global ones of runs on `gpus`."""
        return {STRONG: [1], WEAK: [gpus], BOTH: [1, gpus]}[self.scaling]


@dataclass(frozen=True)
class Combination:
    """One value of each list of a grid; `PlannedRun` explains them. It may make no sense."""

    stage: Stage
    gpus: int
    nodes: int
    batch_size: int | None
    num_workers: int | None
    train_size: int | None
    repeat: int
    settings: Settings

    def run(self, cpus_per_gpu: int) -> PlannedRun:
        """Return the run with these values.

        Raises:
            UserError: as `resources`.
        """
        return PlannedRun(
            stage=self.stage,
            shape=resources(self.stage, self.gpus, self.nodes, cpus_per_gpu),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            train_size=self.train_size,
            repeat=self.repeat,
            settings=self.settings,
        )


class SweepPlan(NamedTuple):
    """The runs of a sweep, and the reasons against others, with how many each concerns."""

    runs: list[PlannedRun]
    left_out: Counter[str]
