"""The answers of `advice.py` in words: sentences, a table of texts, commands."""

import math
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from trainkit.advice.advice import AS_GOOD, SURE, Answer, NextRun, Option, advise, all_reduces, interval, sets
from trainkit.advice.constraints import Constraints
from trainkit.advice.scaling import Scaling
from trainkit.compare import comparison, doubts
from trainkit.errors import UserError
from trainkit.record.columns import (
    COLUMNS,
    DDP,
    OWN_LOOP,
    OWN_OPTIMIZER,
    SINGLE,
    STAGE_FOLDERS,
    UNKNOWN,
    Role,
    lr_factor,
)

MOST_APART = 1.5  # times, between the medians of equal runs: beyond, something changed between them
MOST_ERROR = 0.3  # of the best model on held-out runs: beyond, it explains nothing
LEGEND = (
    "In brackets: the 90 % interval. eff. %: speedup over one device with the same global batch (or as a "
    "note says), divided by the devices. minutes: from the start of the process, with its evaluations. pays "
    "from: images per epoch from which a run, with its start, finishes before a run on one device; 0: at "
    "any size."
)


def checked(answer: Answer) -> Answer:
    """Return the answer, without a recommendation if the runs cannot be right or no model explains them."""
    why, devices = _what_cannot_be_right(answer)
    if not why:
        return answer
    again = [option for option in answer.options if option.runs and devices in (0, option.shape.devices)]
    reached = [option for option in again if np.isfinite(np.median(option.seconds))]
    reached.sort(key=lambda option: option.next_hours)
    next_runs = [option.next_run("whether the machine was quiet") for option in reached[:1]]
    return replace(answer, best=None, why=f"{why}: measure again", sure=0.0, next_runs=next_runs)


def _what_cannot_be_right(answer: Answer) -> tuple[str, int]:
    """Return what, or "", and the number of devices of the runs in doubt; 0 for any."""
    model = _model(answer)
    medians = {shape: [np.median(run) for run in runs] for shape, runs in model.measured.items()}
    apart, shape = max((max(of_runs) / min(of_runs), shape) for shape, of_runs in medians.items())
    if apart > MOST_APART:
        return (
            f"equal runs on {shape.devices} device(s), {shape.batch} images on each, differ by a factor of "
            f"{apart:.1f}, as before and after a repair (give only the files that are still valid)"
        ), shape.devices
    measured = [option.efficiency for option in answer.options if option.shape.devices > 1 and option.runs]
    known = [np.median(efficiency) for efficiency in measured if np.isfinite(efficiency).all()]
    if known and min(known) > doubts.MOST_EFFICIENCY:
        return "all efficiencies are above 100 %, so the runs on one device must have been disturbed", 1
    error = model.errors[model.model]
    if error > MOST_ERROR:
        return (
            f"no model explains these runs: the best, {model.model}, is off by {100 * error:.0f} % on runs "
            "that were left out of its fit"
        ), 0
    return "", 0


class AnswerText:
    """An `advice.Answer` in words, in the units of its devices.

    Args:
        rows: of the chosen set.
        price: of a device-hour; without it no cost is given.
    """

    def __init__(self, answer: Answer, rows: pd.DataFrame, price: float | None = None) -> None:
        self.answer = answer
        self.rows = rows
        self.price = price
        self.on_cpu = comparison.is_cpu(rows.device_name.iloc[0])
        self.units, self.hours = ("CPU workers", "worker-hours") if self.on_cpu else ("GPUs", "GPU-hours")
        self.why = answer.why.replace("GPU-hours", self.hours)

    def choice(self, option: Option) -> str:
        """Name the option, as `2 GPUs on 1 node, DDP, batch 256`."""
        devices, nodes, _ = option.shape
        units = self.units if devices > 1 else self.units[:-1]
        where = f"{devices} {units} on {nodes} node{'s' * (nodes > 1)}"
        return f"{where}, {comparison.stage_name(option.stage)}, batch {option.global_batch}"

    def answered(self) -> str:
        """Return the recommendation and how sure it is, or that there is none, and the reason."""
        best, goal, sure = self.answer.best, self.answer.goal, self.answer.sure
        if best is None:
            return f"No recommendation for {goal}: {self.why}."
        how = "Sure" if sure >= SURE else "Not sure"
        if not best.runs:
            how = "It was never run, and the models may not hold there"
        cost = f", which cost {text(self.price * best.hours)}," if self.price else ""
        return (
            f"Ask for {self.choice(best)}: {text(best.images_per_s)} images/s, {text(best.seconds / 60)} min "
            f"and {text(best.hours)} {self.hours}{cost} "
            f"{'to' if 'accuracy' in goal else 'for'} {goal} ({best.basis}). It is {self.why}. "
            f"{how}: if the measurements are varied as much as they scatter, it is the best choice, or "
            f"within {100 * AS_GOOD:.0f} % of it, in {min(round(100 * sure), 99)} of 100 cases."
        )

    def options(self) -> list[Option]:
        """Return all options, from few devices to many."""
        return sorted(self.answer.options, key=lambda option: (*_layout(option), option.global_batch))

    def best_options(self) -> list[Option]:
        """Return the fastest option for each device count, and all with the batch of the best one."""
        options, best = self.options(), self.answer.best
        fastest: dict[tuple, int] = {}
        for i in sorted(range(len(options)), key=lambda i: np.median(options[i].seconds)):
            fastest.setdefault(_layout(options[i]), i)
        batch = best.global_batch if best else 0
        return [o for i, o in enumerate(options) if o.global_batch == batch or i in fastest.values()]

    def table(self, options: list[Option]) -> tuple[pd.DataFrame, list[str]]:
        """Return the options as texts, a row each, and the meanings of the marks in the column `note`."""
        marks: dict[str, str] = {}
        rows = [
            {
                "stage": comparison.stage_name(option.stage),
                "devices": str(option.shape.devices),
                "nodes": str(option.shape.nodes),
                "batch": str(option.global_batch),
                "images/s": text(option.images_per_s),
                "eff. %": text(100 * option.efficiency),
                "minutes": text(option.seconds / 60, "not reached"),
                self.hours: text(option.hours, "not reached"),
                **({"cost": text(self.price * option.hours, "not reached")} if self.price else {}),
                "pays from": text(option.break_even) if option.shape.devices > 1 else "-",
                "note": _note(option, marks),
            }
            for option in options
        ]
        table = pd.DataFrame(rows)
        return table if (table.nodes != "1").any() else table.drop(columns="nodes"), list(marks.values())

    def trust(self) -> list[str]:
        """Say how far to trust the answer: the model and its error, the intervals, doubtful measurements."""
        model = _model(self.answer)
        error = model.errors[model.model]
        tested = (
            "there are too few runs to leave some out of its fit and test it on them"
            if math.isnan(error)
            else f"on runs left out of its fit, it is off by {100 * error:.1f} % (root mean square)"
        )
        lines = [
            f"What was not measured is predicted by the model {model.model} (results/README.md says what it "
            f"assumes); {tested}.",
            "An interval should contain the truth in 9 of 10 cases, on this machine as it was then: it does "
            "not cover another network, busy neighbours or another version of the program.",
        ]
        doubt = doubts.sentence(comparison.compare(comparison.summarize(self.rows)))
        return [*lines, doubt] if doubt else lines

    def unknown(self) -> list[str]:
        """List what is not predicted, and why."""
        return [f"Not predicted, {clause}." for clause in self.answer.unknown]

    def next_runs(self) -> list[tuple[str, str]]:
        """Return the runs that would help, cheapest first: the use and cost of each, and its command."""
        best, runs = self.answer.best, self.answer.next_runs
        if best and not best.runs and not runs:
            runs = [best.next_run("whether the prediction holds")]
        ours = self.rows.stage.isin(comparison.TUTORIAL_STAGES).any()
        own = "" if ours else " (with your script and its own options)"
        return [
            (f"{run.shows}, for {number(run.hours)} {self.hours} at most{own}", self.command(run))
            for run in runs
        ]

    def command(self, run: NextRun) -> str:
        """Return the command that starts the run from the top folder, with the settings of the set."""
        row, (devices, nodes, batch) = self.rows.iloc[0], run.shape
        words = [f"OMP_NUM_THREADS={row.threads_per_worker}"] * self.on_cpu
        words += ["python", f"{STAGE_FOLDERS.get(run.stage, STAGE_FOLDERS[DDP])}/submit.py"]
        places = ["--gpus", devices] * (run.stage != SINGLE) + ["--nodes", nodes] * (nodes > 1)
        if row.recipe == OWN_LOOP:  # its other options are not ours
            return shlex.join(map(str, [*words, *places, "--plain", "YOUR_SCRIPT.py"]))
        if run.stage not in comparison.TUTORIAL_STAGES:
            words += ["--script", "YOUR_SCRIPT.py"]
        words += places
        words += ["--batch-size", devices * batch, "--epochs", run.epochs]
        words += ["--train-size", self.rows.images.max()]
        # With an earlier run's seed it would learn the same again.
        if len(seeds := self.rows.seed[self.rows.global_batch == devices * batch]):
            words += ["--seed", seeds.max() + 1]
        # The data of a script of one's own is no word of that option.
        dataset = "synthetic" if row.dataset == "synthetic" else COLUMNS["dataset"].default
        given = row.to_dict() | {"dataset": dataset}
        if row.recipe == OWN_OPTIMIZER:  # the script makes it itself
            given["recipe"] = COLUMNS["recipe"].default
        if row.lr != UNKNOWN:  # before the rule by which it grows with the batch
            given["lr"] = f"{float(row.lr) / lr_factor(row.lr_scale, row.global_batch):.4g}"
        for name in comparison.MUST_BE_EQUAL:
            column = COLUMNS[name]
            if column.option and column.role != Role.SIZE and given[name] not in (column.default, UNKNOWN):
                words += [column.option] if column.default is False else [column.option, given[name]]
        return shlex.join(map(str, words + ["--no-cuda"] * self.on_cpu))


def answer_for(
    paths: list[Path], constraints: Constraints, set_number: int | None = None
) -> tuple[AnswerText, list[str]]:
    """Answer for the runs in these files and folders, with a sentence for each thing left out.

    Raises:
        UserError: if there are none, if they belong to several sets and `set_number` chooses none, or if they
            support no answer.
    """
    rows, skipped = comparison.load_some(paths)
    rows = _chosen_set(rows, set_number)
    measured, not_read = all_reduces(paths, rows)
    answer = checked(advise(rows, constraints, measured))
    return AnswerText(answer, rows, constraints.price), skipped + not_read


def _chosen_set(rows: pd.DataFrame, number: int | None) -> pd.DataFrame:
    """Return the set that was chosen, or the only one."""
    found = sets(rows)
    if len(found) == 1 and (number or 1) > 1:
        raise UserError("these runs are of one set: leave out --set.")
    if len(found) == 1 or number and number <= len(found):
        return found[(number or 1) - 1][1]
    listed = "; ".join(
        f"{i}: {name} ({group.run_id.nunique()} runs)" for i, (name, group) in enumerate(found, 1)
    )
    raise UserError(
        f"these runs are of {len(found)} sets that cannot be fitted together: {listed}. Choose one with "
        "--set N."
    )


def number(x: float, infinite: str = "never") -> str:
    """Format a number with three digits; a dash if it is unknown."""
    if math.isnan(x):
        return "-"
    return format(float(format(x, ".3g")), ",.10g") if math.isfinite(x) else infinite


def text(draws: np.ndarray, infinite: str = "never") -> str:
    """Format the middle, and the interval in brackets if it has a width."""
    if np.isnan(draws).all():
        return "-"
    low, middle, high = (number(x, infinite) for x in interval(draws))
    return middle if low == high else f"{middle} ({low}..{high})"


def _model(answer: Answer) -> Scaling:
    """Return the model of the recommended training."""
    stage = answer.best.stage if answer.best else ""
    return answer.models.get(stage) or next(iter(answer.models.values()))


def _layout(option: Option) -> tuple[object, ...]:
    return option.shape.devices, option.shape.nodes, option.stage


def _note(option: Option, marks: dict[str, str]) -> str:
    """Return `measured` or `predicted`, with a mark that refers to a note."""
    known = "measured" if option.runs else "predicted"
    rest = option.basis.removeprefix(known).lstrip(":, ")
    if option.efficiency_at == "batch per device" and option.shape.devices > 1:
        rest = "; ".join(filter(None, [rest, "eff. % against one device with the same batch per device"]))
    if not rest:
        return known
    line = marks.setdefault(rest, f"[{len(marks) + 1}] {rest}.")
    return f"{known} {line.partition(' ')[0]}"
