"""From the rows of many runs to a comparison: medians, speedup, efficiency, and what they show.

rows, skipped = load(paths)
table = compare(summarize(rows))
print(verdict(table))
"""

import os
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from trainkit import records
from trainkit.errors import UserError, printable

# A speedup says something about the number of workers only if all of this is equal in both runs.
MUST_BE_EQUAL = {
    "dataset": "dataset",
    "model": "model",
    "device_name": "device",
    "loader": "loader",
    "workers_per_loader": "loader workers",
    "threads_per_worker": "threads per worker",
    "recipe": "recipe",
    "precision": "precision",
    "compiled": "compiled",
    "accumulate": "micro-batches per step",
    "images": "images per epoch",
    "global_batch": "global batch",
}
CONFIGURATION = ["stage", *MUST_BE_EQUAL, "world_size", "nodes", "devices"]
# Rows equal in this share a section of the report and a panel of a figure: other hardware, data or
# networks have throughputs on another scale, and accuracies that mean something else.
SECTION_BY = ["device_name", "dataset", "model"]
TUTORIAL_MODEL = "Net"
# The stages of the tutorial, in its order. Any other name is somebody's own training.
TUTORIAL_STAGES = {"single": "single", "dp": "DataParallel", "ddp": "DDP"}
# How a setting reads in a label, and the value that goes without saying.
_LABELS = {
    "loader": ("{} loader", "workers"),
    "workers_per_loader": ("{} loader workers", 0),
    "threads_per_worker": ("threads {}", None),
    "recipe": ("{}", None),
    "precision": ("{}", None),
    "compiled": ("compiled", False),
    "accumulate": ("accumulate {}", 1),
    "images": ("{} images", None),
}
_WARMUP_ONLY = "only a warm-up epoch, so its throughput is not known (needs --epochs 2 or more)"


def load(paths: Iterable[Path]) -> tuple[pd.DataFrame, list[str]]:
    """All epochs of all runs, one row each, and a sentence for every file, folder or run left out.

    Args:
        paths: CSV files, or folders that are searched for `*.csv` at any depth.

    Returns:
        Rows with the columns of `records.COLUMNS`, and the sentences.

    Raises:
        UserError: if a path is not there.
    """
    files, runs, skipped = {}, [], []  # files: as they are named, by where they really are
    for path in paths:
        if not os.path.exists(path):  # noqa: PTH110  Path.exists raises where it may not look
            raise UserError(f"{path} is not there: give CSV files of runs, or a folder that holds some.")
        if not path.is_dir():
            files[os.path.realpath(path)] = path  # Path.resolve raises for a link to itself
            continue
        for folder, _, names in os.walk(
            path, onerror=lambda e: skipped.append(f"{e.filename}: not read, {e.strerror}.")
        ):
            found = [Path(folder, name) for name in names if name.endswith(".csv")]
            files |= {os.path.realpath(file): file for file in found}
    for _, file in sorted(files.items()):
        try:
            runs.append(pd.DataFrame(records.read(file)))
        except records.RecordError as error:
            skipped.append(str(error))
    rows = pd.concat(runs, ignore_index=True) if runs else pd.DataFrame(columns=list(records.COLUMNS))
    # A run copied into a second folder is still one run.
    rows = rows.drop_duplicates(["run_id", "epoch", "started_at"], ignore_index=True)
    mixed = _mixed(rows)
    skipped += mixed.values()
    return rows[~rows.run_id.isin(mixed)], [printable(sentence) for sentence in skipped]


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per `CONFIGURATION`, over all its repeats; `rows` must not be empty.

    `images_per_s` is the median over all epochs that are not warm-up, `slowest` and `fastest` are the
    extremes of the same epochs (images/s), `eval_seconds` their median: NaN without such epochs.
    `test_accuracy` (%, NaN where a run has none) and `elapsed_s` are medians over runs of the last
    epoch's, `peak_memory_mb` is the largest, of a warm-up only where there is nothing else. `variant` names
    the settings that differ within the section.
    """
    summary = []
    for configuration, group in rows.groupby(CONFIGURATION):
        steady = group[~group.warmup]
        runs = group.groupby("run_id")
        last = runs.tail(1)
        epochs = sorted({runs.size().min(), runs.size().max()})
        numbers = {
            "images_per_s": steady.images_per_s.median(),
            "slowest": steady.images_per_s.min(),
            "fastest": steady.images_per_s.max(),
            "eval_seconds": steady.eval_seconds.median(),
            "test_accuracy": last.test_accuracy.dropna().median(),  # pandas 2 warns of all NaN
            "elapsed_s": last.elapsed_s.median(),
            "peak_memory_mb": (group if steady.empty else steady).peak_memory_mb.max(),
            "runs": len(runs),
            "epochs": "..".join(map(str, epochs)),
            "steady_epochs": len(steady),
        }
        summary.append(dict(zip(CONFIGURATION, configuration, strict=True)) | numbers)
    table = pd.DataFrame(summary)
    table["variant"] = pd.concat(_variants(section) for _, section in table.groupby(SECTION_BY))
    settings = [name for name in MUST_BE_EQUAL if name != "images"]
    return table.sort_values([*settings, "stage", "devices", "nodes"], key=_order)


def compare(table: pd.DataFrame) -> pd.DataFrame:
    """Add `speedup` (X(n)/X(1)), `efficiency` (speedup/n, 1 is ideal), `baseline` and `why`.

    `baseline` names the stage that X(1) comes from: `single` where it has an equal run, else the
    row's own stage on one device. Where nothing can be compared the numbers are NaN and `why` says
    the reason; everywhere else it is empty.
    """
    speedups = [_speedup(row, table) for row in table.itertuples()]
    table = table.join(pd.DataFrame(speedups, index=table.index, columns=["speedup", "baseline", "why"]))
    return table.assign(efficiency=table.speedup / table.devices)


def verdict(table: pd.DataFrame) -> str:
    """One sentence on what the comparison (from `compare`) shows at its largest device counts."""
    clauses = []
    for names, section in table.groupby(SECTION_BY):
        where = [name for name, column in zip(names, SECTION_BY, strict=True) if table[column].nunique() > 1]
        text = "; ".join(_clause(stage, section[section.stage == stage]) for stage in _judged_stages(section))
        clauses.append(f"on {', '.join(where)}: {text}" if where else text)
    text = "; ".join(clauses) + "."
    # The name of an own training stays as it is written.
    return text[0].upper() + text[1:] if text.startswith(("there ", "on ")) else text


def is_cpu(device_name: str) -> bool:
    """Whether the workers were CPU threads standing in for GPUs."""
    return device_name.startswith("CPU")


def label(row: tuple | pd.Series, count: bool = True) -> str:
    """A configuration in a few words, as `DDP x2, batch 256`; without `count`, `DDP, batch 256`."""
    nodes = f" on {row.nodes} nodes" if row.nodes > 1 else ""
    devices = f" x{row.devices}{nodes}" if count and row.stage != "single" else ""
    plain = " (plain model)" if row.stage == "dp" and row.devices == 1 else ""
    return ", ".join(
        filter(None, [_name(row.stage) + devices + plain, f"batch {row.global_batch}", row.variant])
    )


def with_model(dataset: str, model: str) -> str:
    """The data and, where it is not the tutorial's, the network, as `mnist, MyNet`."""
    return dataset if model == TUTORIAL_MODEL else f"{dataset}, {model}"


def common(section: pd.DataFrame) -> str:
    """The settings that all rows of one section have in common, in words."""
    return _in_words(section.iloc[0], [name for name in _LABELS if section[name].nunique() == 1])


def _mixed(rows: pd.DataFrame) -> dict[str, str]:
    """A sentence by the name of every run that went on in another configuration than it began in."""
    sentences = {}
    for run_id, kinds in rows.groupby("run_id")[CONFIGURATION].nunique().iterrows():
        changed = {name: rows[rows.run_id == run_id][name].unique() for name in kinds.index[kinds > 1]}
        if changed:
            what = ", ".join(
                f"{MUST_BE_EQUAL.get(name, name)} {after} after {before}"
                for name, (before, after, *_) in changed.items()
            )
            sentences[run_id] = f"run {run_id} went on with {what}: it counts in neither."
    return sentences


def _name(stage: str) -> str:
    return TUTORIAL_STAGES.get(stage, stage)


def _order(column: pd.Series) -> pd.Series:
    """A key for sorting: the stages in the tutorial's order, then other trainings by name."""
    order = {stage: str(i) for i, stage in enumerate(TUTORIAL_STAGES)}
    return column.map(lambda stage: order.get(stage, f"own {stage}")) if column.name == "stage" else column


def _in_words(row: pd.Series, names: Iterable[str]) -> str:
    return ", ".join(_LABELS[name][0].format(row[name]) for name in names if row[name] != _LABELS[name][1])


def _variants(section: pd.DataFrame) -> pd.Series:
    varying = [name for name in _LABELS if section[name].nunique() > 1]
    # Each batch size drops another rest of the same data.
    if section.images.max() < (section.images + section.global_batch).min():
        varying = [name for name in varying if name != "images"]
    return pd.Series([_in_words(row, varying) for _, row in section.iterrows()], section.index)


def _speedup(row: tuple, table: pd.DataFrame) -> tuple[float, str, str]:
    """Speedup, stage of the baseline, and the reason if there is none."""
    nothing = float("nan"), ""
    if row.stage == "dp" and row.devices == 1:
        return *nothing, "DataParallel had one device and ran the plain model: no DataParallel speed"
    if not row.images_per_s > 0:
        return *nothing, _WARMUP_ONLY
    ones = table[(table.devices == 1) & (table.world_size == 1) & table.stage.isin(["single", row.stage])]
    if ones.empty:
        return *nothing, "no 1-device run to compare with"
    unlike, unknown, _, one = min(
        (
            (_unlike(row, one), not one.images_per_s > 0, one.stage != "single", one)
            for one in ones.itertuples()
        ),
        key=lambda choice: (len(choice[0]), *choice[1:3]),
    )
    if unlike == ["global_batch"]:
        return (
            *nothing,
            f"no otherwise equal 1-device run with global batch {row.global_batch} to compare with",
        )
    if unlike:
        values = [f"{MUST_BE_EQUAL[name]} ({getattr(row, name)}, {getattr(one, name)})" for name in unlike]
        return *nothing, f"differs from the nearest 1-device run ({one.stage}) in {' and '.join(values)}"
    if unknown:
        return *nothing, f"the 1-device run to compare with ({one.stage}) has {_WARMUP_ONLY}"
    return row.images_per_s / one.images_per_s, one.stage, ""


def _unlike(row: tuple, one: tuple) -> list[str]:
    """The settings whose difference forbids a speedup of `row` over `one`."""
    unlike = [name for name in MUST_BE_EQUAL if getattr(row, name) != getattr(one, name)]
    same_data = row.images < one.images + one.global_batch and one.images < row.images + row.global_batch
    # A GPU does not become faster by more CPU threads beside it.
    equal = {"images": same_data, "threads_per_worker": not is_cpu(row.device_name)}
    return [name for name in unlike if not equal.get(name)]


def _judged_stages(section: pd.DataFrame) -> list[str]:
    """The parallel stages and the own trainings. Beside own ones a stage of the tutorial is not missed."""
    present = set(section.stage)
    own = sorted(present - set(TUTORIAL_STAGES))
    return [stage for stage in ("ddp", "dp") if stage in present or not own] + own


def _clause(stage: str, rows: pd.DataFrame) -> str:
    name, several = _name(stage), rows[rows.devices > 1]
    one_process = stage == "dp" or (rows.world_size < rows.devices).any()
    unit = "device" if one_process else "worker"
    if rows.empty:
        return f"there is no {name} run"
    if several.empty:
        return f"{name} had only one {unit} and cannot be judged here"
    unit = f"CPU {unit}s" if is_cpu(rows.device_name.iloc[0]) else f"{unit}s"
    judged = several[several.speedup.notna()]
    if judged.empty:
        why = several.why.iloc[0] if several.why.nunique() == 1 else "for the reasons noted"
        return f"{name} on {several.devices.max()} {unit} cannot be judged here ({why})"
    top = judged[judged.devices == judged.devices.max()].sort_values("speedup", ascending=False)
    best, worst = top.iloc[0], top.iloc[-1]
    one = "single" if best.baseline == "single" else f"{name} on one"
    text = f"{name} on {best.devices} {unit} trained {best.speedup:.2f}x as fast as {one} ({_at(best)})"
    if len(top) > 1:
        text += f" at best, {worst.speedup:.2f}x at worst ({_at(worst)})"
    return text + (", which is slower than one" if best.speedup < 1 else "")


def _at(row: pd.Series) -> str:
    nodes = f"{row.nodes} nodes" if row.nodes > 1 else ""
    where = ", ".join(filter(None, [str(row.global_batch), row.variant, nodes]))
    return f"{100 * row.efficiency:.0f} % efficiency at global batch {where}"
