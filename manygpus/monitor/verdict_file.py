"""The verdict as JSON, for programs: in the job's folder, and beside the record of each training."""

import json
from dataclasses import asdict
from pathlib import Path

from manygpus import json_document
from manygpus.files import replacing
from manygpus.monitor import samples, wording
from manygpus.monitor.findings.finding import Finding, Location
from manygpus.monitor.sample_tables import GpuId, RankId
from manygpus.monitor.verdict import NothingSeen, StartedByScripts, TooShort, Verdict
from manygpus.record import records

# Of schemas/verdict.json.
SCHEMA_VERSION = 3
KINDS_OF_NOT_JUDGED = {
    NothingSeen: "nothing_seen",
    TooShort: "too_short",
    StartedByScripts: "started_by_scripts",
}


def keep(folder: Path, verdict: Verdict) -> None:
    """Write `verdict.json` to `folder`, and `<run_id>.monitor.json` next to the CSV of each training.

    Raises:
        OSError: if one of them cannot be written.
    """
    document = json_document.plain(as_json(verdict))
    for path in (folder / samples.VERDICT, *map(records.verdict_file, verdict.records)):
        with replacing(path) as file:
            json.dump(document, file, indent=1)


def as_json(verdict: Verdict) -> dict[str, object]:
    """Return the verdict as schemas/verdict.json describes it.

    The values of a finding's evidence carry their units in their names; shares are from 0 to 1.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "findings": [_finding_as_json(finding, verdict.is_plain) for finding in verdict.findings],
        "not_judged": _not_judged_as_json(verdict),
        "seconds": verdict.seconds,
        "devices": asdict(verdict.devices),
        "energy_kwh": verdict.energy_kwh,
        "notes": wording.all_notes(verdict),
        "too_much": [resource.as_json() for resource in verdict.too_much],
        "last_ranks": {
            "idle": _locations_as_json(verdict.last_ranks.idle),
            "at_work": _locations_as_json(verdict.last_ranks.at_work),
        },
    }


def _finding_as_json(finding: Finding, is_plain: bool) -> dict[str, object]:
    return {
        "kind": finding.kind,
        "grade": finding.grade.value,
        "locations": _locations_as_json(finding.locations),
        "lost_share": finding.lost_share,
        "evidence": finding.evidence(),
        "sentence": finding.sentence(is_plain),
    }


def _not_judged_as_json(verdict: Verdict) -> dict[str, object] | None:
    if verdict.not_judged is None:
        return None
    kind = KINDS_OF_NOT_JUDGED[type(verdict.not_judged)]
    return {"kind": kind, "sentence": wording.not_judged_sentence(verdict)}


def _locations_as_json(locations: list[Location]) -> list[dict[str, object]]:
    """Return the node of each, and the number of the GPU or the rank if it is one."""
    documents: list[dict[str, object]] = []
    for location in locations:
        if isinstance(location, GpuId):
            documents.append({"node": location.node, "gpu": location.index})
        elif isinstance(location, RankId):
            documents.append({"node": location.node, "rank": location.rank})
        else:
            documents.append({"node": location})
    return documents
