"""The verdict as JSON."""

import json
from pathlib import Path

import pytest
import traces
from json_documents import document
from sampled_jobs import MakeJob, has_asked
from traces import FROM_LOADERS, FULL, STARVED, SYNTHETIC, UNUSED, folder_of

from manygpus import job_folder, json_document
from manygpus.monitor import samples, verdict_file, wording
from manygpus.monitor.verdict import judge
from manygpus.record import records


def test_the_verdict_is_kept_as_json(make_job: MakeJob) -> None:
    folder = make_job([STARVED, STARVED, UNUSED], ranks=2, facts=FROM_LOADERS)
    has_asked(folder, "8 2 61440 1")
    verdict = judge(folder)
    verdict_file.keep(folder, verdict)
    kept = document((folder / samples.VERDICT).read_text(), "verdict")
    assert kept["devices"] == {"gpus": 3, "gpu_name": traces.GPU_NAME, "cpu_workers": 0, "nodes": 1}
    assert "--mem" in [resource["option"] for resource in kept["too_much"]]
    assert kept["energy_kwh"] == verdict.energy_kwh
    waiting, unused = kept["findings"]
    assert (waiting["kind"], waiting["grade"]) == ("waiting_for_loader", "waste")
    assert waiting["evidence"]["loader_workers"] == 2 and waiting["evidence"]["is_resident"] is False
    assert [rank["rank"] for rank in waiting["locations"]] == [0, 1]
    assert [set(gpu) for gpu in unused["locations"]] == [{"node", "gpu"}]
    assert unused["evidence"] == {"gpus": 1, "used_gpus": 2}
    assert waiting["sentence"] == wording.sentences(verdict)[0]
    (run,) = samples.runs(folder)
    assert json.loads(records.verdict_file(run).read_text()) == kept


@pytest.mark.parametrize("name", [*SYNTHETIC, "cpu_waiting_for_loader", "cpu_network_bound"])
def test_every_evidence_can_be_kept(name: str) -> None:
    """As JSON, in which there is no NaN."""
    verdict = judge(folder_of(name))
    text = json.dumps(json_document.plain(verdict_file.as_json(verdict)), allow_nan=False)
    assert [finding["kind"] for finding in document(text, "verdict")["findings"]] == [
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
