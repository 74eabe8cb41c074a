"""From the records of many runs to one table: medians, speedup, efficiency, and which speeds to doubt.

rows, skipped = load(paths)
table = compare(summarize(rows))
"""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from manygpus import frozen_code, job_folder
from manygpus.errors import UserError
from manygpus.record import columns, records
from manygpus.record.columns import COLUMNS, DP, SINGLE, TUTORIAL_STAGES, UNKNOWN, Role
from manygpus.reports import doubts, variants

_SETTINGS = columns.with_role(*(role for role in Role if role < Role.DOUBT))
# A speedup says something about the number of workers only if all of this is equal in both runs. Where
# several differ, the global batch is named last.
MUST_BE_EQUAL = [*(name for name in _SETTINGS if name != "global_batch"), "global_batch"]
# Another value is another configuration, whose speed may still be compared.
DOUBTED = columns.with_role(Role.DOUBT)
_STAGE, *_NUMBERS_OF_WORKERS = columns.with_role(Role.LAYOUT)
# A run that changed one of these when it was resumed has no speed.
_CONSTANT_IN_A_RUN = [_STAGE, *MUST_BE_EQUAL, *_NUMBERS_OF_WORKERS]
# Runs that are equal in all of this are repeats: a row of the table.
CONFIGURATION = [*_CONSTANT_IN_A_RUN, *DOUBTED]
# Rows that are equal in this share a section of the report and a panel of a figure. Other hardware, data or
# networks have throughputs on another scale, and accuracies that mean something else.
SECTION_BY = columns.with_role(Role.TASK)
# Our own reports, which are no runs.
REPORTS = ("comparison.csv", "each.csv", "sweep.csv")
# What a label names. Each batch size drops another rest of the same images, which `train_images` includes.
_LABELLED = {name: COLUMNS[name] for name in [*MUST_BE_EQUAL, *DOUBTED] if COLUMNS[name].label}
_LABELLED["train_images"] = _LABELLED.pop("images")
_ONLY_WARMUP = "only a warm-up epoch, so its throughput is not known (needs --epochs 2 or more)"
# The relative difference of two learning rates, recorded with six digits, that is none.
_SAME_LR = 1e-4

# What every training has, whatever its unit.
SAMPLES = "samples"

# A row of the table, as `DataFrame.itertuples` gives it.
TableRow = tuple


def load(paths: Iterable[Path]) -> tuple[pd.DataFrame, list[str]]:
    """Read all epochs of all runs, one row each, and name every file, folder or run left out in a sentence.

    The starts of a run that was stopped or killed are joined, as `records.join` says.

    Args:
        paths: CSV files, of one start or of several, or folders that are searched for `*.csv` at any depth.

    Returns:
        Rows with all columns of a record, and `start`, the `run_id` of the start that made the epoch; `file`,
        the name of the CSV that it stands in; `unit` and `per_sample`, as `records.speed_unit` returns them
        (of the file's first start); and `slow_rank`, a clause on the rank that holds up the others
        in the whole run, or "". Then the sentences.

    Raises:
        UserError: if a path is not there.
    """
    skipped: list[str] = []
    starts: dict[str, list[records.Row]] = {}
    rows_of_ranks: dict[tuple[str, int], list[records.Row]] = {}
    for file in _csv_files(paths, skipped):
        for run_id, rows in _starts_in(file, skipped).items():
            # A file that was copied to a second folder is still one start.
            if len(rows) > len(starts.get(run_id, [])):
                starts[run_id] = rows
        for row in _rank_rows_beside(file, skipped):
            rows_of_ranks.setdefault((str(file), row["epoch"]), []).append(row)
    rows_of_all = []
    for run in records.join(starts).values():
        slow_rank = _slow_rank(run, rows_of_ranks)
        rows_of_all += [row | {"slow_rank": slow_rank} for row in run]
    table = pd.DataFrame(rows_of_all) if rows_of_all else pd.DataFrame(columns=list(COLUMNS))
    table = _with_equal_names_for_what_is_unknown(table)
    table = _one_value_in_each_run(table)
    changed = _runs_that_changed(table)
    table = table[~table.run_id.isin(changed)].copy()
    return variants.split_by_rates(table, CONFIGURATION), [*skipped, *changed.values()]


def load_some(paths: Iterable[Path]) -> tuple[pd.DataFrame, list[str]]:
    """Read as `load` does, but require at least one run.

    Raises:
        UserError: if a path is not there, or no run is found.
    """
    paths = list(paths)
    rows, skipped = load(paths)
    if rows.empty:
        reasons = " ".join(skipped) or "There is no CSV."
        raise UserError(f"no runs found in {', '.join(map(str, paths))}. {reasons}")
    return rows, skipped


def summarize(rows: pd.DataFrame, target: float | None = None) -> pd.DataFrame:
    """Make one row per `CONFIGURATION`, over all its repeats; `rows` must not be empty.

    `images_per_s` is the median over all epochs that are not warm-up, `slowest` and `fastest` are the
    extremes of the same epochs (images/s), `epoch_seconds` and `eval_seconds` their medians: NaN without such
    epochs. `test_accuracy` (%, NaN if a run has none) and `elapsed_s` are medians over runs of the last
    epoch's (the accuracy, by a validation, of the best one); `peak_memory_mb` is the largest, of a warm-up
    only if there is nothing else. `train_images` is equal if each batch size drops another rest of the same
    data. `variant` names the settings that differ within the section. With a `target` (% accuracy),
    `target_s` and `target_train_s` are the seconds, all and of training, until it was first reached: medians
    over the `target_runs` that did. `scripts` are the digests of the scripts' texts, and `rates` the learning
    rates of the epochs. `unit` and `per_sample` are as `load` returns them; `in_its_unit` uses them.
    """
    rows = rows.assign(configuration=rows.groupby(CONFIGURATION).ngroup())
    all_epochs = rows.groupby("configuration")
    steady_epochs = rows[~rows.warmup].groupby("configuration")
    last_epochs = rows.groupby("run_id").tail(1).groupby("configuration")
    run_lengths = rows.groupby(["configuration", "run_id"]).size().groupby("configuration")
    table = all_epochs[CONFIGURATION].first()
    table = table.assign(
        images_per_s=steady_epochs.images_per_s.median(),
        slowest=steady_epochs.images_per_s.min(),
        fastest=steady_epochs.images_per_s.max(),
        epoch_seconds=steady_epochs.train_seconds.median(),
        eval_seconds=steady_epochs.eval_seconds.median(),
        test_accuracy=_final_accuracies(rows),
        elapsed_s=last_epochs.elapsed_s.median(),
        peak_memory_mb=steady_epochs.peak_memory_mb.max().combine_first(all_epochs.peak_memory_mb.max()),
        unit=all_epochs.unit.first(),
        per_sample=all_epochs.per_sample.first(),
        scripts=all_epochs.script.agg(_digests),
        rates=pd.Series({number: variants.rates_as_text(group) for number, group in all_epochs}),
        runs=run_lengths.size(),
        epochs=run_lengths.agg(_least_to_most),
        steady_epochs=(~rows.warmup).groupby(rows.configuration).sum(),
    )
    if target is not None:
        table = table.join(_reached(rows, target))
        table["target_runs"] = table.target_runs.fillna(0).astype(int)
    table["batch_per_device"] = table.global_batch // table.devices
    table["train_images"] = _by_section(table, SECTION_BY, _train_images)
    table["variant"] = _by_section(table, SECTION_BY, _variants)
    settings = [name for name in MUST_BE_EQUAL if name != "images"]
    return table.sort_values([*settings, "stage", "devices", "nodes"], key=_sort_key)


def in_its_unit(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return the table with its speeds in the unit that all of its rows have, and that unit.

    Rows of several units keep the speeds in samples.
    """
    if table.unit.nunique() > 1:
        return table, SAMPLES
    speeds = ["images_per_s", "slowest", "fastest"]
    scaled = table[speeds].mul(table.per_sample, axis="index")
    return table.assign(**scaled), table.unit.iloc[0]


def samples_in_words(rows: pd.DataFrame) -> str:
    """Return what to call the samples of these runs: images, unless a training tells its speed in others."""
    return records.IMAGES if (rows.unit == records.IMAGES).all() else SAMPLES


def compare(table: pd.DataFrame) -> pd.DataFrame:
    """Add `speedup` (X(n)/X(1)), `efficiency` (speedup/n, 1 is ideal), `baseline`, `why` and `doubt`.

    `baseline` names the stage that X(1) comes from: `single` if it has an equal run, else the
    row's own stage on one device. If nothing can be compared, the numbers are NaN and `why` gives
    the reason; otherwise it is empty. `other_arguments` are those in which the row differs from X(1).
    `weak_efficiency` is X(n, n b) / (n X(1, b)), with an equal batch per device instead of an equal global
    batch. `doubt` comes from `doubts.marks`.
    """
    on_one_device = list(table[(table.devices == 1) & (table.world_size == 1)].itertuples())
    compared = []
    for row in table.itertuples():
        strong = _find_baseline(row, on_one_device, equal_batch="global_batch")
        weak = _find_baseline(row, on_one_device, equal_batch="batch_per_device")
        compared.append(
            {
                "speedup": _times_as_fast(row, strong.row),
                "baseline": strong.stage,
                "why": strong.why_none,
                "weak_efficiency": _times_as_fast(row, weak.row) / row.devices,
                "weak_baseline": weak.stage,
                "other_arguments": _other_arguments(row, strong.row or weak.row),
                "doubt": doubts.marks(row, [baseline.row for baseline in (strong, weak) if baseline.row]),
            }
        )
    table = table.join(pd.DataFrame(compared, index=table.index))
    return table.assign(efficiency=table.speedup / table.devices)


def beneath_each_other(table: pd.DataFrame) -> pd.DataFrame:
    """Merge tables of several folders, with equal configurations in neighbouring rows."""
    data_and_network = ["dataset", "model"]
    table = table.assign(variant=_by_section(table, data_and_network, _variants))
    order = [*data_and_network, "stage", "devices", "nodes", "global_batch", "variant"]
    return table.sort_values(order, key=_sort_key, kind="stable", ignore_index=True)


def is_cpu(device_name: str) -> bool:
    """Return whether the workers were CPU threads standing in for GPUs."""
    return device_name.startswith("CPU")


def stage_name(stage: str) -> str:
    """Return a stage of the tutorial in words; the name of a user's own training unchanged."""
    return TUTORIAL_STAGES.get(stage, stage)


def label(row: TableRow | pd.Series, count: bool = True, weak: bool = False) -> str:
    """Name a configuration in a few words, as `DDP x2, batch 256`.

    Without `count` it is `DDP, batch 256`; `weak` gives the batch of each device.
    """
    name = stage_name(row.stage)
    if count and row.stage != SINGLE:
        name += f" x{row.devices}"
        if row.nodes > 1:
            name += f" on {row.nodes} nodes"
    if row.stage == DP and row.devices == 1:
        name += " (plain model)"
    batch = f"batch {row.batch_per_device} each (weak)" if weak else f"batch {row.global_batch}"
    return ", ".join(filter(None, [name, batch, row.variant]))


def with_model(dataset: str, model: str) -> str:
    """Name the data and the class of the network, as `mnist, Net`."""
    return f"{dataset}, {model}"


def common(section: pd.DataFrame) -> str:
    """List the settings that all rows of one section share."""
    names = [name for name in _LABELLED if name not in ("parameters", "network")]
    return _in_words(section.iloc[0], [name for name in names if section[name].nunique() == 1])


def varies(rows: pd.DataFrame, name: str) -> bool:
    """Return whether rows differ in a setting, beyond what another setting determines."""
    determined_by = list(COLUMNS[name].determined_by) if name in COLUMNS else []
    if not determined_by:
        return rows[name].nunique() > 1
    return rows.groupby(determined_by)[name].nunique().max() > 1


# --- from files to rows -----------------------------------------------------------------------------


def _csv_files(paths: Iterable[Path], skipped: list[str]) -> list[Path]:
    """List the CSVs of runs, each once; `skipped` gets a sentence for every folder that cannot be read."""
    files: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} is not there: give CSV files of runs, or a folder that holds some.")
        for file in _search(path, skipped) if path.is_dir() else [path]:
            # A link, or a file in two of the folders, is the same file. It is called as it was given last.
            files[file.resolve()] = file
    return [files[real_path] for real_path in sorted(files, key=str)]


def _search(folder: Path, skipped: list[str]) -> list[Path]:
    """List the CSVs of runs at any depth."""
    # What a user may not read would be passed over in silence: that may be a colleague's folder.
    errors: list[OSError] = []
    files = []
    for parent, subfolders, names in os.walk(folder, onerror=errors.append):
        # The CSVs of a job's samples are no runs, nor are those in the code of a job or a sweep.
        subfolders[:] = [
            name
            for name in subfolders
            if name != job_folder.MONITOR and not frozen_code.is_copy(Path(parent, name))
        ]
        files += [Path(parent, name) for name in names if name.endswith(".csv") and name not in REPORTS]
    skipped += [f"{error.filename}: not read, {error.strerror}." for error in errors]
    return files


def _starts_in(file: Path, skipped: list[str]) -> dict[str, list[records.Row]]:
    """Read the rows of a file by their start, each with the name of the `file`."""
    try:
        rows = records.read(file)
    except records.RecordError as error:
        skipped.append(str(error))
        return {}
    unit, per_sample = records.speed_unit(rows, _metrics_beside(file, skipped))
    file_columns = {"file": str(file), "unit": unit, "per_sample": per_sample}
    return records.by_run(row | file_columns for row in rows)


def _rank_rows_beside(file: Path, skipped: list[str]) -> list[records.Row]:
    """Read the rows of the ranks next to a file; none if there is no such file."""
    if not records.beside(file).exists():
        return []
    try:
        return records.read_ranks(file)
    except records.RecordError as error:
        skipped.append(str(error))
        return []


def _metrics_beside(file: Path, skipped: list[str]) -> list[records.Row]:
    try:
        return records.read_metrics(file)
    except records.RecordError as error:
        skipped.append(str(error))
        return []


def _slow_rank(run: list[records.Row], rows_of_ranks: dict[tuple[str, int], list[records.Row]]) -> str:
    """Return the clause of `records.slow_rank` on a run, from its measured epochs if it has some."""
    measured = [row for row in run if not row["warmup"]] or run
    rows = []
    for row in measured:
        rows += rows_of_ranks.get((row["file"], row["epoch"]), [])
    return records.slow_rank(rows)


def _with_equal_names_for_what_is_unknown(rows: pd.DataFrame) -> pd.DataFrame:
    """Give equal trainings equal settings: one value for what is unknown, or not used."""
    for name in ("lr", "gamma"):
        rows[name] = rows[name].map("{:g}".format).replace("nan", UNKNOWN)
    rows.loc[rows.recipe == "fast", "gamma"] = UNKNOWN
    rows["arguments"] = rows.arguments.map(variants.arguments_in_words)
    return rows


def _one_value_in_each_run(rows: pd.DataFrame) -> pd.DataFrame:
    """Name all arguments, and all schedules, of a run that was resumed with others, in each of its rows."""
    for name in DOUBTED:
        for run_id, values in rows.groupby("run_id")[name]:
            if values.nunique() > 1:
                rows.loc[rows.run_id == run_id, name] = " then ".join(values.unique())
    return rows


def _runs_that_changed(rows: pd.DataFrame) -> dict[str, str]:
    """Return a sentence, by name, on each run that changed its configuration when it was resumed."""
    sentences = {}
    numbers_of_values = rows.groupby("run_id")[_CONSTANT_IN_A_RUN].nunique()
    for run_id in numbers_of_values.index[(numbers_of_values > 1).any(axis=1)]:
        run = rows[rows.run_id == run_id]
        changes = []
        for name in _CONSTANT_IN_A_RUN:
            if run[name].nunique() > 1:
                before, after, *_ = run[name].unique()
                changes.append(f"{COLUMNS[name].words or name} {after} after {before}")
        sentences[run_id] = f"run {run_id} was resumed with {', '.join(changes)}: it counts in neither."
    return sentences


# --- from rows to one row per configuration ---------------------------------------------------------


def _final_accuracies(rows: pd.DataFrame) -> pd.Series:
    """Return by configuration the median accuracy of the weights that its runs end with."""
    needed = rows[["configuration", "epoch", "best_epoch", "test_accuracy"]]
    final_rows = [records.ends_with(run.to_dict("records")) for _, run in needed.groupby(rows.run_id)]
    return pd.DataFrame(final_rows).groupby("configuration").test_accuracy.median()


def _reached(rows: pd.DataFrame, target: float) -> pd.DataFrame:
    """Return how long the runs of each configuration took to reach the target, and how many reached it."""
    rows = rows.assign(trained=rows.groupby("run_id").train_seconds.cumsum())
    first_epochs = rows[rows.test_accuracy >= target].groupby("run_id").head(1)
    return first_epochs.groupby("configuration").agg(
        target_s=("elapsed_s", "median"),
        target_train_s=("trained", "median"),
        target_runs=("run_id", "size"),
    )


def _digests(scripts: pd.Series) -> str:
    """Return the digests of the texts of the scripts, of which each is a name and a digest."""
    return " ".join(sorted({script.rpartition(" ")[2] for script in scripts if script}))


def _least_to_most(numbers: pd.Series) -> str:
    """Return `2..3`, or one number if all are equal."""
    least, most = numbers.min(), numbers.max()
    return f"{least}..{most}" if least < most else str(least)


def _by_section(
    table: pd.DataFrame, section_by: list[str], column_of: Callable[[pd.DataFrame], pd.Series]
) -> pd.Series:
    """Make a column of the table from each of its sections."""
    return pd.concat([column_of(section) for _, section in table.groupby(section_by)])


def _train_images(section: pd.DataFrame) -> pd.Series:
    """Return the largest image count among rows that may have the same data: they drop less than a batch."""
    train_images: dict[int, int] = {}
    same_data: list[int] = []
    # The data of the rows in `same_data` has fewer images than this.
    upper_bound = 0
    for row in section.sort_values("images").itertuples():
        if row.images >= upper_bound:
            same_data = []
            upper_bound = math.inf
        same_data.append(row.Index)
        upper_bound = min(upper_bound, row.images + row.global_batch)
        train_images |= dict.fromkeys(same_data, row.images)
    return pd.Series(train_images)


def _variants(section: pd.DataFrame) -> pd.Series:
    """Name for each row the settings in which it differs from others of the section."""
    names = [name for name in _LABELLED if varies(section, name)]
    in_words = section.copy()
    for name in variants.IN_WORDS:
        if name not in names:
            continue
        for _, rows in _groups_to_tell_apart(section, name, names):
            words = variants.words_that_differ(name, list(rows[name].unique()))
            in_words.loc[rows.index, name] = rows[name].map(words)
    if "network" in names:
        for _, rows in section.groupby([in_words.network, in_words.arguments]):
            # Where neither tells their networks apart, the digest of the structure does.
            if varies(rows, "network"):
                in_words.loc[rows.index, "network"] += rows.network.map(variants.structure)
        in_words["network"] = in_words.network.str.strip()
    return in_words.apply(_in_words, axis=1, names=names)


def _groups_to_tell_apart(
    section: pd.DataFrame, name: str, varying: list[str]
) -> Iterable[tuple[object, pd.DataFrame]]:
    """Return the groups of rows within which the words of a column name differences.

    Arguments are named only for rows that nothing else tells apart, but for the digest of a structure.
    """
    others = [other for other in varying if other not in ("network", "arguments")]
    if name == "arguments" and others:
        return section.groupby(others)
    return [("", section)]


def _in_words(row: pd.Series, names: Iterable[str]) -> str:
    words = {name: _LABELLED[name].in_words(row[name]) for name in names}
    if "train_images" in words and row.unit != records.IMAGES:
        words["train_images"] = f"{row.train_images} {SAMPLES}"
    return ", ".join(filter(None, words.values()))


def _sort_key(column: pd.Series) -> pd.Series:
    """Return a key to sort by: the stages in the tutorial's order, then other trainings by name."""
    if column.name != "stage":
        return column
    order = {stage: str(position) for position, stage in enumerate(TUTORIAL_STAGES)}
    return column.map(lambda stage: order.get(stage, f"own {stage}"))


# --- from one row per configuration to speedups -----------------------------------------------------


class _Baseline(NamedTuple):
    """The run on one device that a row is compared with; or none, and the reason."""

    row: TableRow | None
    why_none: str = ""

    @property
    def stage(self) -> str:
        return self.row.stage if self.row else ""


def _times_as_fast(row: TableRow, baseline: TableRow | None) -> float:
    return row.images_per_s / baseline.images_per_s if baseline else math.nan


def _other_arguments(row: TableRow, baseline: TableRow | None) -> str:
    """Return in words the arguments in which a row differs from its baseline."""
    return ", ".join(variants.other_arguments(row, baseline)) if baseline else ""


def _find_baseline(row: TableRow, on_one_device: list[TableRow], equal_batch: str) -> _Baseline:
    """Choose the run on one device to compare `row` with, equal in the column `equal_batch`."""
    if row.stage == DP and row.devices == 1:
        return _Baseline(None, "DataParallel had one device and ran the plain model: no DataParallel speed")
    if not row.images_per_s > 0:
        return _Baseline(None, _ONLY_WARMUP)
    candidates = [baseline for baseline in on_one_device if baseline.stage in (SINGLE, row.stage)]
    if not candidates:
        return _Baseline(None, "no 1-device run to compare with")
    nearest = min(candidates, key=lambda baseline: _distance(row, baseline, equal_batch))
    differences = _differences(row, nearest, equal_batch)
    if differences == ["global_batch"]:
        batch = row.global_batch
        return _Baseline(None, f"no otherwise equal 1-device run with global batch {batch} to compare with")
    if differences:
        clauses = [_difference_in_words(name, row, nearest) for name in differences]
        return _Baseline(
            None, f"differs from the nearest 1-device run ({nearest.stage}) in {' and '.join(clauses)}"
        )
    if not nearest.images_per_s > 0:
        return _Baseline(None, f"the 1-device run to compare with ({nearest.stage}) has {_ONLY_WARMUP}")
    return _Baseline(nearest)


def _distance(row: TableRow, baseline: TableRow, equal_batch: str) -> tuple[int, bool, bool, int]:
    """Return by what the nearest run on one device is chosen: what forbids a speedup comes first."""
    number_of_doubts = sum(getattr(row, name) != getattr(baseline, name) for name in DOUBTED)
    number_of_doubts += variants.other_rates(row.rates, baseline.rates)
    return (
        len(_differences(row, baseline, equal_batch)),
        not baseline.images_per_s > 0,
        baseline.stage != SINGLE,
        number_of_doubts,
    )


def _differences(row: TableRow, baseline: TableRow, equal_batch: str) -> list[str]:
    """List the settings whose difference forbids a speedup of `row` over `baseline`."""
    differs = {name: getattr(row, name) != getattr(baseline, name) for name in MUST_BE_EQUAL}
    differs["global_batch"] = getattr(row, equal_batch) != getattr(baseline, equal_batch)
    differs["images"] = row.train_images != baseline.train_images
    differs["lr"] = not _same_lr(row, baseline)
    if not is_cpu(row.device_name):
        # More CPU threads do not make a GPU faster.
        differs["threads_per_worker"] = False
    return [name for name in MUST_BE_EQUAL if differs[name] and not _is_explained(name, differs)]


def _is_explained(name: str, differs: dict[str, bool]) -> bool:
    """Return whether another difference explains that of a setting, as another recipe does that of a rate."""
    determined_by = COLUMNS[name].determined_by
    return bool(determined_by) and differs[determined_by[0]]


def _same_lr(row: TableRow, baseline: TableRow) -> bool:
    """Return whether the learning rates are equal, or differ as their common scaling rule says."""
    if UNKNOWN in (row.lr, baseline.lr) or row.lr_scale != baseline.lr_scale:
        return row.lr == baseline.lr
    return math.isclose(_unscaled_lr(row), _unscaled_lr(baseline), rel_tol=_SAME_LR)


def _unscaled_lr(row: TableRow) -> float:
    return float(row.lr) / columns.lr_factor(row.lr_scale, row.global_batch)


def _difference_in_words(name: str, row: TableRow, baseline: TableRow) -> str:
    """Return a clause with both values of a setting, as `recipe (fast, classic)`."""
    values = [str(getattr(row, name)), str(getattr(baseline, name))]
    if name in variants.IN_WORDS:
        words = variants.words_that_differ(name, values)
        values = [words[value] or "not recorded" for value in values]
    return f"{COLUMNS[name].words} ({', '.join(values)})"
