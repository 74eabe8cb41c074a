"""The list of the jobs, from what is in their folders and what Slurm says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from manygpus import job_folder, launchers
from manygpus.commands import jobs as jobs_command
from manygpus.job_folder import Outcome, Script
from manygpus.jobs.site import read_site
from manygpus.jobs.slurm import JobStatus
from manygpus.jobs.watch import job_list
from manygpus.monitor import samples

WELL = Outcome(
    restart=1,
    exit_code=0,
    why=[],
    failed_rank=None,
    saved=None,
    requeued=False,
    seconds=125,
    said=[],
)
FAILED = replace(WELL, exit_code=1, why=["rank 1 on n1 was killed", "another"])
SAVED = replace(WELL, saved="/jobs/7/checkpoints")
SENTENCE = "ranks 0-1 wait for their batches"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a job with a verdict that has two findings."""
    job_folder.keep_script(tmp_path, Script("/home/me/train.py", ["--lr", "0.1"]))
    sampled = tmp_path / samples.FOLDER
    sampled.mkdir()
    findings = {
        "findings": [
            {"kind": "waiting", "lost_share": 0.5, "sentence": text} for text in (SENTENCE, "another")
        ]
    }
    (sampled / samples.VERDICT).write_text(json.dumps(findings))
    return tmp_path


@pytest.mark.parametrize(
    ("outcome", "status", "state", "note"),
    [
        (WELL, None, "done", SENTENCE),
        (FAILED, JobStatus("FAILED"), "failed", "rank 1 on n1 was killed"),
        (FAILED, JobStatus("GONE"), "failed", "rank 1 on n1 was killed"),
        (replace(FAILED, why=[], exit_code=143), JobStatus("CANCELLED"), "failed", "cancelled"),
        (replace(FAILED, why=[], exit_code=143), None, "failed", "exit code 143"),
        (SAVED, JobStatus("COMPLETED"), "stopped", "/jobs/7/checkpoints"),
        (replace(FAILED, saved=SAVED.saved), JobStatus("FAILED"), "failed", "rank 1 on n1 was killed"),
        (replace(SAVED, requeued=True), JobStatus("PENDING", "BeginTime", 1), "queued", "BeginTime"),
        (None, JobStatus("RUNNING", "None", 1), "running", ""),
        (None, JobStatus("TIMEOUT", "TimeLimit", 1), "failed", "time limit"),
        (None, JobStatus("UNKNOWN", "no answer", 1), "unknown", "no answer"),
        (None, JobStatus("GONE"), "failed", "ended"),
    ],
)
def test_a_job_of_slurm(
    outcome: Outcome | None, status: JobStatus | None, state: str, note: str, folder: Path
) -> None:
    row = job_list.of_folder("7", folder, outcome, status)
    assert (row.number, row.shown_script, row.state) == ("7", "me/train.py --lr 0.1", state)
    assert note in row.note and bool(note) == bool(row.note)
    if outcome:
        assert row.cells()[4:6] == ("2 min", "1")


def test_the_time_of_a_job_is_that_of_all_its_starts(folder: Path) -> None:
    """Slurm 24.11 may start one that has ended well once more, which then does nothing."""
    running = JobStatus("RUNNING", "None", 1)
    for starts, seconds in enumerate((60, 90), start=1):
        if starts > 1:
            (folder / job_folder.OUTCOME).rename(folder / job_folder.EARLIER_OUTCOME)
        before = (starts - 1) * 60
        assert before <= job_list.of_folder("7", folder, None, running).seconds < before + 60
        job_folder.keep_outcome(folder, replace(WELL, seconds=seconds))
    job_folder.keep_outcome(folder, replace(WELL, seconds=0, restart=2))
    assert job_list.of_folder("7", folder, job_folder.read_outcome(folder), None).seconds == 150


@pytest.mark.parametrize(
    ("outcome", "status", "restarts"),
    [
        (None, JobStatus("RUNNING", restarts=2), 2),
        # Its outcome is that of the start before.
        (replace(SAVED, requeued=True, restart=0), JobStatus("PENDING", restarts=1), 1),
        (replace(FAILED, restart=2), JobStatus("FAILED", restarts=2), 2),
        # Slurm has forgotten it, or was not asked.
        (replace(FAILED, restart=2), JobStatus("GONE"), 2),
        (replace(WELL, restart=2), None, 2),
        (None, None, 0),
    ],
)
def test_how_often_a_job_has_come_back(
    outcome: Outcome | None, status: JobStatus | None, restarts: int, folder: Path
) -> None:
    assert job_list.of_folder("7", folder, outcome, status).cells()[5] == str(restarts)


def test_a_job_that_has_started_again_in_its_nodes(folder: Path) -> None:
    """While it runs, it tells why; then what is told of any other."""
    job_folder.keep_outcome(folder, replace(FAILED, restart=0, starts_again=True))
    (folder / job_folder.OUTCOME).rename(folder / job_folder.EARLIER_OUTCOME)
    row = job_list.of_folder("7", folder, None, JobStatus("RUNNING", "None", 0))
    assert (row.state, row.restarts) == ("running", 1) and FAILED.why[0] in row.note
    job_folder.keep_outcome(folder, replace(WELL, restart=0))
    row = job_list.of_folder("7", folder, job_folder.read_outcome(folder), None)
    assert (row.state, row.restarts, row.note) == ("done", 1, SENTENCE)


def test_without_findings_it_is_the_first_line_of_the_verdict(folder: Path) -> None:
    sampled = folder / samples.FOLDER
    (sampled / samples.VERDICT).write_text('{"findings": []}')
    (sampled / samples.TOLD).write_text("watch   no waste found\nwatch   job 7 was watched for 20 s\n")
    assert job_list.of_folder("7", folder, WELL, None).note == "no waste found"


def test_a_job_of_an_earlier_kit_or_with_many_arguments_has_a_row(folder: Path) -> None:
    arguments = ["--words", "a\nb", *["more"] * 20, "--seed", "17"]
    job_folder.keep_script(folder, Script("/home/me/train.py", arguments))
    row = job_list.of_folder("7", folder, WELL, None)
    assert row.shown_script.startswith("me/train.py --words 'a\\nb' ")
    assert row.shown_script.endswith("more --seed 17")
    assert len(row.shown_script) == job_list.MOST_OF_A_SCRIPT
    (folder / job_folder.SCRIPT).unlink()
    assert job_list.of_folder("7", folder, WELL, None).shown_script == "-"


def test_what_another_machine_knows_of_its_processes_is_not_guessed(tmp_path: Path) -> None:
    """Of a sweep whose runs are processes of a node, seen from the login node."""
    site = read_site()._replace(jobs_dir=tmp_path)
    folder = tmp_path / "submitit" / "train"
    folder.mkdir(parents=True)
    job_folder.keep_script(folder, Script("/home/me/train.py", []))
    (folder / f"{launchers.LARGEST_NUMBER}_submitted.pkl").touch()
    note = folder / "rank-0.started"
    for node, state in ((launchers.node(), "failed"), ("another", "unknown")):
        note.write_text(f"{node}\n")
        assert [row.state for row in job_list.jobs(site)] == [state]
    note.rename(folder / "rank-0.finished")
    assert [row.state for row in job_list.jobs(site)] == ["done"]


def test_jobs_are_told_apart_by_their_name_their_folder_and_their_arguments(folder: Path) -> None:
    script = Script("/home/me/projects/vae/main.py", ["--seed", "2"], job_name="night", log="/logs/7.log")
    job_folder.keep_script(folder, script)
    row = job_list.of_folder("7", folder, WELL, None)
    assert row.cells()[:3] == ("7", "night", "vae/main.py --seed 2") and row.log == "/logs/7.log"
    for word in ("7", "night", "projects/vae", "--seed 2"):
        assert row.matches(word)
    for word in ("17", "ppo", "--seed 1"):
        assert not row.matches(word)


def test_the_number_of_an_array_lists_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep prints `array 97`. The number of one of them shows it alone, with the end of its log."""
    log = tmp_path / "7.log"
    log.write_text("its last line\n")
    number_of = {f"97_{element}": f"lr{element}" for element in (1, 2)} | {"7": "seven"}
    rows = [
        job_list.JobRow(number, "train", Script(f"/home/me/{name}.py", []), "done", log=str(log))
        for number, name in number_of.items()
    ]
    monkeypatch.setattr(job_list, "jobs", lambda _: rows)
    jobs_command.show(read_site(), "97", as_json=False)
    listed = capsys.readouterr().out
    assert "lr1.py" in listed and "lr2.py" in listed
    assert "seven.py" not in listed and "its last line" not in listed
    jobs_command.show(read_site(), "97_2", as_json=False)
    listed = capsys.readouterr().out
    assert "lr2.py" in listed and "lr1.py" not in listed and "its last line" in listed
