"""What does `sweep.py --until-known` save? Recorded sweeps, of which each run appears when it is asked for.

python tools/bench/until_known.py results/sample/cpu-xeon-2-cores/scaling/w32.csv
"""

import argparse
import math
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd

from trainkit.advice.advice import AS_GOOD, Answer, Constraints, Option, advise, sets
from trainkit.advice.answer import AnswerText, checked
from trainkit.compare import comparison
from trainkit.compare.page import markdown
from trainkit.jobs import until_known
from trainkit.jobs.stages import STAGES, resources
from trainkit.jobs.sweep import PlannedRun
from trainkit.runtime.command_line import Parser
from trainkit.runtime.errors import UserError, run
from trainkit.runtime.files import check_writable

HERE = Path(__file__).resolve().parent
SAMPLES = HERE.parents[1] / "results" / "sample" / "cpu-xeon-2-cores"
RECORDED = [SAMPLES / "scaling" / "w8.csv", SAMPLES / "scaling" / "w32.csv", SAMPLES / "width"]
TARGETS = (94, 95, 96, 97)  # % test accuracy


def _label(option: Option) -> str:
    """Name an option in a few words."""
    devices, nodes = option.shape[:2]
    return (
        f"{option.stage} x{devices}{f' on {nodes} nodes' if nodes > 1 else ''}, batch {option.global_batch}"
    )


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sweeps", nargs="*", type=Path, default=RECORDED, metavar="PATH",
        help="the CSVs of a sweep (default: those of results/sample)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="for the CSV (default: tools/bench/out)"
    )
    args = parser.parse_args()
    check_writable(args.out, "the benchmark", "give another --out.")
    table = pd.DataFrame([row for folder in args.sweeps for row in of_sweep(folder)])
    table.round(4).to_csv(args.out / "until_known.csv", index=False)
    shown = summary(table)
    (args.out / "until_known.md").write_text(markdown(shown.astype(str)) + "\n")
    print(f"{table.round(4).to_string(index=False)}\n\n{shown.to_string(index=False)}")


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return for each sweep how often the choice was as good, and what share of the device time it took."""
    lines = []
    for name, rows in [*table.groupby("sweep", sort=False), ("all", table)]:
        share = rows.hours.sum() / rows.all_hours.sum()
        lines.append((name, len(rows), int((rows.dearer <= AS_GOOD).sum()), f"{100 * share:.0f} %"))
    return pd.DataFrame(lines, columns=["recorded sweep", "wishes", "as good a choice", "device time"])


def of_sweep(folder: Path) -> list[dict[str, object]]:
    """Return a row for each set of comparable runs in the folder, and each question that it can answer."""
    rows, _ = comparison.load([folder])
    return [
        Replay(runs, constraints).row({"sweep": ", ".join(filter(None, [folder.stem, name]))})
        for name, runs in sets(rows)
        for constraints in questions_for(runs)
    ]


def questions_for(rows: pd.DataFrame) -> list[Constraints]:
    """Return the targets that were reached, as soon as can be, and within 1.5 times the shortest time."""
    lists = {"gpus": tuple(sorted(set(rows.devices))), "batches": tuple(sorted(set(rows.global_batch)))}
    found = []
    for target in TARGETS:
        try:
            fastest = advise(rows, Constraints(target, **lists)).best
        except UserError:
            continue
        if fastest:
            deadline = 1.5 * float(np.median(fastest.seconds))
            found += [Constraints(target, **lists), Constraints(target, deadline_s=deadline, **lists)]
    return found


class Replay:
    """A sweep with --until-known over runs that are there: `names` are those of the runs that it chose."""

    def __init__(self, rows: pd.DataFrame, constraints: Constraints) -> None:
        self._rows, self._constraints, self._planned = rows, constraints, {}
        last = rows.sort_values("epoch").groupby("run_id").last().sort_values("started_at")
        self._hours = last.devices * last.elapsed_s / 3600
        repeats: Counter[tuple] = Counter()
        for one in last.itertuples():
            key = one.stage, one.devices, one.nodes, one.global_batch
            repeats[key] += 1
            stage = STAGES[one.stage]
            shape = resources(stage, one.devices, one.nodes)
            self._planned[PlannedRun(stage, shape, one.global_batch, None, None, repeats[key])] = one.Index
        self.names: list[str] = []
        self.printed = StringIO()
        planned = sorted(self._planned, key=lambda run: (run.repeat, run.shape.gpus))
        with redirect_stdout(self.printed):
            until_known.search(until_known.of_use(planned), self._ask, self._finish)

    def row(self, first: dict[str, object]) -> dict[str, object]:
        """Return the recommendation from all runs, and from the chosen ones."""
        everything, known = advise(self._rows, self._constraints), self._answer()
        best = known.best if known else None
        return first | {
            "goal": everything.goal,
            "deadline_s": self._constraints.deadline_s or "",
            "all_runs": len(self._planned),
            "all_hours": self._hours.sum(),
            "all_choose": _label(everything.best),
            "all_sure": everything.sure,
            "runs": len(self.names),
            "hours": self._spent(),
            "choose": _label(best) if best else "",
            "sure": known.sure if known else 0.0,
            "dearer": _extra_cost(everything, best, self._constraints) if best else math.inf,
        }

    def _ask(self, _: list[PlannedRun]) -> tuple[set[str], float, dict]:
        known, none = self._answer(), {"best": None, "options": [], "probes": [], "sentence": ""}
        return set(self.names), self._spent(), AnswerText(known, self._rows).as_json() if known else none

    def _finish(self, run: PlannedRun) -> bool:
        self.names.append(run.name)
        return True

    def _answer(self) -> Answer | None:
        chosen = self._rows[self._rows.run_id.isin(self._runs())]
        try:
            return checked(advise(chosen, self._constraints)) if self.names else None
        except UserError:
            return None

    def _runs(self) -> list[str]:
        return [run_id for run, run_id in self._planned.items() if run.name in self.names]

    def _spent(self) -> float:
        return float(self._hours[self._runs()].sum())


def _extra_cost(everything: Answer, chosen: Option, constraints: Constraints) -> float:
    """Return what the chosen costs by all runs over their choice, less 1; infinite if a rule is broken."""
    (alike,) = (o for o in everything.options if (o.stage, o.shape) == (chosen.stage, chosen.shape))
    wasteful = alike.shape.devices > 1 and np.median(alike.efficiency) < constraints.min_efficiency
    if wasteful or np.median(alike.seconds) > (constraints.deadline_s or math.inf):
        return math.inf
    cost, least = (
        np.median(o.hours if constraints.deadline_s else o.seconds) for o in (alike, everything.best)
    )
    return float(cost / least - 1)


if __name__ == "__main__":
    run(main)
