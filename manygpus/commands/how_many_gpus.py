"""How many GPUs to ask for: time and cost according to your runs, and how sure that is.

Try: python results/how_many_gpus.py results/runs --target 97 --deadline 00:30:00
"""

import argparse
import json
import math

from manygpus.config.command_line import Parser, above_0, at_least, duration, given_path, list_of
from manygpus.errors import REPOSITORY, entrypoint
from manygpus.reports.advice.answer import AnswerText, answer_for, report
from manygpus.reports.advice.choice import Constraints, Option, interval

RESULTS = REPOSITORY / "results"


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
        print(json.dumps(_as_json(answer) | {"skipped": skipped}, indent=1), flush=True)
    else:
        report(answer, constraints, arguments.out, skipped)
    return 0 if answer.answer.best else 1


def _as_json(text: AnswerText) -> dict[str, object]:
    """Return the answer for a program; intervals are [low, middle, high], None without a number."""
    answer = text.answer
    return {
        "goal": answer.goal,
        "why": text.why,
        "sure": answer.sure,
        "best": _option(answer.best) if answer.best else None,
        "options": [_option(option) for option in answer.options],
        "unknown": answer.unknown,
        "sentence": text.answered(),
    }


def _option(option: Option) -> dict[str, object]:
    draws = {
        "images_per_s": option.images_per_s,
        "minutes": option.seconds / 60,
        "gpu_hours": option.hours,
        "efficiency": option.efficiency,
        "break_even_images": option.break_even,
    }
    # Numbers of pandas are none that JSON knows.
    fields: dict[str, object] = {
        "stage": option.stage,
        "devices": int(option.shape.devices),
        "nodes": int(option.shape.nodes),
        "global_batch": int(option.shape.global_batch),
    }
    for name, values in draws.items():
        fields[name] = [value if math.isfinite(value) else None for value in interval(values)]
    fields["basis"] = option.basis
    return fields


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
    parser.add_argument(
        "--json", action="store_true", help="print the answer as JSON, for a program, and write nothing"
    )
    parser.add_argument(
        "--out", type=given_path, default=RESULTS, help="folder to write to (default: results)"
    )
    return parser.parse_args()
