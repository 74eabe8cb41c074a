"""job_env.sh where a real Slurm would take long to get there: starts that fail, after others.

Slurm's commands are stand-ins here. With a real Slurm most tests of this folder run it.
"""

import re
import shlex
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from checkout import Checkout

from manygpus import job_folder

GAVE_UP = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12) ran for 30001 ms\n"
LONG = job_folder.Outcome(
    restart=0,
    exit_code=1,
    why=[],
    failed_rank=None,
    saved=None,
    requeued=True,
    seconds=1000,
    said=[],
)
NOTES = ("stopped", "rank-0.failed", "outcome.json")


class Job:
    """The job 7 of stage 03 on one node, after so many restarts; its log is one of submitit's."""

    def __init__(self, checkout: Checkout, restarts: int) -> None:
        self.checkout = checkout
        self.folder = checkout.folder / "results" / "jobs" / "7"
        self.log = checkout.folder / "7_0_log.out"
        record = f"JobId=7 Restarts={restarts} RunTime=00:00:01 TimeLimit=00:30:00 CPUs/Task=2 "
        checkout.fake(
            "scontrol",
            f'case "$*" in *hostnames*) echo localhost;; *"show job"*) echo "{record}";; esac',
        )
        checkout.fake("srun", "echo srun: error: n1: task 0: Killed >&2; exit 137")

    def run(self, *arguments: str, **variables: str) -> CompletedProcess:
        place = self.checkout.folder / "03_multigpu_ddp"
        path = f"{self.checkout.commands}:{Path(sys.executable).parent}:/usr/bin:/bin"
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": str(place)}
        command = f"bash slurm_submit.sh {shlex.join(arguments)} >>'{self.log}' 2>&1"
        return self.checkout.run("bash", "-c", command, cwd=place, **slurm, **variables, PATH=path)

    def leave(self) -> None:
        """What an earlier start, or an older job, has left in the folder."""
        (self.folder / "checkpoints").mkdir(parents=True)
        for name in NOTES:
            (self.folder / name).write_text("{}\n")
        job_folder.keep_outcome(self.folder, LONG)

    @property
    def outcome(self) -> job_folder.Outcome:
        outcome = job_folder.read_outcome(self.folder)
        assert outcome, self.log.read_text()
        return outcome


def test_what_earlier_starts_have_printed_does_not_count(checkout: Checkout) -> None:
    """Neither in the job's own log, nor in that of another rank, where no line tells when a start begins."""
    job = Job(checkout, restarts=1)
    job.log.write_text("srun: error: n1: task 1: Killed\n")
    (checkout.folder / "7_1_log.out").write_text(GAVE_UP)
    assert job.run().returncode == 137
    assert job.outcome.failed_rank == 0
    assert [line for line in job.outcome.why if "rank 0" not in line] == [], job.log.read_text()


def test_a_log_of_half_a_gb_has_a_reason_also_after_a_requeue(checkout: Checkout) -> None:
    """Such as one of NCCL_DEBUG=INFO; here it has a hole of that size."""
    job = Job(checkout, restarts=1)
    job.log.write_text("ValueError: of an earlier start\n")
    says = "printf '\\nValueError: planted\\nsrun: error: n1: task 0: Exited with exit code 1\\n' >&2"
    checkout.fake("srun", f"truncate --size=+600M '{job.log}'; {says}; exit 1")
    assert job.run().returncode == 1
    (reason,) = job.outcome.why
    assert "rank 0" in reason and reason.endswith("ValueError: planted")
    checkout.fake("srun", "echo srun: error: n1: task 0: Exited with exit code 1 >&2; exit 1")
    assert job.run().returncode == 1
    (reason,) = job.outcome.why
    assert "ValueError" not in reason, reason


def test_a_variable_of_the_users_is_not_the_launcher(checkout: Checkout) -> None:
    """The ranks of srun are its tasks; those of torchrun are not."""
    job = Job(checkout, restarts=0)
    assert job.run(ranks="2", launcher="torchrun").returncode == 137
    assert job.outcome.failed_rank == 0, job.log.read_text()


def test_python_gets_each_value_as_it_is_and_no_command_line_shows_it(checkout: Checkout) -> None:
    """Also in the C locale, and a script and arguments that are quoted, empty, or of several lines."""
    job = Job(checkout, restarts=0)
    checkout.fake("python", f'echo "$@" >>called; exec \'{sys.executable}\' "$@"')
    name = 'it\'s "$HOME" `x` \\ é [x] *\ntwo = lines'
    place = checkout.folder / "03_multigpu_ddp"
    words = ["a b", "", "--x=é\n'"]
    assert job.run(*words, SLURM_JOB_NAME=name, LC_ALL="C").returncode == 137
    log = job.log.read_text()
    assert f"job     7 {name}, restart 0, " in log
    script = job_folder.read_script(job.folder)
    assert script and (script.arguments, script.job_name) == (words, name)
    called = (place / "called").read_text().splitlines()
    assert called == [f"-m manygpus.jobs.inside.in_job {question}" for question in ("begin", "end")]


def test_it_starts_again_as_slurm_has_started_it(checkout: Checkout) -> None:
    """Whatever the site's commands, and the job itself, have changed; and as often as the site allows."""
    job = Job(checkout, restarts=0)
    checkout.site(
        "activate_environment() { export PATH=/of/site:$PATH OF_SITE=${OF_SITE:-}1; unset OF_USER; }\n"
        "SITE_MONITOR=off\n"
        "SITE_RESTARTS_IN_JOB=2\n"
    )
    starts = checkout.folder / "starts"
    checkout.fake(
        "srun",
        f"""printf '%s\\0' $'\\1' "$@" "$(env | sort)" >>'{starts}'
        echo /x/epoch-2-step-0.pt >"$MANYGPUS_JOB_DIR/newest-checkpoint"
        echo srun: error: n1: task 0: Killed >&2
        exit 137""",
    )
    words = ["--name", "a b", "", "é\n'x'"]
    assert job.run(*words, OF_USER="1", SLURM_GPUS_PER_NODE="1").returncode == 137
    log = job.log.read_text()
    assert log.count("\nagain   ") == 2 and log.count("\nended   ") == 3, log
    assert log.count(", restart 0 and 1 in these nodes, ") == 1, log
    may_differ = re.compile(r"^(SHLVL|_|MANYGPUS_RESTARTS_IN_JOB)=.*\n", re.MULTILINE)
    first, *others = (may_differ.sub("", start) for start in starts.read_text().split("\1")[1:])
    assert others == [first, first]
    assert "\0".join(words) in first and "OF_SITE=1\n" in first
    assert job.outcome.restarts_in_job == 2 and not job.outcome.starts_again


FAILURES = {
    "activation": "activate_environment() { false; }\n",
    "it ends the shell": "activate_environment() { exit 0; }\n",
    "the beginning": "OMP_NUM_THREADS=many\n",
}


@pytest.mark.parametrize("site", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_start_that_fails_early_says_why(site: str, restarts: int, checkout: Checkout) -> None:
    """And nothing that an older job of this number, or an earlier start, has left."""
    job = Job(checkout, restarts)
    job.leave()
    checkout.site(site)
    assert job.run().returncode == 1
    error, *_ = job.log.read_text().splitlines()
    assert error.startswith("error: ")
    assert [f"error: {reason}" for reason in job.outcome.why] == [error]
    assert (job.outcome.restart, job.outcome.exit_code) == (restarts, 1)
    assert (job.outcome.seconds >= 1000) == bool(restarts)
    # The checkpoints of an earlier start are still good, and those of another job are not this one's.
    assert (job.outcome.saved is not None) == bool(restarts)
    assert len([*job.folder.parent.glob("7-*")]) == (not restarts)


def test_a_python_that_does_not_work(checkout: Checkout) -> None:
    """Its last line is told. How the job has ended is not, nor what an earlier start has said of it."""
    job = Job(checkout, restarts=1)
    job.leave()
    checkout.fake("python", "echo Traceback; echo 'ImportError: 3.9 is too old' >&2; exit 1")
    assert job.run().returncode == 1
    error, *others = job.log.read_text().splitlines()
    assert error.startswith("error: ") and "(ImportError: 3.9 is too old): correct activate_env" in error
    log = "\n".join(others)
    assert "with exit code 1" in log
    assert not (job.folder / "outcome.json").exists()
    assert "back to the queue" not in log
