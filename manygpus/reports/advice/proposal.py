"""The scaling section of a proposal for compute time: two paragraphs, the tables, and a figure as PDF.

Only what was measured stands in it. Gauss, INCITE and ARCHER2 ask for the same things: absolute
times, speedup and parallel efficiency from the smallest number of GPUs on, the hardware and the software of
the runs, and their cost in node-hours.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from manygpus.errors import UserError, print_line
from manygpus.files import replacing
from manygpus.record.columns import DDP, DP, SINGLE
from manygpus.reports import comparison, doubts, page
from manygpus.reports.advice.answer import choose_set, counted, number
from manygpus.reports.page import Heading, Page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The parallel efficiency (%) below which reviewers ask for a reason.
LEAST_EFFICIENCY = 70
FEWEST_RUNS = 3
HOUR_SECONDS = 3_600
# Outside of tables, whose cells tabulate escapes.
LATEX_ESCAPES = str.maketrans(
    {character: rf"\{character}" for character in "%&#_$"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)
METHODS = {DDP: "DistributedDataParallel", DP: "DataParallel"}
LEGEND = (
    "{speed}: the median over all epochs but the first of each process. s per epoch: the time of an epoch at "
    "this speed, without evaluations. speedup and efficiency: relative to the first row. node-hours: of an "
    "epoch. runs: how often each row was repeated."
)


@dataclass(frozen=True)
class Series:
    """Runs on several numbers of devices that have one batch size in common.

    Args:
        kind: strong or weak scaling, in words.
        batch: the batch size that all rows share, in words.
        varying: the column of the other batch size, and its header.
        rows: rows of a comparison, from few devices to many, with `speed` in the unit of the training,
            `epoch_s`, `step_ms` and `node_hours`; `times_as_fast` and `percent` (of efficiency) are relative
            to the first row.
    """

    kind: str
    batch: str
    varying: tuple[str, str]
    rows: pd.DataFrame


class ScalingSection:
    """What a proposal says about the scaling of one training.

    Args:
        rows: the rows of one set of `comparison.load`.

    Raises:
        UserError: if the runs are of several trainings, or none differ only in the number of devices.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self.on_cpu = comparison.is_cpu(rows.device_name.iloc[0])
        self.unit = "CPU worker" if self.on_cpu else "GPU"
        self.samples = comparison.samples_in_words(rows)
        self.stage = _stage_of(rows)
        self.rows = rows[rows.stage.isin([SINGLE, self.stage])]
        table = comparison.compare(comparison.summarize(self.rows))
        in_its_unit, self.speed_unit = comparison.in_its_unit(table)
        table = table.assign(speed=in_its_unit.images_per_s)[table.images_per_s.notna()]
        # On one device a run of stage single comes first, and is the baseline.
        is_repeated = table.duplicated(["devices", "global_batch", "train_images"])
        table = table[~(is_repeated & (table.devices == 1))]
        self.gpus_per_node = math.ceil((table.devices / table.nodes).max())
        self.strong = self._series(table, "Strong scaling", equal="global_batch", varying="batch_per_device")
        self.weak = self._series(table, "Weak scaling", equal="batch_per_device", varying="global_batch")
        self.series = [series for series in (self.strong, self.weak) if series]
        if not self.series:
            raise UserError(
                f"a scaling section needs runs of three epochs on at least two numbers of {self.unit}s, with "
                f"the same global batch or the same batch per {self.unit}: make them with a sweep."
            )

    def _series(self, table: pd.DataFrame, kind: str, equal: str, varying: str) -> Series | None:
        """Return the series with the most numbers of devices; of several such batch sizes, the largest."""
        series = [rows for _, rows in table.groupby([equal, "train_images"]) if rows.devices.nunique() > 1]
        if not series:
            return None
        rows = max(series, key=lambda rows: (rows.devices.nunique(), rows.devices.max(), rows[equal].max()))
        rows = rows.sort_values(["devices", "nodes"], kind="stable")
        first = rows.iloc[0]
        epoch_s = rows.train_images / rows.images_per_s
        times_as_fast = rows.images_per_s / first.images_per_s
        rows = rows.assign(
            epoch_s=epoch_s,
            step_ms=1000 * rows.global_batch / rows.images_per_s,
            times_as_fast=times_as_fast,
            percent=100 * times_as_fast * first.devices / rows.devices,
            node_hours=epoch_s / HOUR_SECONDS * rows.devices / self.gpus_per_node,
        )
        headers = {"global_batch": "global batch", "batch_per_device": f"batch per {self.unit}"}
        batch = f"a {headers[equal]} of {first[equal]:,} {self.samples}"
        return Series(kind, batch, (varying, headers[varying]), rows)

    # --- the section --------------------------------------------------------------------------------

    def blocks(self) -> list[str | pd.DataFrame]:
        """Return its paragraphs and tables."""
        blocks = [self.what_was_measured(), self.results()]
        for series in self.series:
            blocks += [f"{series.kind} with {series.batch}:", self._table(series)]
        return [*blocks, LEGEND.format(speed=f"{self.speed_unit}/s")]

    def what_was_measured(self) -> str:
        """Return the paragraph about the training, the hardware, the software and the method."""
        row = self.series[0].rows.iloc[0]
        weights = f" ({row.parameters:,} parameters)" if row.parameters else ""
        method = METHODS.get(self.stage, self.stage)
        software = f"PyTorch {_all_of(self.rows.torch_version)}"
        if self.rows.cuda_version.any():
            software += f", CUDA {_all_of(self.rows.cuda_version)}"
        if self.rows.git_commit.any():
            software += f", commit {_all_of(self.rows.git_commit)} of the code"
        return (
            f"We measured the training of {row.model}{weights} on {row.dataset}, with {row.train_images:,} "
            f"{self.samples} per epoch, in {row.precision}. The runs used {row.device_name}, at most "
            f"{counted(self.gpus_per_node, self.unit)} per node, and {method} ({software}). Speeds are "
            "medians over all epochs except the first one of each process, which is a warm-up."
        )

    def results(self) -> str:
        """Return the paragraph with the numbers of the tables."""
        first = self.series[0].rows.iloc[0]
        last = self.series[0].rows.iloc[-1]
        sentences = ["These are numbers of CPU workers, not of GPUs."] if self.on_cpu else []
        if self.strong:
            rows = self.strong.rows
            efficient = rows[rows.percent >= LEAST_EFFICIENCY].iloc[-1]
            sentences += [
                self._result(self.strong, quantity="time of an epoch", column="epoch_s", unit="s"),
                f"The largest number measured with an efficiency of at least {LEAST_EFFICIENCY} % is "
                f"{self._layout(efficient)}.",
            ]
        if self.weak:
            sentences.append(self._result(self.weak, quantity="time of a step", column="step_ms", unit="ms"))
        sentences.append(
            f"An epoch costs {number(first.node_hours)} node-hours on {self._layout(first)}, and "
            f"{number(last.node_hours)} on {self._layout(last)}."
        )
        return " ".join(sentences)

    def _result(self, series: Series, quantity: str, column: str, unit: str) -> str:
        first = series.rows.iloc[0]
        last = series.rows.iloc[-1]
        return (
            f"{series.kind} with {series.batch}: from {self._layout(first)} to {self._layout(last)}, the "
            f"{quantity} changes from {number(first[column])} {unit} to {number(last[column])} {unit}. That "
            f"is a speedup of {last.times_as_fast:.2f} and a parallel efficiency of {last.percent:.0f} %."
        )

    def _layout(self, row: pd.Series) -> str:
        return f"{counted(row.devices, self.unit)} on {counted(row.nodes, 'node')}"

    def _table(self, series: Series) -> pd.DataFrame:
        rows = series.rows
        batch, batch_header = series.varying
        columns = {
            f"{self.unit}s": rows.devices.map(str),
            "nodes": rows.nodes.map(str),
            batch_header: rows[batch].map("{:,}".format),
            f"{self.speed_unit}/s": rows.speed.map(_cell),
            "ms per step": rows.step_ms.map(_cell),
            "s per epoch": rows.epoch_s.map(_cell),
            "speedup": rows.times_as_fast.map("{:.2f}".format),
            "efficiency (%)": rows.percent.map("{:.0f}".format),
            "node-hours": rows.node_hours.map(_cell),
            "runs": rows.runs.map(str),
        }
        return pd.DataFrame(columns)

    def figure(self) -> "Figure":
        """Draw speed and efficiency over the number of devices."""
        from manygpus.reports import figures

        lines = {}
        for series in self.series:
            points = series.rows.drop_duplicates("devices").set_index("devices")
            lines[f"{series.kind}, {series.batch.removeprefix('a ')}"] = points[["speed", "percent"]]
        return figures.scaling(lines, unit=f"{self.unit}s", speed=f"{self.speed_unit}/s")

    # --- what its author has to know ----------------------------------------------------------------

    def objections(self) -> list[str]:
        """Say what a reviewer would object to, and what to measure instead."""
        shown = pd.concat([series.rows for series in self.series])
        sentences = []
        if self.on_cpu:
            sentences.append(
                f"{self.rows.device_name.iloc[0]}: CPU workers standing in for GPUs. Their numbers are "
                "no basis for a proposal that asks for GPUs."
            )
        fewest = shown.devices.min()
        if fewest > 1:
            sentences.append(
                f"No run used one {self.unit}: speedup and efficiency are relative to {fewest} {self.unit}s. "
                "Say why, as when the model does not fit into the memory of one."
            )
        if shown.nodes.max() == 1:
            sentences.append(
                "All runs used one node, so nothing here shows how the training scales over several. Measure "
                "on as many as your jobs will use."
            )
        if not self.strong:
            sentences.append("No strong scaling: no runs on several numbers have the same global batch.")
        if not self.weak:
            sentences.append(
                f"No weak scaling: no runs on several numbers have the same batch per {self.unit}."
            )
        few = shown[shown.runs < FEWEST_RUNS]
        if len(few):
            sentences.append(
                f"{len(few)} of {len(shown)} rows have fewer than {FEWEST_RUNS} runs: give --repeats "
                f"{FEWEST_RUNS}."
            )
        if self.rows.torch_version.nunique() > 1:
            sentences.append("The runs mix versions of PyTorch: measure with one.")
        return sentences + doubts.legend(shown)

    def still_to_write(self) -> list[str]:
        """List what no record knows."""
        return [
            f"A node counts as {counted(self.gpus_per_node, self.unit)}, the most that a run used on one. If "
            "your site charges whole nodes, use all of their GPUs.",
            "The request: node-hours of an epoch, times the epochs of a run, times the runs that you plan, "
            "plus evaluations, starts, and runs that fail.",
            "The name, processors and network of the machine, and the versions of your other software.",
            "Why this model and this data are representative of the runs that you ask for.",
        ]


def report(paths: list[Path], out: Path, set_number: int | None = None) -> None:
    """Print the section for the runs under `paths`, and write it to `out`.

    Raises:
        UserError: if there are no runs, if they are of several sets and `set_number` chooses none, if they
            support no such section, or if `out` cannot be written to.
    """
    from manygpus.reports import figures

    rows, skipped = comparison.load_some(paths)
    section = ScalingSection(choose_set(rows, set_number))
    remarks = [*section.objections(), *section.still_to_write(), *(f"Skipped: {name}" for name in skipped)]
    written = Page("Scaling", [*section.blocks(), Heading("Before you submit this"), remarks])
    print_line("\n\n".join(map(page.on_terminal, written.blocks)) + "\n")
    with page.writing_to(out):
        figures.save({"proposal.pdf": section.figure()}, out)
        page.write(out / "proposal.md", written)
        with replacing(out / "proposal.tex") as file:
            file.write(_as_latex(section.blocks()))
    print_line(f"Written to {out}: proposal.md, proposal.tex, proposal.pdf")


def _as_latex(blocks: list[str | pd.DataFrame]) -> str:
    """Lay out the section for a document that uses the packages booktabs and graphicx."""
    lines = ["% What proposal.md says below its tables is for you, and not in here.", r"\section{Scaling}"]
    for block in blocks:
        if isinstance(block, pd.DataFrame):
            # It escapes its cells and header itself.
            block = block.to_markdown(
                index=False, tablefmt="latex_booktabs", disable_numparse=True, stralign="right"
            )
            lines.append(block)
        else:
            lines.append(block.translate(LATEX_ESCAPES))
    return "\n\n".join([*lines, r"\includegraphics[width=\linewidth]{proposal.pdf}"]) + "\n"


def _cell(value: float) -> str:
    """Format a number with as many digits as it takes to compute the speedup from it."""
    return number(value, digits=4)


def _stage_of(rows: pd.DataFrame) -> str:
    """Return the training that ran on several devices: DataParallel only if there is no other."""
    stages = sorted(set(rows.stage[rows.devices > 1]))
    if len(stages) > 1 and DP in stages:
        stages.remove(DP)
    if len(stages) > 1:
        names = ", ".join(map(comparison.stage_name, stages))
        raise UserError(f"a proposal is for one training, and these runs are of {names}: give one's files.")
    return stages[0] if stages else rows.stage.iloc[0]


def _all_of(values: pd.Series) -> str:
    """Return all values that rows have, as `2.9.0 and 2.10.0`."""
    return " and ".join(sorted(set(values) - {""}))
