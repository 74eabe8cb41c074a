"""A sweep that stops when it knows enough: one run at a time, the cheapest informative one.

The advice room says what is known after each run.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from trainkit.advice.constraints import Constraints
from trainkit.jobs import sweep
from trainkit.jobs.sweep import PlannedRun, Sweep
from trainkit.runtime.errors import UserError, tell
from trainkit.schema.columns import DDP, DP, SINGLE


class Step(NamedTuple):
    """A candidate for the next run, the reason for it, and about how many device-hours it takes."""

    run: PlannedRun
    why: str
    hours: float


def run(asked: Sweep, planned: list[PlannedRun], constraints: Constraints, spend: float = math.inf) -> int:
    """Run those planned runs that the answer needs, in at most `spend` device-hours; return the exit code.

    The numbers of GPUs and the batches of `constraints` are those of the runs. The folder is already claimed.

    Raises:
        UserError: if a job is refused, or Slurm does not answer.
    """
    sweep.begin(asked, planned)

    def finish(run: PlannedRun) -> bool:
        return not sweep.finish(asked, [run], 1, asked.folder)

    def ask(among: list[PlannedRun]) -> tuple[set[str], float, dict]:
        names = {csv.parents[1].name for csv in asked.finished()}
        return names, asked.device_hours(), sweep.answer(asked, _choosing_from(among, constraints))

    hours_name = "worker-hours" if asked.on_cpu else "GPU-hours"
    failed = search(planned, ask, finish, spend, asked.opts.epochs, hours_name)
    among = _without_failed(planned, failed)
    return sweep.compare(asked, [run.name for run in failed], _choosing_from(among, constraints))


def of_use(planned: list[PlannedRun]) -> list[PlannedRun]:
    """Leave out redundant runs on one device: stage single is enough there, else ddp.

    Raises:
        UserError: if none is on one device.
    """
    on_one = {run.stage.name for run in planned if run.shape.gpus == 1} - {DP}
    if not on_one:
        raise UserError("--until-known starts on 1 GPU: add 1 to --gpus, and single or ddp to --stages.")
    alone = SINGLE if SINGLE in on_one else DDP
    return [run for run in planned if run.shape.gpus > 1 or run.stage.name == alone]


def search(
    planned: list[PlannedRun],
    ask: Callable[[list[PlannedRun]], tuple[set[str], float, dict]],
    finish: Callable[[PlannedRun], bool],
    spend: float = math.inf,
    epochs: int = sweep.EPOCHS,
    hours_name: str = "GPU-hours",
) -> list[PlannedRun]:
    """Run one after the other, print each time what is known, and return the runs that failed.

    `ask` gets the runs to choose from, and returns the names of the finished runs, the device-hours that all
    runs have taken, and the answer (`sweep.answer`); `finish` returns whether a run, of `epochs`, went well.
    """
    failed: list[PlannedRun] = []
    while True:
        among = _without_failed(planned, failed)
        names, hours, answer = ask(among)
        finished = [run for run in planned if run.name in names]
        left = [run for run in among if run.name not in names]
        usual = hours / max(len(finished), 1)  # more devices finish earlier: their hours differ little
        steps = list(_steps(left, finished, answer, usual, epochs))
        step = next((step for step in steps if hours + step.hours <= spend), None)
        if not step:
            why = f"none of the {len(left)} runs left would make that surer" if left else "no run is left"
            if steps:
                why = f"{steps[0].run.name} would take more than is left of --spend"
            so_far = f"{len(finished)} of {len(planned)} runs, {hours:.2g} {hours_name}"
            tell(f"done     {_known(answer)}; {why} ({so_far})")
            return failed
        about = f" (about {step.hours:.2g} {hours_name})" if step.hours else ""
        tell(f"known    {_known(answer)}; next {step.run.name}{about}: {step.why}")
        if not finish(step.run):
            failed.append(step.run)


def _without_failed(planned: list[PlannedRun], failed: list[PlannedRun]) -> list[PlannedRun]:
    """Leave out failed runs, and their other repeats, which would fail as well."""
    never = {run.configuration for run in failed}
    return [run for run in planned if run.configuration not in never]


def _choosing_from(planned: list[PlannedRun], constraints: Constraints) -> Constraints:
    gpus, batches = {run.shape.gpus for run in planned}, {run.batch_size for run in planned}
    return replace(constraints, gpus=tuple(sorted(gpus)), batches=tuple(sorted(batches)))


def _known(answer: dict) -> str:
    best = answer["best"]
    if not best:
        why = answer.get("why") or answer["sentence"].rstrip(".")
        return f"no answer yet ({why})"
    nodes = f" on {best['nodes']} nodes" if best["nodes"] > 1 else ""
    choice = f"{best['stage']} x{best['devices']}{nodes}, batch {best['global_batch']}"
    return f"{choice}, is as good as any in {100 * answer['sure']:.0f} of 100 cases"


def _steps(
    left: list[PlannedRun], finished: list[PlannedRun], answer: dict, usual: float, epochs: int
) -> Iterator[Step]:
    """List informative runs, the best first; `usual` is the device-hours if no better number is known."""
    yield from _needed_by_any_fit(left, finished, usual)
    for probe in answer["probes"]:
        for run in filter(lambda run: _is_of(run, probe), left):
            yield Step(run, probe["tells"], probe["gpu_hours"] * epochs / probe["epochs"])
    yield from _next_larger(left, answer, usual)
    best = answer["best"]
    if best and best["basis"] != "measured":
        for run in filter(lambda run: _is_of(run, best), left):
            yield Step(run, "the choice itself, which is only predicted", usual)


def _is_of(run: PlannedRun, place: dict) -> bool:
    """Return whether the run matches an option or a probe of the answer."""
    alike = run.shape.gpus == 1 or run.stage.own or run.stage.name == place["stage"]
    shape = run.shape.gpus, run.shape.nodes, run.batch_size
    return alike and shape == (place["devices"], place["nodes"], place["global_batch"])


def _needed_by_any_fit(left: list[PlannedRun], finished: list[PlannedRun], usual: float) -> Iterator[Step]:
    """List what any fit needs: the smallest and the largest batch on one device, and several devices.

    A small batch shows the latter best, as most of its step is communication.
    """
    batches = {run.batch_size for run in finished if run.shape.gpus == 1}
    on_one = [run for run in left if run.shape.gpus == 1 and run.batch_size not in batches]
    if on_one and not batches:
        yield Step(max(on_one, key=lambda run: run.batch_size), "what one device does", usual)
    elif on_one and len(batches) == 1:
        yield Step(min(on_one, key=lambda run: run.batch_size), "what a step costs whatever its batch", usual)
    known = {run.stage for run in finished if run.shape.gpus > 1}
    on_several = [run for run in left if run.shape.gpus > 1 and run.stage not in known]
    if on_several:
        run = min(on_several, key=lambda run: (run.shape.gpus, run.batch_size))
        yield Step(run, "what the exchange between devices costs", usual)


def _next_larger(left: list[PlannedRun], answer: dict, usual: float) -> Iterator[Step]:
    """List the next larger count, if the choice is the largest one with a prediction."""
    options = answer["options"]
    best = answer["best"] or max(options, key=lambda option: option["images_per_s"][1], default=None)
    most = max((option["devices"] for option in options), default=0)
    larger = [run for run in left if run.shape.gpus > most]
    if larger and best and best["devices"] == most:

        def unlike(run: PlannedRun) -> tuple[float, ...]:
            other_batch = abs(math.log(run.batch_size / best["global_batch"]))
            return run.shape.gpus, run.stage.name != best["stage"], other_batch

        run = min(larger, key=unlike)
        yield Step(run, f"whether more than {most} devices are better still", usual)
