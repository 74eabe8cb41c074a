"""The verdict as JSON."""

import json
from pathlib import Path

import pytest
import traces
from sampled_jobs import MakeJob
from traces import FROM_LOADERS, FULL, STARVED, SYNTHETIC, UNUSED, folder_of

from manygpus import job_folder
from manygpus.monitor import samples, verdict_file, wording
from manygpus.monitor.verdict import judge
from manygpus.record import records


def test_the_verdict_is_kept_as_json(make_job: MakeJob) -> None:
    folder = make_job([STARVED, STARVED, UNUSED], ranks=2, facts=FROM_LOADERS)
    verdict = judge(folder)
    verdict_file.keep(folder, verdict)
    kept = json.loads((folder / samples.VERDICT).read_text())
    assert kept["schema_version"] == verdict_file.SCHEMA_VERSION
    assert kept["devices"] == f"3 x {traces.GPU_NAME}"
    assert kept["energy_kwh"] == verdict.energy_kwh
    waiting, unused = kept["findings"]
    assert (waiting["kind"], waiting["grade"]) == ("waiting_for_loader", "waste")
    assert waiting["evidence"]["loader_workers"] == 2 and waiting["evidence"]["is_resident"] is False
    assert unused["evidence"] == {"gpus": 1, "used_gpus": 2}
    assert waiting["sentence"] == wording.sentences(verdict)[0]
    (run,) = samples.runs(folder)
    assert json.loads(records.verdict_file(run).read_text()) == kept


@pytest.mark.parametrize("name", [*SYNTHETIC, "cpu_waiting_for_loader", "cpu_network_bound"])
def test_every_evidence_can_be_kept(name: str) -> None:
    """As JSON, in which there is no NaN."""
    verdict = judge(folder_of(name))
    text = json.dumps(verdict_file.as_json(verdict), allow_nan=False)
    assert [finding["kind"] for finding in json.loads(text)["findings"]] == [
        finding.kind for finding in verdict.findings
    ]


def test_records_that_are_not_there_or_no_records(make_job: MakeJob, tmp_path: Path) -> None:
    folder = make_job([FULL] * 2)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "a folder").mkdir()
    paths = [tmp_path / "gone.csv", tmp_path / "other.csv", tmp_path / "a folder"]
    (folder / job_folder.RUNS).write_text("\n".join(map(str, paths)))
    verdict = judge(folder)
    assert verdict.findings == [] and len(verdict.notes) == 3
    verdict_file.keep(folder, verdict)
    assert not list(tmp_path.glob("*.monitor.json"))
