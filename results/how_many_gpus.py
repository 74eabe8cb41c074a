"""How many GPUs to ask for: time and cost according to your runs, how sure that is, and what would help.

Try: python results/how_many_gpus.py results/runs --target 97 --deadline 00:30:00
"""

import argparse
import json
import math
from pathlib import Path

from trainkit.advice.advice import NextRun, Option, interval
from trainkit.advice.answer import AnswerText, answer_for
from trainkit.advice.constraints import Constraints
from trainkit.config.command_line import Parser, above_0, at_least, duration, given_path, list_of
from trainkit.errors import run
from trainkit.files import explained

RESULTS = Path(__file__).resolve().parent


def main() -> int:
    own = _parse()
    constraints = Constraints(
        own.target, own.epochs, own.deadline, own.budget, own.min_efficiency / 100, own.gpus, own.batch_size,
        own.gpus_per_node, own.price,
    )  # fmt: skip
    words, skipped = answer_for(own.paths, constraints, own.set)
    if own.json:
        with explained("the answer cannot be written", "free the space, or read all of it."):
            print(json.dumps(_as_json(words) | {"skipped": skipped}, indent=1), flush=True)
    else:
        from trainkit.advice.report import report  # loads matplotlib, which takes a second

        report(words, constraints, own.out, [f"Skipped: {sentence}" for sentence in skipped])
    return 0 if words.answer.best else 1


def _as_json(words: AnswerText) -> dict[str, object]:
    """Return the answer for a program; intervals are [low, middle, high], None without a number."""
    answer = words.answer
    return {
        "goal": answer.goal,
        "why": words.why,
        "sure": answer.sure,
        "best": answer.best and _option(answer.best),
        "options": list(map(_option, answer.options)),
        "probes": [
            _place(run)
            | {"epochs": run.epochs, "gpu_hours": float(run.hours), "tells": run.shows}
            | {"command": words.command(run)}
            for run in answer.next_runs
        ],
        "unknown": answer.unknown,
        "sentence": words.answered(),
    }


def _option(option: Option) -> dict[str, object]:
    draws = {
        "images_per_s": option.images_per_s,
        "minutes": option.seconds / 60,
        "gpu_hours": option.hours,
        "efficiency": option.efficiency,
        "break_even_images": option.break_even,
    }
    intervals = {name: [x if math.isfinite(x) else None for x in interval(of)] for name, of in draws.items()}
    return _place(option) | intervals | {"basis": option.basis}


def _place(what: Option | NextRun) -> dict[str, object]:
    devices, nodes, batch = map(int, what.shape)  # older releases of pandas give NumPy's
    place = {"stage": what.stage, "devices": devices, "nodes": nodes}
    return place | {"global_batch": devices * batch}


def _parse() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    numbers = list_of(at_least(1))
    parser.add_argument(
        "paths", nargs="*", type=given_path, default=[RESULTS / "runs"],
        help="CSV files of runs, or folders that hold some (default: results/runs)",
    )  # fmt: skip
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument(
        "--target", type=above_0(100), metavar="PERCENT",
        help="the time until this test accuracy counts (default: one that most batches have reached)",
    )  # fmt: skip
    goal.add_argument("--epochs", type=at_least(1), metavar="N", help="the time of so many epochs counts")
    parser.add_argument(
        "--deadline", type=duration, metavar="TIME", help="done within so many minutes, or HH:MM:SS"
    )
    parser.add_argument("--budget", type=above_0(), metavar="HOURS", help="with so many GPU-hours at most")
    parser.add_argument(
        "--min-efficiency", type=above_0(100), default=70, metavar="PERCENT",
        help="speedup over one GPU, divided by the GPUs, of at least (default: 70)",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", type=numbers, default=(), metavar="LIST",
        help="choose among these (default: those measured, and twice the most)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=numbers, default=(), metavar="LIST",
        help="choose among these global batch sizes (default: those measured)",
    )  # fmt: skip
    parser.add_argument(
        "--gpus-per-node", type=at_least(1), metavar="N",
        help="that a node of yours has (default: the most that were used in one)",
    )  # fmt: skip
    parser.add_argument("--price", type=above_0(), metavar="X", help="money for a GPU-hour: adds the cost")
    parser.add_argument("--set", type=at_least(1), metavar="N", help="of runs with several settings, these")
    parser.add_argument(
        "--json", action="store_true", help="print the answer for a program, and write nothing"
    )
    parser.add_argument(
        "--out", type=given_path, default=RESULTS, help="folder to write to (default: results)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
