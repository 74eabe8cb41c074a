"""What a comparison shows, in words."""

import pandas as pd

from trainkit.compare import trust
from trainkit.compare.comparison import SECTION_BY, TUTORIAL_STAGES, is_cpu, stage_name
from trainkit.record.columns import DDP, DP, SINGLE

STRICT = "global batch {0.global_batch}"
WEAK = "batch {0.batch_per_device} on each"


def verdict(table: pd.DataFrame) -> str:
    """Say what the comparison (from `compare`) shows at its largest counts, and whether to doubt it."""
    clauses = []
    for names, section in table.groupby(SECTION_BY):
        where = [name for name, column in zip(names, SECTION_BY, strict=True) if table[column].nunique() > 1]
        # With trainings of one's own, no stage of the tutorial is missed.
        present = set(section.stage)
        own = sorted(present - set(TUTORIAL_STAGES))
        judged = [stage for stage in (DDP, DP) if stage in present or not own] + own
        text = "; ".join(_clause(stage, section[section.stage == stage]) for stage in judged)
        clauses.append(f"on {', '.join(where)}: {text}" if where else text)
    text = "; ".join(clauses) + "." + trust.sentence(table)
    # The name of a training of one's own stays unchanged.
    return text[0].upper() + text[1:] if text.startswith(("there ", "on ")) else text


def _clause(stage: str, rows: pd.DataFrame) -> str:
    name, several = stage_name(stage), rows[rows.devices > 1]
    one_process = stage == DP or (rows.world_size < rows.devices).any()
    unit = "device" if one_process else "worker"
    if rows.empty:
        return f"there is no {name} run"
    if several.empty:
        return f"{name} had only one {unit} and cannot be judged here"
    units = f"CPU {unit}s" if is_cpu(rows.device_name.iloc[0]) else f"{unit}s"
    strict, weak = several[several.speedup.notna()], several[several.weak_efficiency.notna()]
    if strict.empty and weak.empty:
        why = several.why.iloc[0] if several.why.nunique() == 1 else "for the reasons noted"
        return f"{name} on {several.devices.max()} {units} cannot be judged here ({why})"
    weak = weak.assign(
        speedup=weak.weak_efficiency * weak.devices,
        efficiency=weak.weak_efficiency,
        baseline=weak.weak_baseline,
    )
    clauses = [
        f"{scaling}on {rows.devices.max()} {units} trained {_tell_speedup(rows, name, batch)}"
        for rows, scaling, batch in ((strict, "", STRICT), (weak, "in weak scaling ", WEAK))
        if not rows.empty
    ]
    return f"{name} {', and '.join(clauses)}"


def _tell_speedup(rows: pd.DataFrame, name: str, batch: str) -> str:
    """Describe the speedup at the largest device count of `rows`, at best and at worst."""
    top = rows[rows.devices == rows.devices.max()].sort_values("speedup", ascending=False)
    best, worst = top.iloc[0], top.iloc[-1]
    one = "single" if best.baseline == SINGLE else f"{name} on one"
    text = f"{best.speedup:.2f}x as fast as {one} ({_tell_where(best, batch)})"
    if len(top) > 1:
        text += f" at best, {worst.speedup:.2f}x at worst ({_tell_where(worst, batch)})"
    return text + (", which is slower than one" if best.speedup < 1 else "")


def _tell_where(row: pd.Series, batch: str) -> str:
    nodes = f"{row.nodes} nodes" if row.nodes > 1 else ""
    doubt = f"doubt {row.doubt}" if row.doubt else ""
    where = ", ".join(filter(None, [batch.format(row), row.variant, nodes, doubt]))
    return f"{100 * row.efficiency:.0f} % efficiency at {where}"
