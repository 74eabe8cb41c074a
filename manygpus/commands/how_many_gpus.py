"""How many GPUs to ask for: time and cost according to your runs, and how sure that is.

Try: python results/how_many_gpus.py results/runs --target 97 --deadline 00:30:00
"""

import argparse
import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from manygpus import json_document, project
from manygpus.config.command_line import (
    Parser,
    above_0,
    add_json,
    at_least,
    duration,
    given_path,
    list_of,
)
from manygpus.errors import entrypoint, print_line, print_table
from manygpus.jobs import slurm
from manygpus.jobs.site import read_site
from manygpus.jobs.stages import STAGES, Resources, resources
from manygpus.jobs.submit import partition_limits, waiting
from manygpus.record.columns import DDP
from manygpus.reports import page
from manygpus.reports.advice.answer import AnswerText, answer_for, number, report
from manygpus.reports.advice.choice import Constraints, Option, interval

RESULTS = project.folder() / "results"
# Of schemas/how_many.json.
SCHEMA_VERSION = 1
# A job gets so much more time than the prediction's upper end, and these minutes, as it is told to stop up to
# two minutes before its time limit.
TIME_LIMIT_FACTOR = 1.2
MINUTES_TO_STOP = 2


@entrypoint
def main() -> int:
    arguments = _parse()
    constraints = Constraints(
        target=arguments.target,
        epochs=arguments.epochs,
        deadline_s=arguments.deadline,
        budget_hours=arguments.budget,
        min_efficiency=arguments.min_efficiency / 100,
        gpus=arguments.gpus,
        batches=arguments.batch_size,
        gpus_per_node=arguments.gpus_per_node,
        price=arguments.price,
    )
    answer, skipped = answer_for(arguments.paths, constraints, set_number=arguments.set)
    if arguments.json:
        queue = [_start_as_json(start) for start in _queue(answer)]
        json_document.print_document(_as_json(answer) | {"skipped": skipped, "queue": queue})
    else:
        report(answer, constraints, arguments.out, skipped)
        _print_queue(answer, _queue(answer))
    return 0 if answer.answer.best else 1


@dataclass(frozen=True)
class Start:
    """When Slurm would start a job for an option.

    Attributes:
        minutes: the time limit that was asked for.
        past_waits: how many seconds jobs of this size have waited.
    """

    option: Option
    minutes: int
    trial: slurm.Trial
    past_waits: list[float]

    @property
    def result(self) -> datetime | None:
        """Return when the training would have ended; None if Slurm names no start."""
        if not self.trial.start:
            return None
        return self.trial.start + timedelta(seconds=interval(self.option.seconds).middle)


def _queue(text: AnswerText) -> list[Start]:
    """Ask Slurm, if it is here, when it would start a job of each shape that is advised: once for each."""
    if slurm.why_not_here():
        return []
    site = read_site()
    fastest: dict[Resources, Option] = {}
    best = text.answer.best
    for option in sorted(text.best_options(), key=lambda option: (option is not best, _middle(option))):
        if math.isfinite(interval(option.seconds).high):
            fastest.setdefault(_shape(option), option)
    partitions = partition_limits.read_partitions()
    waits = slurm.waits(waiting.DAYS)
    starts = []
    for shape, option in sorted(fastest.items(), key=lambda item: (item[0].gpus, item[0].nodes)):
        minutes = math.ceil(TIME_LIMIT_FACTOR * interval(option.seconds).high / 60) + MINUTES_TO_STOP
        trial = waiting.planned(site, shape, minutes, partitions)
        starts.append(Start(option, minutes, trial, waiting.of_size(waits, shape)))
    return starts


def _middle(option: Option) -> float:
    return interval(option.seconds).middle


def _shape(option: Option) -> Resources:
    """Return the shape of the job, in which all stages ask for the same GPUs, cores and memory."""
    return resources(STAGES[DDP], int(option.shape.devices), int(option.shape.nodes))


def _print_queue(text: AnswerText, starts: list[Start]) -> None:
    """Print when each result would be there, and which would be the first."""
    if not starts:
        return
    print_line(f"\nWhen will you have it? Slurm's estimates of {datetime.now():%Y-%m-%d %H:%M}:\n")
    rows = [("devices", "nodes", "batch", "--time", "minutes", "would start", "result", "your jobs waited")]
    for start in starts:
        option = start.option
        result = f"{start.result:%Y-%m-%d %H:%M}" if start.result else "-"
        begin = waiting.from_now(start.trial.start) if start.trial.start else "refused"
        waited = waiting.typical(start.past_waits) if start.past_waits else "-"
        shape = (str(option.shape.devices), str(option.shape.nodes), str(option.global_batch))
        rows.append((*shape, str(start.minutes), number(_middle(option) / 60), begin, result, waited))
    print_table(rows)
    for start in starts:
        if start.trial.refusal:
            print_line(f"{text.layout(start.option)}: Slurm says: {start.trial.refusal}")
    planned = [start for start in starts if start.result]
    if planned:
        first = min(planned, key=lambda start: start.result)
        print_line(f"\nThe first result would be that of {text.choice(first.option)}.")
    limit = f"`--time` is {TIME_LIMIT_FACTOR} times the upper end of its minutes, and {MINUTES_TO_STOP} more"
    print_line(page.wrapped(f"{limit}, in which a job stops. Mind that {waiting.CAUTION}."))


def _start_as_json(start: Start) -> dict[str, object]:
    return {
        "devices": start.option.shape.devices,
        "nodes": start.option.shape.nodes,
        "global_batch": start.option.global_batch,
        "time_limit_minutes": start.minutes,
        "start": start.trial.start.isoformat() if start.trial.start else None,
        "result": start.result.isoformat() if start.result else None,
        "refusal": start.trial.refusal,
        "past_waits_s": start.past_waits,
    }


def _as_json(text: AnswerText) -> dict[str, object]:
    """Return the answer as schemas/how_many.json describes it; intervals are [low, middle, high]."""
    answer = text.answer
    return {
        "schema_version": SCHEMA_VERSION,
        "goal": answer.goal,
        "why": text.why,
        "sure": answer.sure,
        "best": _option(answer.best) if answer.best else None,
        "options": [_option(option) for option in answer.options],
        "unknown": answer.unknown,
        "sentence": text.answered(),
    }


def _option(option: Option) -> dict[str, object]:
    return {
        "stage": option.stage,
        "devices": option.shape.devices,
        "nodes": option.shape.nodes,
        "global_batch": option.global_batch,
        "images_per_s": interval(option.images_per_s),
        "minutes": interval(option.seconds / 60),
        "gpu_hours": interval(option.hours),
        "efficiency": interval(option.efficiency),
        "break_even_images": interval(option.break_even),
        "basis": option.basis,
    }


def _parse() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    numbers = list_of(at_least(1))
    parser.add_argument(
        "paths",
        nargs="*",
        type=given_path,
        default=[RESULTS / "runs"],
        help="CSV files of runs, or folders that hold some (default: results/runs)",
    )
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument(
        "--target",
        type=above_0(100),
        metavar="PERCENT",
        help="test accuracy to reach: the time until then counts (default: one most batches have reached)",
    )
    goal.add_argument(
        "--epochs", type=at_least(1), metavar="N", help="count the time of this many epochs instead"
    )
    parser.add_argument(
        "--deadline", type=duration, metavar="TIME", help="finish within this time, in minutes or as HH:MM:SS"
    )
    parser.add_argument("--budget", type=above_0(), metavar="HOURS", help="use at most this many GPU-hours")
    parser.add_argument(
        "--min-efficiency",
        type=above_0(100),
        default=70,
        metavar="PERCENT",
        help="keep at least this efficiency: speedup over one GPU, divided by the GPUs (default: 70)",
    )
    parser.add_argument(
        "--gpus",
        type=numbers,
        default=(),
        metavar="LIST",
        help="numbers of GPUs to choose from (default: those measured, and twice the largest)",
    )
    parser.add_argument(
        "--batch-size",
        type=numbers,
        default=(),
        metavar="LIST",
        help="global batch sizes to choose from (default: those measured)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=at_least(1),
        metavar="N",
        help="GPUs in each of your nodes (default: the most that were used in one)",
    )
    parser.add_argument(
        "--price", type=above_0(), metavar="X", help="price of a GPU-hour; adds the cost to the answer"
    )
    parser.add_argument(
        "--set", type=at_least(1), metavar="N", help="which set of runs to use, if their settings differ"
    )
    add_json(parser, "the answer, of which nothing is then written,")
    parser.add_argument(
        "--out", type=given_path, default=RESULTS, help="folder to write to (default: results)"
    )
    return parser.parse_args()
