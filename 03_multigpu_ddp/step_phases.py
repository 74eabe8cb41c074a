"""The phases of a training step: timed on one rank, split over all ranks, printed and recorded."""

import secrets
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import islice, pairwise
from pathlib import Path

import torch
from torch import nn

from manygpus import DistEnv, Options
from manygpus.devices import between, moment, wait_for
from manygpus.distributed import process_group
from manygpus.errors import print_line
from manygpus.files import explained
from manygpus.record.records import put_table
from manygpus.training import clock
from manygpus.training.run_facts import of_start

TIMED = ("data", "forward", "backward", "optimizer")  # what a clock on one rank can time
MOST_APART = 0.05  # the most that the sum of the phases may differ from the step, as a share of it


def laps(phases: Iterator[str], device: torch.device, steps: int, every: int = 1) -> torch.Tensor:
    """Run `steps` training steps, and return the seconds between readings of the clock, float64.

    Args:
        phases: the training, which yields at the end of each phase of `TIMED`.
        every: phases from one reading to the next.
    """
    clock.start(device)  # all ranks begin together
    moments = [moment(device)]
    for number, _ in enumerate(islice(phases, steps * len(TIMED)), start=1):
        if number % every == 0:
            moments.append(moment(device))
    wait_for(device)
    return torch.tensor([between(*pair) for pair in pairwise(moments)], dtype=torch.float64)


def split(together: torch.Tensor, alone: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the seconds of each phase of a step, (ranks, repeats). Their sum is that of `together`.

    Args:
        together: seconds of the phases of `TIMED`, (ranks, repeats, steps, 4).
        alone: the same for steps within `no_sync`, in which no rank meets another.
    """
    data, forward, backward, optimizer = together.mean(2).unbind(2)
    computing = alone[..., TIMED.index("backward")].mean(2)
    added = backward - computing
    # In each step the others wait, in the backward pass, for the rank whose own work takes longest.
    own_work = alone.sum(3)
    waiting = (own_work.amax(0) - own_work).mean(2).minimum(added.clamp(min=0))
    return {
        "data": data,
        "forward": forward,
        "backward": computing,
        "communication": added - waiting,
        "waiting": waiting,
        "optimizer": optimizer,
    }


def facts(options: Options, dist_env: DistEnv, dataset: str, model: nn.Module) -> dict[str, object]:
    """Return the columns that are the same in all lines of the file; every rank has to call it."""
    run_id = process_group.broadcast(f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}")
    columns = {"run_id": run_id, "settings": options.settings()} | options.columns()
    return columns | of_start(dist_env, model, dataset, options.precision)


def as_text(facts: dict[str, object], seconds: dict[str, torch.Tensor], step: torch.Tensor) -> str:
    """Format a table of the phases, and compare their sum with the whole step.

    Args:
        seconds: the seconds of each phase, (ranks, repeats).
        step: the seconds of the whole step, (ranks, repeats).
    """
    seconds_by_rank = {phase: _milliseconds(values) for phase, values in seconds.items()}
    whole, total = _milliseconds(step).mean(), sum(values.mean() for values in seconds_by_rank.values())
    lines = [
        f"{facts['world_size']} x {facts['device_name']} · {facts['dataset']} · global batch "
        f"{facts['global_batch']} · {facts['loader']} loader · {facts['precision']} · "
        f"recipe {facts['recipe']}{facts['settings'] and ' · ' + facts['settings']}",
        f"{'phase':<13}{'ms':>9}{'%':>7}   least..most of the ranks",
    ]
    for phase, values in seconds_by_rank.items():
        mean = values.mean()
        lines.append(f"{phase:<13}{mean:>9.2f}{mean / total:>7.1%}   {values.min():.2f}..{values.max():.2f}")
    lines.append(f"phases sum to {total:.2f} ms, the step takes {whole:.2f} ms ({total / whole:.1%})")
    if abs(total / whole - 1) > MOST_APART:
        lines[-1] += ": more than 5 % apart, so the machine was not quiet. Run it again with more --repeats."
    return "\n".join(lines)


def _milliseconds(seconds: torch.Tensor) -> torch.Tensor:
    """Return the median of each rank's repeats, (ranks,)."""
    return 1000 * seconds.quantile(0.5, dim=1)


def write(path: Path, facts: dict[str, object], hosts: list[str], seconds: dict[str, torch.Tensor]) -> None:
    """Write a line for each phase, rank and repeat, in one atomic step, and print the path.

    Args:
        facts: the columns that are the same in all lines.
        hosts: the node of each rank.
        seconds: the seconds of each phase, (ranks, repeats).

    Raises:
        UserError: if the file cannot be written.
    """
    rows = [
        facts | {"rank": rank, "host": hosts[rank], "repeat": repeat, "phase": phase, "seconds": value}
        for phase, seconds_by_rank in seconds.items()
        for rank, repeats in enumerate(seconds_by_rank.tolist())
        for repeat, value in enumerate(repeats, start=1)
    ]
    with explained(f"{path} cannot be written", "free the space or give a different --results-dir."):
        put_table(path, rows[0], rows, delimiter="\t")
    print_line(f"results: {path}")
