"""The time of a step by phase and number of workers: a table from stage 03's breakdown.py."""

import io
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from trainkit.compare import comparison
from trainkit.compare.page import markdown
from trainkit.runtime.errors import UserError
from trainkit.runtime.files import explained, read_text, replacing
from trainkit.schema import records

PHASES = ["data", "forward", "backward", "exchange", "waiting", "optimizer"]
SETTINGS = ["device_name", "dataset", "model", "width", "precision", "recipe", "loader", "workers_per_loader"]
SETTINGS += ["threads_per_worker", "debug", "settings"]
SHAPE = ["global_batch", "world_size", "nodes"]
COLUMNS = ["run_id", *SETTINGS, *SHAPE, "rank", "repeat", "phase", "seconds"]


def write(files: Iterable[Path], path: Path) -> None:
    """Write a table of Markdown to `path`; measurements with equal settings, batch and workers are pooled.

    Raises:
        UserError: if a file cannot be read, or `path` cannot be written.
    """
    table = milliseconds(pd.concat([_read(file) for file in files], ignore_index=True))
    shown = table.assign(settings=[_settings(row) for _, row in table.iterrows()])
    shown = shown.rename(columns={"world_size": "workers", "global_batch": "batch"})
    shown = shown[["workers", "nodes", "batch", *PHASES, "step", "settings"]]
    cells = shown.apply(lambda column: column.map("{:.2f}".format if column.dtype == float else str))
    fix = "free the space, or give another --results-dir."
    with explained(f"{path} cannot be written", fix), replacing(path) as file:
        file.write(f"ms of a training step\n\n{markdown(cells)}\n")


def milliseconds(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per configuration: the mean over its ranks of each phase, and of the `step` (ms).

    Each rank counts with its median over all repeats, so a busy moment of the machine does not matter.
    """
    of_rank = rows.groupby([*SETTINGS, *SHAPE, "phase", "rank"]).seconds.median()
    table = 1000 * of_rank.groupby([*SETTINGS, *SHAPE, "phase"]).mean().unstack("phase")
    return table[[*PHASES, "step"]].reset_index()


def _read(file: Path) -> pd.DataFrame:
    try:
        content = read_text(file, records.LARGEST_FILE, errors="strict")
        rows = pd.read_csv(io.StringIO(content), sep="\t", dtype=dict.fromkeys(SETTINGS, str))
        rows = rows.assign(settings=rows.get("settings", "")).fillna({"settings": ""})[COLUMNS]
        numbers = ["rank", "seconds", *SHAPE]
        rows[numbers] = rows[numbers].apply(pd.to_numeric)
        if rows.isna().any(axis=None) or set(rows.phase) != {*PHASES, "step"}:
            raise ValueError("it is cut short, or has phases that are not known")
    except (OSError, ValueError, KeyError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(f"{file}: not read, {why}. Take it out of this folder.") from None
    return rows


def _settings(row: pd.Series) -> str:
    words = [row.device_name, comparison.with_model(row.dataset, row.model)]
    named = [
        name for name in SETTINGS[3:-1] if name not in ("workers_per_loader", "debug") or row[name] != "0"
    ]
    words += [f"{name.replace('_', ' ')} {row[name]}" for name in named] + [row.settings] * (
        row.settings != ""
    )
    words += ["CPU workers standing in for GPUs"] * comparison.is_cpu(row.device_name)
    return ", ".join(words)
