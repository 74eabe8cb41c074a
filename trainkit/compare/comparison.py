"""From the rows of many runs to a comparison: medians, speedup and efficiency.

rows, skipped = load(paths)
table = compare(summarize(rows))
"""

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from trainkit.compare import trust, variants
from trainkit.errors import UserError
from trainkit.record import columns, records, samples
from trainkit.record.columns import COLUMNS, DP, SINGLE, TUTORIAL_STAGES, UNKNOWN, Role

# A speedup says something about the number of workers only if all of this is equal in both runs.
_SETTINGS = columns.with_role(*(role for role in Role if role < Role.DOUBT))
MUST_BE_EQUAL = [*(name for name in _SETTINGS if name != "global_batch"), "global_batch"]  # named last
_LAYOUT = columns.with_role(Role.LAYOUT)
_COUNTED = [_LAYOUT[0], *MUST_BE_EQUAL, *_LAYOUT[1:]]
DOUBTED = columns.with_role(Role.DOUBT)
CONFIGURATION = [*_COUNTED, *DOUBTED]
# Rows equal in this share a section of the report and a panel of a figure: other hardware, data or
# networks have throughputs on another scale, and accuracies that mean something else.
SECTION_BY = columns.with_role(Role.TASK)
WRITTEN = ("comparison.csv", "each.csv")  # of our own reports: no runs
# What a label names. Each batch size drops another rest of the same images, which `train_images` includes.
_LABELLED = {name: COLUMNS[name] for name in [*MUST_BE_EQUAL, *DOUBTED] if COLUMNS[name].label}
_LABELLED["train_images"] = _LABELLED.pop("images")
_WARMUP_ONLY = "only a warm-up epoch, so its throughput is not known (needs --epochs 2 or more)"


def load(paths: Iterable[Path]) -> tuple[pd.DataFrame, list[str]]:
    """Read all epochs of all runs, one row each, and name every file, folder or run left out in a sentence.

    The starts of a run that was stopped or killed are joined, as `records.join` says.

    Args:
        paths: CSV files, of one start or of several, or folders that are searched for `*.csv` at any depth.

    Returns:
        Rows with all columns of a record, and `start`, the `run_id` of the start that made the epoch; `file`,
        the name of the CSV that it stands in; and `slow_rank`, a clause on the rank that holds up the others
        in the whole run, or "". Then the sentences.

    Raises:
        UserError: if a path is not there.
    """
    skipped: list[str] = []
    starts: dict[str, list[records.Row]] = {}
    of_ranks: dict[tuple[str, int], list[records.Row]] = {}  # by file and epoch
    for file in _files(paths, skipped):
        for start, rows in _starts_in(file, skipped).items():
            if len(rows) > len(starts.get(start, [])):  # a file copied to a second folder is still one start
                starts[start] = rows
        for row in _ranks_beside(file, skipped):
            of_ranks.setdefault((str(file), row["epoch"]), []).append(row)
    every = []
    for rows in records.join(starts).values():
        measured = [row for row in rows if not row["warmup"]] or rows
        slow_rank = records.slow_rank(
            one for row in measured for one in of_ranks.get((row["file"], row["epoch"]), [])
        )
        every += [row | {"slow_rank": slow_rank} for row in rows]
    rows = _alike(pd.DataFrame(every, columns=None if every else list(COLUMNS)))
    rows = _one_value_each(rows)
    mixed = _mixed(rows)
    rows = rows[~rows.run_id.isin(mixed)]
    return variants.split_by_rates(rows.copy(), CONFIGURATION), [*skipped, *mixed.values()]


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
    rates of the epochs.
    """
    rows = rows.assign(configuration=rows.groupby(CONFIGURATION).ngroup())
    groups, steady = (part.groupby("configuration") for part in (rows, rows[~rows.warmup]))
    epochs = rows.groupby(["configuration", "run_id"]).size().groupby("configuration")
    last = rows.groupby("run_id").tail(1).groupby("configuration")
    results = rows[["configuration", "epoch", "best_epoch", "test_accuracy"]].groupby(rows.run_id)
    ends_with = pd.DataFrame(records.ends_with(run.to_dict("records")) for _, run in results)
    table = groups[CONFIGURATION].first()
    table = table.assign(
        images_per_s=steady.images_per_s.median(),
        slowest=steady.images_per_s.min(),
        fastest=steady.images_per_s.max(),
        epoch_seconds=steady.train_seconds.median(),
        eval_seconds=steady.eval_seconds.median(),
        test_accuracy=ends_with.groupby("configuration").test_accuracy.median(),
        elapsed_s=last.elapsed_s.median(),
        peak_memory_mb=steady.peak_memory_mb.max().combine_first(groups.peak_memory_mb.max()),
        scripts=groups.script.agg(_digests),
        rates=pd.Series({number: variants.rates_as_text(group) for number, group in groups}),
        runs=epochs.size(),
        epochs=[
            f"{least}..{most}" if least < most else str(least)
            for least, most in zip(epochs.min(), epochs.max(), strict=True)
        ],
        steady_epochs=(~rows.warmup).groupby(rows.configuration).sum(),
    )
    if target is not None:
        table = table.join(_reached(rows, target))
        table["target_runs"] = table.target_runs.fillna(0).astype(int)
    table["batch_per_device"] = table.global_batch // table.devices
    for name, made in {"train_images": _train_images, "variant": _variants}.items():
        table[name] = pd.concat(made(section) for _, section in table.groupby(SECTION_BY))
    settings = [name for name in MUST_BE_EQUAL if name != "images"]
    return table.sort_values([*settings, "stage", "devices", "nodes"], key=_order)


def compare(table: pd.DataFrame) -> pd.DataFrame:
    """Add `speedup` (X(n)/X(1)), `efficiency` (speedup/n, 1 is ideal), `baseline`, `why` and `doubt`.

    `baseline` names the stage that X(1) comes from: `single` if it has an equal run, else the
    row's own stage on one device. If nothing can be compared, the numbers are NaN and `why` gives
    the reason; otherwise it is empty. `weak_efficiency` is X(n, n b) / (n X(1, b)), with an equal batch
    per device instead of an equal global batch. `doubt` comes from `trust.doubt`.
    """
    compared = []
    ones = list(table[(table.devices == 1) & (table.world_size == 1)].itertuples())
    for row in table.itertuples():
        one, why = _baseline(row, ones, "global_batch")
        weak, _ = _baseline(row, ones, "batch_per_device")
        compared.append(
            {
                "speedup": row.images_per_s / one.images_per_s if one else math.nan,
                "baseline": one.stage if one else "",
                "why": why,
                "weak_efficiency": row.images_per_s / weak.images_per_s / row.devices if weak else math.nan,
                "weak_baseline": weak.stage if weak else "",
                "doubt": trust.doubt(row, [run for run in (one, weak) if run]),
            }
        )
    table = table.join(pd.DataFrame(compared, index=table.index))
    return table.assign(efficiency=table.speedup / table.devices)


def beneath_each_other(table: pd.DataFrame) -> pd.DataFrame:
    """Merge tables of several folders, with equal configurations in neighbouring rows."""
    by = ["dataset", "model"]
    variants = pd.concat(_variants(section) for _, section in table.groupby(by))
    keys = [*by, "stage", "devices", "nodes", "global_batch", "variant"]
    return table.assign(variant=variants).sort_values(keys, key=_order, kind="stable", ignore_index=True)


def is_cpu(device_name: str) -> bool:
    """Return whether the workers were CPU threads standing in for GPUs."""
    return device_name.startswith("CPU")


def stage_name(stage: str) -> str:
    """Return a stage of the tutorial in words; the name of a user's own training unchanged."""
    return TUTORIAL_STAGES.get(stage, stage)


def label(row: tuple | pd.Series, count: bool = True, weak: bool = False) -> str:
    """Name a configuration in a few words, as `DDP x2, batch 256`.

    Without `count` it is `DDP, batch 256`; `weak` gives the batch of each device.
    """
    nodes = f" on {row.nodes} nodes" if row.nodes > 1 else ""
    devices = f" x{row.devices}{nodes}" if count and row.stage != SINGLE else ""
    plain = " (plain model)" if row.stage == DP and row.devices == 1 else ""
    batch = f"batch {row.batch_per_device} each (weak)" if weak else f"batch {row.global_batch}"
    return ", ".join(filter(None, [stage_name(row.stage) + devices + plain, batch, row.variant]))


def with_model(dataset: str, model: str) -> str:
    """Name the data and, if it is not the tutorial's, the network, as `mnist, MyNet`."""
    return dataset if model == columns.TUTORIAL_MODEL else f"{dataset}, {model}"


def common(section: pd.DataFrame) -> str:
    """List the settings that all rows of one section share."""
    names = [name for name in _LABELLED if name not in ("parameters", "network")]
    alike = [name for name in names if section[name].nunique() == 1]
    return _in_words(section.iloc[0], alike)


def varies(rows: pd.DataFrame, name: str) -> bool:
    """Return whether rows differ in a setting, beyond what another setting determines."""
    by = list(COLUMNS[name].determined_by) if name in COLUMNS else []
    return (rows.groupby(by)[name].nunique().max() if by else rows[name].nunique()) > 1


def _files(paths: Iterable[Path], skipped: list[str]) -> list[Path]:
    """List the CSVs of runs, each once; `skipped` gets a sentence for every folder that cannot be read."""
    files = {}  # the given names, by their real paths
    for path in paths:
        if not os.path.exists(path):  # noqa: PTH110  Path.exists raises where it may not look
            raise UserError(f"{path} is not there: give CSV files of runs, or a folder that holds some.")
        if Path(os.path.realpath(path)).name in WRITTEN and not path.is_dir():
            raise UserError(f"{path} has the name of a report, not of a run: give another file.")
        found = _searched(path, skipped) if path.is_dir() else [path]
        files |= {os.path.realpath(file): file for file in found}  # Path.resolve raises for a link to itself
    return [file for _, file in sorted(files.items())]


def _searched(folder: Path, skipped: list[str]) -> Iterator[Path]:
    """Yield the CSVs of runs at any depth."""
    errors: list[OSError] = []
    for place, folders, names in os.walk(folder, onerror=errors.append):
        folders[:] = [name for name in folders if name != samples.FOLDER]  # its CSVs are no runs
        yield from (Path(place, name) for name in names if name.endswith(".csv") and name not in WRITTEN)
    skipped += [f"{error.filename}: not read, {error.strerror}." for error in errors]


def _starts_in(file: Path, skipped: list[str]) -> dict[str, list[records.Row]]:
    """Read the rows of a file by their start, each with the name of the `file`."""
    try:
        rows = records.read(file)
    except records.RecordError as error:
        skipped.append(str(error))
        return {}
    return records.by_run(row | {"file": str(file)} for row in rows)


def _ranks_beside(file: Path, skipped: list[str]) -> list[records.Row]:
    """Read the rows of the ranks next to a file; none if there is no such file."""
    try:
        return records.read_ranks(file) if records.beside(file).exists() else []
    except records.RecordError as error:
        skipped.append(str(error))
        return []


def _alike(rows: pd.DataFrame) -> pd.DataFrame:
    """Give equal trainings equal settings: one value for what is unknown, or not used."""
    for name in ("lr", "gamma"):
        rows[name] = rows[name].map("{:g}".format).replace("nan", UNKNOWN)
    rows.loc[rows.recipe == "fast", "gamma"] = UNKNOWN
    return rows


def _reached(rows: pd.DataFrame, target: float) -> pd.DataFrame:
    """Return how long the runs of each configuration took to reach the target, and how many reached it."""
    trained = rows.groupby("run_id").train_seconds.cumsum()
    first = rows.assign(trained=trained)[rows.test_accuracy >= target].groupby("run_id").head(1)
    return first.groupby("configuration").agg(
        target_s=("elapsed_s", "median"), target_train_s=("trained", "median"), target_runs=("run_id", "size")
    )


def _one_value_each(rows: pd.DataFrame) -> pd.DataFrame:
    """Name all arguments, and all schedules, of a run that was resumed with others, in each of its rows."""
    for name in DOUBTED:
        runs = rows.groupby("run_id")[name]
        for run_id in (changed := runs.nunique())[changed > 1].index:
            rows.loc[rows.run_id == run_id, name] = " then ".join(runs.get_group(run_id).unique())
    return rows


def _digests(scripts: pd.Series) -> str:
    """Return the digests of the texts of the scripts, of which each is a name and a digest."""
    return " ".join(sorted({script.rpartition(" ")[2] for script in scripts if script}))


def _mixed(rows: pd.DataFrame) -> dict[str, str]:
    """Return a sentence, by name, on each run that changed its configuration when it was resumed."""
    sentences = {}
    kinds = rows.groupby("run_id")[_COUNTED].nunique()
    for run_id in kinds.index[(kinds > 1).any(axis=1)]:
        run = rows.loc[rows.run_id == run_id, _COUNTED]
        changed = [name for name in run if run[name].nunique() > 1]
        pairs = [(COLUMNS[name].words or name, *run[name].unique()[:2]) for name in changed]
        what = ", ".join(f"{name} {after} after {before}" for name, before, after in pairs)
        sentences[run_id] = f"run {run_id} went on with {what}: it counts in neither."
    return sentences


def _order(column: pd.Series) -> pd.Series:
    """Return a key to sort by: the stages in the tutorial's order, then other trainings by name."""
    order = {stage: str(i) for i, stage in enumerate(TUTORIAL_STAGES)}
    return column.map(lambda stage: order.get(stage, f"own {stage}")) if column.name == "stage" else column


def _in_words(row: pd.Series, names: Iterable[str]) -> str:
    return ", ".join(filter(None, (_LABELLED[name].in_words(row[name]) for name in names)))


def _variants(section: pd.DataFrame) -> pd.Series:
    names = [name for name in _LABELLED if varies(section, name)]
    told = section.copy()
    for name in {*names} & {*variants.IN_WORDS}:
        # Arguments are told only of rows that nothing else tells apart, but for the digest of a structure.
        others = [other for other in names if other not in ("network", "arguments")]
        for _, rows in section.groupby(others) if name == "arguments" and others else [("", section)]:
            words = variants.apart(name, [*rows[name].unique()])
            told.loc[rows.index, name] = rows[name].map(words)
    if "network" in names:
        for _, rows in section.groupby([told.network, told.arguments]):
            if varies(rows, "network"):  # neither tells their networks apart
                told.loc[rows.index, "network"] += rows.network.map(variants.structure)
        told["network"] = told.network.str.strip()
    return told.apply(_in_words, axis=1, names=names)


def _train_images(section: pd.DataFrame) -> pd.Series:
    """Return the largest image count among rows that may have the same data: they drop less than a batch."""
    found, members, below = {}, [], 0
    for row in section.sort_values("images").itertuples():
        if row.images >= below:  # the earlier rows cannot have had so much data
            members, below = [], math.inf
        members.append(row.Index)
        below = min(below, row.images + row.global_batch)
        found |= dict.fromkeys(members, row.images)
    return pd.Series(found)


def _baseline(row: tuple, ones: list[tuple], batch: str) -> tuple[tuple | None, str]:
    """Choose the run on one device to compare `row` with, equal in the column `batch`, or say why none."""
    if row.stage == DP and row.devices == 1:
        return None, "DataParallel had one device and ran the plain model: no DataParallel speed"
    if not row.images_per_s > 0:
        return None, _WARMUP_ONLY
    ones = [one for one in ones if one.stage in (SINGLE, row.stage)]
    if not ones:
        return None, "no 1-device run to compare with"
    one = min(ones, key=lambda one: _distance(row, one, batch))
    unlike = _differences(row, one, batch)
    if unlike == ["global_batch"]:
        return None, f"no otherwise equal 1-device run with global batch {row.global_batch} to compare with"
    if unlike:
        values = [f"{COLUMNS[name].words} ({', '.join(_two(name, row, one))})" for name in unlike]
        return None, f"differs from the nearest 1-device run ({one.stage}) in {' and '.join(values)}"
    if not one.images_per_s > 0:
        return None, f"the 1-device run to compare with ({one.stage}) has {_WARMUP_ONLY}"
    return one, ""


def _distance(row: tuple, one: tuple, batch: str) -> tuple:
    """Return by what the nearest run on one device is chosen: what forbids a speedup comes first."""
    doubts = [getattr(row, name) != getattr(one, name) for name in DOUBTED]
    doubts.append(variants.other_rates(row.rates, one.rates))
    unlike = len(_differences(row, one, batch))
    return unlike, not one.images_per_s > 0, one.stage != SINGLE, sum(doubts)


def _two(name: str, row: tuple, one: tuple) -> list[str]:
    """Return the two values of a column as they read in a sentence."""
    values = [str(getattr(run, name)) for run in (row, one)]
    if name not in variants.IN_WORDS:
        return values
    told = variants.apart(name, values)
    return [told[value] or "not recorded" for value in values]


def _differences(row: tuple, one: tuple, batch: str) -> list[str]:
    """List the settings whose difference forbids a speedup of `row` over `one`."""
    equal = {name: getattr(row, name) == getattr(one, name) for name in MUST_BE_EQUAL}
    equal["global_batch"] = getattr(row, batch) == getattr(one, batch)
    equal["images"] = row.train_images == one.train_images
    equal["lr"] = _same_lr(row, one)
    given = dict(equal)
    for name in MUST_BE_EQUAL:  # another recipe explains another learning rate
        equal[name] |= not all(given[decides] for decides in COLUMNS[name].determined_by[:1])
    # More CPU threads do not make a GPU faster.
    equal["threads_per_worker"] |= not is_cpu(row.device_name)
    return [name for name in MUST_BE_EQUAL if not equal[name]]


def _same_lr(row: tuple, one: tuple) -> bool:
    """Return whether the learning rates are equal, or differ as their common scaling rule says."""
    if UNKNOWN in (row.lr, one.lr) or row.lr_scale != one.lr_scale:
        return row.lr == one.lr
    bases = (float(run.lr) / columns.lr_factor(run.lr_scale, run.global_batch) for run in (row, one))
    return math.isclose(*bases, rel_tol=1e-4)
