"""How a job ends, decided from what Slurm says of it, the notes of its ranks, its exit code and its log.

What Slurm says was recorded on the practice cluster, at the end of the job script, by three releases.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ran, succeeded

from manygpus import job_folder
from manygpus.jobs import slurm
from manygpus.jobs.inside import outcome_rules as of_a_job
from manygpus.jobs.inside import resume_point
from manygpus.jobs.inside.failure_reason import Evidence, Reason
from manygpus.jobs.inside.outcome_rules import SOON_SECONDS, JobEnd, SlurmFacts
from manygpus.jobs.inside.resume_point import ResumePoint
from manygpus.monitor import samples

RECORDED = Path(__file__).parent / "scontrol"
RELEASES = ("22.05", "24.11", "26.05")
KILLED = "srun: error: n1: task 1: Killed"
NODE_FAILED = "srun: error: Node failure on n2"
RESUMES = "--checkpoint-dir"


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """A release of Slurm."""
    return request.param


def facts(release: str, situation: str) -> SlurmFacts:
    return SlurmFacts.parse((RECORDED / release / f"{situation}.txt").read_text())


def end(
    folder: Path, facts: SlurmFacts, ending: JobEnd, printed: tuple[str, ...] = (), launcher: str = "srun"
) -> job_folder.Outcome:
    return of_a_job.end(facts, folder, ending, Evidence(folder, {0: list(printed)}, launcher))


def test_what_slurm_says(release: str) -> None:
    recorded = {path.stem: facts(release, path.stem) for path in (RECORDED / release).iterdir()}
    assert [name for name in recorded if recorded[name].at_time_limit] == ["time_limit"]
    assert [name for name in recorded if recorded[name].preempted] == ["preempted"]
    assert {name for name in recorded if recorded[name].restarts} == {"node_failed", "requeued"}
    assert SlurmFacts.parse("") == SlurmFacts()  # its controller does not answer


def test_a_users_words_are_not_slurms() -> None:
    words = "Reason=TimeLimit PreemptTime=2026-11-26T17:48:21 Restarts=3"
    line = f"JobId=7 Reason=None Restarts=0 PreemptTime=None Command=/home/me/job.sh {words} WorkDir=/home/me"
    assert SlurmFacts.parse(line) == SlurmFacts(restarts=0)


@pytest.mark.parametrize(
    ("situation", "ending", "goes_back"),
    [
        ("ended_well", JobEnd(0), True),  # after USR2, in time
        ("time_limit", JobEnd(143, from_outside=True), True),
        ("scancel", JobEnd(143, from_outside=True), False),
        ("node_failed", JobEnd(143, from_outside=True), False),  # Slurm itself brings it back
        ("preempted", JobEnd(143, seconds=3), True),
        ("rank_failed", JobEnd(1, seconds=3), False),
        ("rank_failed", JobEnd(1, seconds=of_a_job.SOON_SECONDS), True),
        ("ended_well", JobEnd(0, restart=2, most_restarts=3), True),
        ("ended_well", JobEnd(0, restart=3, most_restarts=3), False),
        ("time_limit", JobEnd(143, from_outside=True, restart=3, most_restarts=3), False),
    ],
)
def test_which_jobs_that_have_saved_go_back(
    release: str, situation: str, ending: JobEnd, goes_back: bool, tmp_path: Path
) -> None:
    (tmp_path / job_folder.STOPPED).touch()
    assert of_a_job.may_go_back(facts(release, situation), tmp_path, ending) == goes_back


@pytest.mark.parametrize(
    ("situation", "ending", "goes_back"),
    [
        ("time_limit", JobEnd(143, from_outside=True), True),
        ("preempted", JobEnd(143, seconds=3), True),
        ("scancel", JobEnd(143, from_outside=True), False),
        ("rank_failed", JobEnd(1, seconds=of_a_job.SOON_SECONDS), False),
        ("ended_well", JobEnd(0), False),
        ("preempted", JobEnd(143, restart=3, most_restarts=3), False),
    ],
)
def test_which_jobs_that_resume_by_their_arguments_go_back(
    release: str, situation: str, ending: JobEnd, goes_back: bool, tmp_path: Path
) -> None:
    """Only those that Slurm has ended. What their ranks died of is no reason of their own."""
    resumes = replace(ending, resumes_unsaved=True)
    assert of_a_job.may_go_back(facts(release, situation), tmp_path, resumes) == goes_back
    assert not of_a_job.may_go_back(facts(release, situation), tmp_path, ending)
    anew = replace(resumes, would_start_anew=True)
    goes_back_anew = goes_back and situation != "time_limit"  # it would reach its limit again and again
    assert of_a_job.may_go_back(facts(release, situation), tmp_path, anew) == goes_back_anew
    if goes_back:
        (tmp_path / "rank-1.started").write_text("n1\n")
        outcome = end(tmp_path, facts(release, situation), replace(resumes, refusal=""), (KILLED,))
        assert outcome.requeued and (outcome.why, outcome.said) == ([], [])


@pytest.mark.parametrize(("situation", "from_outside"), [("rank_failed", False), ("scancel", True)])
def test_where_the_checkpoints_are_of_a_job_that_does_not_come_back(
    release: str, situation: str, from_outside: bool, tmp_path: Path
) -> None:
    slurm_facts, ending = facts(release, situation), JobEnd(143, from_outside=from_outside)
    saved = tmp_path / job_folder.CHECKPOINTS
    saved.mkdir()
    (saved / ".lock").touch()
    assert str(saved) not in "".join(end(tmp_path, slurm_facts, ending, (KILLED,)).said)
    (saved / "epoch-1-step-2.pt").touch()
    assert f"{RESUMES} {saved}" in end(tmp_path, slurm_facts, ending, (KILLED,)).said[-1]
    (tmp_path / job_folder.PLAIN).touch()
    last = end(tmp_path, slurm_facts, ending, (KILLED,)).said[-1]
    assert f"{saved} (Checkpointer: folder=" in last and RESUMES not in last
    assert f"scontrol requeue {tmp_path.name} " in last
    # By its number Slurm would mean the whole array.
    job_folder.keep_script(tmp_path, job_folder.Script("train.py", [], array_element="17_2"))
    assert "scontrol requeue 17_2 " in end(tmp_path, slurm_facts, ending, (KILLED,)).said[-1]


def test_ended_well(release: str, tmp_path: Path) -> None:
    outcome = end(tmp_path, facts(release, "ended_well"), JobEnd(0, seconds=5))
    assert outcome.well and (outcome.exit_code, outcome.why, outcome.said) == (0, [], [])


def test_a_rank_was_killed(release: str, tmp_path: Path) -> None:
    """srun reports 143, of the ranks that it had to end: the job's code is that of the first."""
    (tmp_path / "rank-1.started").write_text("n1\n")
    outcome = end(tmp_path, facts(release, "rank_failed"), JobEnd(143), (KILLED,))
    assert (outcome.exit_code, outcome.failed_rank) == (137, 1)
    assert outcome.why[0].startswith("rank 1 on n1 was killed")
    assert outcome.said == [f"why     {outcome.why[0]}"]


def test_a_plain_script_left_with_a_code(release: str, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    printed = ("srun: error: n1: task 1: Exited with exit code 7",)
    outcome = end(tmp_path, facts(release, "rank_failed"), JobEnd(7), printed)
    assert (outcome.exit_code, outcome.failed_rank) == (7, 1) and "exit code 7" in outcome.why[0]


@pytest.mark.parametrize("situation", ["time_limit", "scancel"])
def test_ended_from_outside(release: str, situation: str, tmp_path: Path) -> None:
    """What the ranks died of is no reason then. One that has saved says how to resume."""
    ending = JobEnd(143, from_outside=True)
    outcome = end(tmp_path, facts(release, situation), ending, (KILLED,))
    assert (outcome.exit_code, outcome.why, outcome.failed_rank) == (143, [], None)
    assert "from outside" in outcome.said[0] and RESUMES not in "".join(outcome.said)
    (tmp_path / "stopped").write_text("/somewhere\n")
    outcome = end(tmp_path, facts(release, situation), ending)
    assert f"{RESUMES} /somewhere" in outcome.said[-1] and outcome.saved == "/somewhere"


def test_back_in_the_queue(release: str, tmp_path: Path) -> None:
    """It neither failed nor ended well."""
    (tmp_path / "stopped").touch()
    ending = JobEnd(143, from_outside=True, restart=2, refusal="")
    outcome = end(tmp_path, facts(release, "time_limit"), ending)
    assert outcome.requeued and (outcome.why, outcome.said) == ([], [])
    assert outcome.restart == 2 and not outcome.well
    assert not end(tmp_path, facts(release, "ended_well"), replace(ending, code=0)).well


def test_slurm_refuses_the_way_back(release: str, tmp_path: Path) -> None:
    """The job must not count as COMPLETED, since its training has not ended."""
    (tmp_path / "stopped").touch()
    ending = JobEnd(0, refusal="Requested operation is presently disabled for job 4")
    outcome = end(tmp_path, facts(release, "ended_well"), ending)
    assert outcome.exit_code == 1 and not outcome.requeued
    assert "presently disabled" in outcome.why[0]
    assert outcome.said == [f"error: {outcome.why[0]}"]
    assert outcome.saved == str(tmp_path / "checkpoints")
    assert f"{RESUMES} {outcome.saved}" in outcome.why[0]
    (tmp_path / "plain").touch()  # its script may have other options
    assert RESUMES not in end(tmp_path, facts(release, "ended_well"), ending).why[0]


def test_it_has_come_back_too_often(release: str, tmp_path: Path) -> None:
    """Nor must this one count as COMPLETED."""
    (tmp_path / "stopped").write_text("/somewhere\n")
    outcome = end(tmp_path, facts(release, "requeued"), JobEnd(0, restart=3, most_restarts=3))
    assert outcome.exit_code == 1 and not outcome.requeued
    assert "SITE_MOST_RESTARTS" in outcome.why[0] and f"{RESUMES} /somewhere" in outcome.why[0]
    late = JobEnd(1, seconds=of_a_job.SOON_SECONDS, restart=3, most_restarts=3)
    outcome = end(tmp_path, facts(release, "rank_failed"), late, (KILLED,))
    assert outcome.why[0].startswith("rank 1") and "SITE_MOST_RESTARTS" in outcome.said[-1]
    ending = JobEnd(143, from_outside=True, restart=3, most_restarts=3)
    outcome = end(tmp_path, facts(release, "time_limit"), ending)
    assert outcome.exit_code == 143 and "SITE_MOST_RESTARTS" in outcome.why[0]
    # Its user, or Slurm, has decided otherwise.
    ending = replace(ending, code=143, from_outside=True)
    assert not end(tmp_path, facts(release, "scancel"), ending).why
    outcome = end(tmp_path, facts(release, "preempted"), JobEnd(0, restart=3, most_restarts=3))
    assert outcome.exit_code == 1 and "higher priority" in outcome.why[0]


def test_preempted_before_it_has_saved(release: str, tmp_path: Path) -> None:
    preempted = facts(release, "preempted")
    outcome = end(tmp_path, preempted, JobEnd(143), (KILLED,))
    assert "higher priority" in outcome.why[0] and outcome.exit_code == 143
    # A rank that had a reason of its own.
    (tmp_path / "rank-0.failed").write_text("error on rank 0: x\n")
    (tmp_path / "first-failed").symlink_to("rank-0.failed")
    assert end(tmp_path, preempted, JobEnd(1)).why == ["error on rank 0: x"]


def test_a_rank_failed_soon_and_the_others_saved(release: str, tmp_path: Path) -> None:
    (tmp_path / "stopped").write_text("/somewhere\n")
    outcome = end(tmp_path, facts(release, "rank_failed"), JobEnd(1, seconds=3), (KILLED,))
    first, last = outcome.said
    assert first.startswith("why     rank 1") and "soon after its start" in last


def test_a_node_failed(release: str, tmp_path: Path) -> None:
    """And srun returned 0."""
    outcome = end(tmp_path, facts(release, "node_failed"), JobEnd(0), (NODE_FAILED,))
    assert outcome.exit_code == 1 and "from outside" in outcome.said[0]


NEW, OLD = ResumePoint("epoch-2-step-7.pt", is_new=True), ResumePoint("epoch-2-step-0.pt", is_new=False)
MAY = JobEnd(143, resume_point=NEW, most_restarts_in_job=2)
MAY_SAVED_NOTHING = replace(MAY, resume_point=OLD)


@pytest.mark.parametrize(
    ("situation", "ending", "starts_again"),
    [
        ("rank_failed", MAY, True),
        ("rank_failed", MAY_SAVED_NOTHING, False),  # it might fail so again and again
        ("rank_failed", replace(MAY_SAVED_NOTHING, seconds=SOON_SECONDS), True),
        ("rank_failed", replace(MAY, resume_point=None, seconds=SOON_SECONDS), False),
        # Once more only if it has come further since.
        ("rank_failed", replace(MAY, restarts_in_job=1), True),
        ("rank_failed", replace(MAY_SAVED_NOTHING, restarts_in_job=1, seconds=SOON_SECONDS), False),
        ("rank_failed", replace(MAY, restarts_in_job=2), False),
        ("rank_failed", replace(MAY, most_restarts_in_job=0), False),
        ("rank_failed", replace(MAY, refusal=""), False),  # it is on its way back to the queue
        ("rank_failed", replace(MAY, nodes=2), False),  # it has only one left
        ("scancel", replace(MAY, from_outside=True), False),
        ("time_limit", MAY, False),
        ("preempted", MAY, False),
    ],
)
def test_which_jobs_start_again_in_their_nodes(
    release: str, situation: str, ending: JobEnd, starts_again: bool
) -> None:
    killed = Reason("rank 1 on n1 was killed", may_pass=True)
    slurm_facts = facts(release, situation)
    assert of_a_job.may_start_again(slurm_facts, ending, killed) == starts_again
    assert not of_a_job.may_start_again(slurm_facts, ending, Reason("error on rank 1: x"))
    assert not of_a_job.may_start_again(replace(slurm_facts, seconds_left=60), ending, killed)


@pytest.mark.parametrize(
    ("printed", "starts_again"),
    [
        (KILLED, True),
        (f"{NODE_FAILED}\nsrun: error: n1: task 0: Killed", True),
        ("srun: error: n1: task 1: Segmentation fault (core dumped)", True),
        ("[Rank 0] Watchdog caught collective operation timeout: ...", True),
        ("srun: error: n1: task 1: Exited with exit code 1", False),
        ("srun: error: n1: task 1: Out Of Memory", False),
        (f"slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n{KILLED}", False),
    ],
)
def test_after_which_failures_another_try_makes_sense(
    printed: str, starts_again: bool, tmp_path: Path
) -> None:
    """An error of the script would return, and so would one of the memory that it has asked for."""
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.started").write_text("n1\n")
    outcome = end(tmp_path, facts("24.11", "rank_failed"), MAY, tuple(printed.split("\n")))
    assert outcome.why and outcome.starts_again == starts_again
    assert (NEW.text in outcome.said[-1]) == starts_again


@pytest.mark.parametrize(
    ("error", "starts_again"),
    [
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", True),
        ("OSError: [Errno 5] Input/output error: '/data/train.bin'", True),
        ("ValueError: x", False),
        ("OutOfMemoryError: CUDA out of memory.", False),
    ],
)
def test_an_error_of_hardware_may_pass(error: str, starts_again: bool, tmp_path: Path) -> None:
    (tmp_path / "rank-0.failed").write_text(f"error on rank 0: {error}\n")
    printed = ("srun: error: n1: task 0: Exited with exit code 1",)
    assert end(tmp_path, facts("24.11", "rank_failed"), MAY, printed).starts_again == starts_again


def test_what_a_job_would_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its training notes, or what --when-requeued names; without either it would train anew."""

    def script(words: list[str] | None) -> None:
        job_folder.keep_script(tmp_path, job_folder.Script("train.py", [], when_requeued=words))

    script(None)
    assert resume_point.find(tmp_path) is None
    monkeypatch.chdir(tmp_path)
    script(["--resume", "*.pt"])
    assert resume_point.find(tmp_path) is None
    saved = tmp_path / "model.pt"
    saved.touch()
    os.utime(saved, (time.time() - 60,) * 2)
    assert resume_point.find(tmp_path) == ResumePoint("with --resume model.pt", is_new=False)
    os.utime(saved, (time.time() + 60,) * 2)
    assert resume_point.find(tmp_path) == ResumePoint("with --resume model.pt", is_new=True)
    script([])
    assert resume_point.find(tmp_path) == ResumePoint("anew", is_new=False)
    (tmp_path / job_folder.RESUMED_FROM).write_text("old\n")
    assert resume_point.find(tmp_path) == ResumePoint("from old", is_new=False)
    (tmp_path / job_folder.NEWEST_CHECKPOINT).write_text("new\n")
    assert resume_point.find(tmp_path) == ResumePoint("from new", is_new=True)


def ask(question: str, folder: Path, **values: object) -> str:
    """What in_job answers, asked as by a job script that has begun."""
    inputs = {"launcher": "srun", "seconds": 5, "most_restarts": 50, "failure": "", "begun": 1}
    inputs |= {"most_restarts_in_job": 1, "nodes": 1, "job": "7"}
    inputs |= {"from_outside": "", "resumes_unsaved": "", "folder": folder, "log": folder / "log"} | values
    entries = "".join(f"{name}={value}\0" for name, value in inputs.items()) + "\0"
    command = (sys.executable, "-m", "manygpus.jobs.inside.in_job", question)
    return succeeded(ran(*command, env=ENVIRONMENT, input=entries)).stdout


@pytest.mark.parametrize(
    ("plain", "restart", "situation", "noted"),
    [
        (True, 0, "ended_well", False),
        (True, 1, "ended_well", True),
        (True, 1, "preempted", False),
        (False, 0, "ended_well", True),
        (False, 1, "preempted", True),
    ],
)
def test_a_start_after_the_end_has_nothing_to_do(
    plain: bool, restart: int, situation: str, noted: bool, tmp_path: Path
) -> None:
    """The next start looks for this note. A plain script that is preempted may leave with 0, to come back."""
    if plain:
        (tmp_path / job_folder.PLAIN).touch()
    shown = (RECORDED / "24.11" / f"{situation}.txt").read_text()
    ask("end", facts=shown, folder=tmp_path, code=0, restart=restart)
    assert (tmp_path / job_folder.ENDED_FOR_GOOD).exists() == noted


@pytest.mark.parametrize(
    ("words", "back"),
    [(["--resume"], "yes"), (["--resume", "{}/model-*.pt"], "yes"), (["x/*"], "no"), ([], "no")],
)
def test_at_its_time_limit_a_job_comes_back_if_it_has_something_to_resume_from(
    release: str, words: list[str], back: str, tmp_path: Path
) -> None:
    (tmp_path / "model-1.pt").touch()
    words = [word.replace("{}", str(tmp_path)) for word in words]
    job_folder.keep_script(tmp_path, job_folder.Script("train.py", [], when_requeued=words))
    facts_of_job = (RECORDED / release / "time_limit.txt").read_text()
    answer = ask("back", facts=facts_of_job, folder=tmp_path, code=143, restart=0, resumes_unsaved=1)
    assert answer == f"{back}\n"


def test_the_job_script_itself_has_failed(release: str, tmp_path: Path) -> None:
    """Its log has the sentence already. What ranks have left is of an earlier start, if it has not begun."""
    (tmp_path / "rank-1.started").write_text("n1\n")
    failed = JobEnd(1, begun=False, failure="there is no script x.py: correct its name")
    outcome = end(tmp_path, facts(release, "requeued"), failed, (KILLED,))
    assert (outcome.why, outcome.said, outcome.failed_rank) == ([failed.failure], [], None)
    (tmp_path / "stopped").write_text("/somewhere\n")
    outcome = end(tmp_path, facts(release, "requeued"), failed)
    assert outcome.why == [failed.failure] and f"{RESUMES} /somewhere" in outcome.said[0]
    without_a_word = end(tmp_path, facts(release, "requeued"), replace(failed, failure=""))
    assert not without_a_word.why


def test_the_outcome_is_kept(tmp_path: Path) -> None:
    assert job_folder.read_outcome(tmp_path) is None
    outcome = end(tmp_path, SlurmFacts(), JobEnd(143), (KILLED,))
    job_folder.keep_outcome(tmp_path, outcome)
    assert job_folder.read_outcome(tmp_path) == outcome
    (tmp_path / "outcome.json").write_text('{"exit_code": 0}')
    assert job_folder.read_outcome(tmp_path) is None


def find_stalled_ranks(folder: Path, until_the_end: bool) -> None:
    """Write the verdict of a job whose ranks did nothing."""
    evidence = {"seconds": 116.0, "cause": "unknown", "until_the_end": until_the_end}
    slow = {"kind": samples.STALLED_RANK, "evidence": {"times_as_long": 2.0}, "sentence": "rank 0 is slow"}
    silent = slow | {"evidence": evidence, "sentence": "rank 1 did nothing"}
    (folder / samples.FOLDER).mkdir(exist_ok=True)
    (folder / samples.FOLDER / samples.VERDICT).write_text(json.dumps({"findings": [slow, silent]}))


def test_a_job_that_hung_until_its_limit_needs_no_more_time(release: str, tmp_path: Path) -> None:
    """The first failure that a rank tells comes before it; of a job that went on, Slurm's reason stays."""
    find_stalled_ranks(tmp_path, until_the_end=True)
    ending, at_limit = JobEnd(143, from_outside=True), facts(release, "time_limit")
    hung = end(tmp_path, at_limit, ending)
    assert "rank 1 did nothing" in hung.why[0] and any("rank 1 did nothing" in line for line in hung.said)
    # Ranks that outlive SIGTERM leave the job script no time for an outcome.
    for outcome in (hung, None, replace(hung, why=[])):
        sentence = of_a_job.reason(tmp_path, outcome, slurm.TIMEOUT)
        assert "rank 1 did nothing" in sentence and "--time" not in sentence
    assert of_a_job.reason(tmp_path, replace(hung, why=["rank 2 failed"]), slurm.TIMEOUT) == "rank 2 failed"
    assert end(tmp_path, facts(release, "scancel"), ending).why == []
    find_stalled_ranks(tmp_path, until_the_end=False)
    assert end(tmp_path, at_limit, ending).why == []
    assert "--time" in of_a_job.reason(tmp_path, None, slurm.TIMEOUT)
