"""A sweep that stops when it knows enough: one run at a time, the cheapest that tells something.

What is known after each says results/how_many_gpus.py, in a process of its own: pandas is not loaded here.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from trainkit.errors import UserError
from trainkit.jobs import sweep
from trainkit.jobs.sweep import Cell, Sweep


class Step(NamedTuple):
    """A run that may be next, why it, and about how many device-hours it takes."""

    cell: Cell
    why: str
    hours: float


def run(asked: Sweep, cells: list[Cell], question: tuple[str, ...], spend: float = math.inf) -> int:
    """Run of the cells what the answer needs, for at most `spend` device-hours; returns the exit code.

    `question` are the options of results/how_many_gpus.py, without what there is to choose from. The folder
    is claimed before.

    Raises:
        UserError: if a job is refused, or Slurm does not answer.
    """
    sweep.begin(asked, cells)

    def finish(cell: Cell) -> bool:
        return not sweep.finish(asked, [cell], 1, asked.folder)

    def ask(among: list[Cell]) -> tuple[set[str], float, dict]:
        names = {csv.parents[1].name for csv in asked.finished()}
        return names, asked.device_hours(), sweep.answer(asked, (*question, *_lists(among)))

    hours_name = "worker-hours" if asked.on_cpu else "GPU-hours"
    failed = search(cells, ask, finish, spend, asked.opts.epochs, hours_name)
    among = _without(cells, failed)
    return sweep.compare(asked, [cell.name for cell in failed], (*question, *_lists(among)))


def of_use(cells: list[Cell]) -> list[Cell]:
    """Without those on one device that tell nothing new: stage single is enough there, else ddp.

    Raises:
        UserError: if none is on one device.
    """
    on_one = {cell.stage.name for cell in cells if cell.shape.gpus == 1} - {"dp"}
    if not on_one:
        raise UserError("--until-known starts on 1 GPU: add 1 to --gpus, and single or ddp to --stages.")
    alone = "single" if "single" in on_one else "ddp"
    return [cell for cell in cells if cell.shape.gpus > 1 or cell.stage.name == alone]


def search(
    cells: list[Cell],
    ask: Callable[[list[Cell]], tuple[set[str], float, dict]],
    finish: Callable[[Cell], bool],
    spend: float = math.inf,
    epochs: int = sweep.EPOCHS,
    hours_name: str = "GPU-hours",
) -> list[Cell]:
    """Run one cell after the other, and say each time what is known; returns those that failed.

    `ask` returns the names of the finished cells, the device-hours that all runs have taken, and what
    results/how_many_gpus.py answers where the cells that it is given are to be chosen from; `finish` whether
    a run, of `epochs`, went well.
    """
    failed: list[Cell] = []
    while True:
        among = _without(cells, failed)
        names, hours, answer = ask(among)
        finished = [cell for cell in cells if cell.name in names]
        left = [cell for cell in among if cell.name not in names]
        usual = hours / max(len(finished), 1)  # more devices are done sooner: their hours differ little
        steps = list(_steps(left, finished, answer, usual, epochs))
        step = next((step for step in steps if hours + step.hours <= spend), None)
        if not step:
            why = _why_done(steps, left)
            so_far = f"{len(finished)} of {len(cells)} runs, {hours:.2g} {hours_name}"
            print(f"done     {_known(answer)}; {why} ({so_far})", flush=True)
            return failed
        about = f" (about {step.hours:.2g} {hours_name})" if step.hours else ""
        print(f"known    {_known(answer)}; next {step.cell.name}{about}: {step.why}", flush=True)
        if not finish(step.cell):
            failed.append(step.cell)


def _without(cells: list[Cell], failed: list[Cell]) -> list[Cell]:
    """Also without other repeats of what failed, which would fail as well."""
    never = {cell.configuration for cell in failed}
    return [cell for cell in cells if cell.configuration not in never]


def _lists(cells: list[Cell]) -> tuple[str, ...]:
    """What there is to choose from, as options of results/how_many_gpus.py."""
    gpus, batches = {cell.shape.gpus for cell in cells}, {cell.batch_size for cell in cells}
    return "--gpus", ",".join(map(str, sorted(gpus))), "--batch-size", ",".join(map(str, sorted(batches)))


def _known(answer: dict) -> str:
    best = answer["best"]
    if not best:
        why = answer.get("why") or answer["sentence"].rstrip(".")
        return f"no answer yet ({why})"
    nodes = f" on {best['nodes']} nodes" if best["nodes"] > 1 else ""
    choice = f"{best['stage']} x{best['devices']}{nodes}, batch {best['global_batch']}"
    return f"{choice}, is as good as any in {100 * answer['sure']:.0f} of 100 cases"


def _why_done(steps: list[Step], left: list[Cell]) -> str:
    if steps:
        return f"{steps[0].cell.name} would take more than is left of --spend"
    return f"none of the {len(left)} runs left would make that surer" if left else "no run is left"


def _steps(left: list[Cell], finished: list[Cell], answer: dict, usual: float, epochs: int) -> Iterator[Step]:
    """What tells something, the best first; `usual` are the device-hours where no others are known."""
    for cell, why in _beginning(left, finished):
        yield Step(cell, why, usual)
    for probe in answer["probes"]:
        for cell in filter(lambda cell: _is_of(cell, probe), left):
            yield Step(cell, probe["tells"], probe["gpu_hours"] * epochs / probe["epochs"])
    for cell, why in _further(left, answer):
        yield Step(cell, why, usual)
    best = answer["best"]
    if best and best["basis"] != "measured":
        for cell in filter(lambda cell: _is_of(cell, best), left):
            yield Step(cell, "the choice itself, which is only predicted", usual)


def _is_of(cell: Cell, place: dict) -> bool:
    """Whether the cell is what an option or a probe of the answer is about."""
    alike = cell.shape.gpus == 1 or cell.stage.own or cell.stage.name == place["stage"]
    shape = cell.shape.gpus, cell.shape.nodes, cell.batch_size
    return alike and shape == (place["devices"], place["nodes"], place["global_batch"])


def _beginning(left: list[Cell], finished: list[Cell]) -> Iterator[tuple[Cell, str]]:
    """What any fit needs: the ends of the batches on one device, and several devices, which a small batch
    shows best, as most of its step is exchange.
    """
    batches = {cell.batch_size for cell in finished if cell.shape.gpus == 1}
    on_one = [cell for cell in left if cell.shape.gpus == 1 and cell.batch_size not in batches]
    if on_one and not batches:
        yield max(on_one, key=lambda cell: cell.batch_size), "what one device does"
    elif on_one and len(batches) == 1:
        yield min(on_one, key=lambda cell: cell.batch_size), "what a step costs whatever its batch"
    known = {cell.stage for cell in finished if cell.shape.gpus > 1}
    on_several = [cell for cell in left if cell.shape.gpus > 1 and cell.stage not in known]
    if on_several:
        cell = min(on_several, key=lambda cell: (cell.shape.gpus, cell.batch_size))
        yield cell, "what the exchange between devices costs"


def _further(left: list[Cell], answer: dict) -> Iterator[tuple[Cell, str]]:
    """The next larger count, where the choice is the largest for which there is a prediction."""
    options = answer["options"]
    best = answer["best"] or max(options, key=lambda option: option["images_per_s"][1], default=None)
    most = max((option["devices"] for option in options), default=0)
    larger = [cell for cell in left if cell.shape.gpus > most]
    if larger and best and best["devices"] == most:

        def unlike(cell: Cell) -> tuple[float, ...]:
            other_batch = abs(math.log(cell.batch_size / best["global_batch"]))
            return cell.shape.gpus, cell.stage.name != best["stage"], other_batch

        cell = min(larger, key=unlike)
        yield cell, f"whether more than {most} devices are better still"
