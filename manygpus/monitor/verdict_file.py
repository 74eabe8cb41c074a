"""The verdict as JSON, for programs: in the job's folder, and beside the record of each training."""

import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from manygpus.files import replacing
from manygpus.monitor import samples, wording
from manygpus.monitor.findings.finding import Finding
from manygpus.monitor.findings.words import name_locations
from manygpus.monitor.verdict import Verdict
from manygpus.record import records

SCHEMA_VERSION = 2


def keep(folder: Path, verdict: Verdict) -> None:
    """Write `verdict.json` to `folder`, and `<run_id>.monitor.json` next to the CSV of each training.

    Raises:
        OSError: if one of them cannot be written.
    """
    document = as_json(verdict)
    for path in (folder / samples.VERDICT, *map(records.verdict_file, verdict.records)):
        with replacing(path) as file:
            json.dump(document, file, indent=1)


def as_json(verdict: Verdict) -> dict[str, object]:
    """Return the verdict for JSON, with null for what is unknown.

    The values of a finding's evidence carry their units in their names; shares are from 0 to 1.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "findings": [_finding_as_json(finding, verdict.is_plain) for finding in verdict.findings],
        "unknown": wording.not_judged_sentence(verdict),
        "seconds": _plain_value(verdict.seconds),
        "devices": wording.devices_words(verdict.devices),
        "energy_kwh": _plain_value(verdict.energy_kwh),
        "notes": wording.all_notes(verdict),
        "enough": wording.next_request_sentence(verdict.too_much),
        "still_there": wording.last_ranks_words(verdict),
    }


def _finding_as_json(finding: Finding, is_plain: bool) -> dict[str, object]:
    return {
        "kind": finding.kind,
        "grade": finding.grade.value,
        "where": name_locations(finding.locations),
        "lost_share": _plain_value(finding.lost_share),
        "evidence": _plain_value(finding.evidence()),
        "sentence": finding.sentence(is_plain),
    }


def _plain_value(value: object) -> object:
    """Return a value as JSON has it, also one of NumPy; None for NaN."""
    if isinstance(value, Mapping):
        return {name: _plain_value(part) for name, part in value.items()}
    if isinstance(value, Enum):
        return value.name.lower()
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None
    return value
