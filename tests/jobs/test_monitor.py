"""slurm/monitor.py, and the jobs that are sampled: what they tell of themselves, and nothing else changes.

What the samples hold is the matter of test_collector.py, and the verdict that of test_verdict.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import Checkout, wait_until
from cluster import RunningCluster
from conftest import failed, one_error
from json_documents import document
from sampled_jobs import MakeJob
from traces import FULL

from manygpus import job_folder
from manygpus.monitor import samples

MONITOR, ON = "slurm/monitor.py", "SITE_MONITOR=on\n"  # the site file counts more than the tests' own "off"
TRAINING = ("--epochs", 1, "--train-size", 600, "--test-size", 200, "--batch-size", 100)
TRAINING += ("--width", 4, "--precision", "fp32", "--no-cuda")
# A rank that trains nothing: it says that it has started, and ends as is planted.
RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from manygpus import errors

folder = Path(os.environ["MANYGPUS_JOB_DIR"])
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
restart = os.environ.get("SLURM_RESTART_COUNT", "0")

def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition("".join(path.read_text() for path in folder.glob("monitor/*.csv"))):
        assert time.monotonic() < deadline, "it is not in the samples"
        time.sleep(0.1)

def wait_until_two_are_seen():
    import torch  # by which a rank is known for one
    wait_until(lambda text: ",rank,0," in text and ",rank,1," in text)

def wait_for_samples(number):
    counts = []
    wait_until(lambda text: counts.append(text.count("node,")) or counts[-1] >= counts[0] + number)

@errors.entrypoint
def main():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # there is no checkpoint to save
    {}

main()
"""


def plant(checkout: Checkout, ending: str, stage: str = "01_singlegpu") -> str:
    (checkout.folder / stage / "own.py").write_text(RANK.replace("{}", ending))
    return "own.py"


def watch_lines(text: str) -> list[str]:
    """The lines of the verdict in a log."""
    return [line for line in text.splitlines() if line.startswith("watch   ")]


def ranks_in(folder: Path) -> dict[str, set[str]]:
    """The ranks that were seen on each node, by the samples of a job."""
    rows = samples.read(folder)
    return {
        node: {row["number"] for row in rows if (row["node"], row["what"]) == (node, samples.RANK)}
        for node in {row["node"] for row in rows}
    }


@pytest.fixture
def on_cluster(tmp_path: Path, cluster: RunningCluster) -> Iterator[Checkout]:
    checkout = Checkout(tmp_path / "a checkout", cluster)
    checkout.site(ON)
    yield checkout
    cluster.run(["scancel", "--user", str(os.getuid())])  # what a test that failed has left


def monitor_of(checkout: Checkout, job: int | str) -> Path:
    return checkout.folder / "results" / "jobs" / str(job) / "monitor"


# --- a command, on this machine ---------------------------------------------------------------------


def test_a_command_is_sampled(checkout: Checkout) -> None:
    """It has a job's folder, its exit code is that of monitor.py, and it can be looked at afterwards."""
    command = ("bash", "-c", "echo in $MANYGPUS_JOB_DIR; exit 3")
    done = checkout.python(MONITOR, "--", *command)
    assert done.returncode == 3, done.stderr
    first, *verdict = done.stdout.splitlines()
    folder = Path(first.removeprefix("in "))
    assert folder.parent == checkout.folder / "results" / "jobs"
    assert verdict == watch_lines(done.stdout)
    again = checkout.python(MONITOR, "--verdict", folder)
    assert [f"watch   {line}" for line in again.stdout.splitlines()] == verdict
    assert json.loads((folder / "monitor" / "verdict.json").read_text())["findings"] == []


@pytest.mark.full
def test_a_driver_that_hangs_does_not_hold_the_command(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("import time\ndef nvmlInit():\n    time.sleep(600)\n")
    environment = {
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTHONPATH": f"{tmp_path}:{checkout.environment['PYTHONPATH']}",
    }
    done = checkout.python(MONITOR, "--", "bash", "-c", "exit 3", **environment)
    assert done.returncode == 3
    assert done.stdout.startswith("watch   not sampled: there are no samples in ")


def test_signals_go_to_the_command(checkout: Checkout) -> None:
    """Ctrl-C once, as the terminal sends it to both; and what somebody sends to monitor.py alone."""
    program = """
import os, signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda *_: (got.append(1), os.write(1, b"caught\\n")))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(40 + len(got)))
print("ready", flush=True)
while True:
    time.sleep(60)
"""
    command = [sys.executable, checkout.folder / MONITOR, "--", sys.executable, "-c", program]
    settings = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=checkout.environment, **settings) as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "caught\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().startswith("watch   ")
    assert process.returncode == 41


def test_what_cannot_be_done_is_told_in_a_sentence(checkout: Checkout) -> None:
    jobs = checkout.folder / "results" / "jobs"
    (jobs / "7").mkdir(parents=True)
    (jobs / "8" / "monitor").mkdir(parents=True)
    (jobs / "9" / "monitor").mkdir(parents=True)
    (jobs / "9" / "monitor" / "n1.csv").write_text("a photograph\n")
    nobodys = "one of the arguments --verdict --sample is required. See --help."
    sentences = {
        (): nobodys,
        ("--",): nobodys,
        ("--verdict", 7, "train.py"): "unrecognized arguments: train.py",
        ("--", "no-such-command"): "no-such-command cannot be run (No such file or directory): correct",
        ("--", checkout.folder): f"{checkout.folder} cannot be run (Permission denied): correct the command.",
        ("--verdict", 5): f"there is no job 5 in {jobs}: a queued job has no folder yet.",
        ("--verdict", "nowhere"): "there is no folder nowhere: give a job's number or folder.",
        ("--verdict", 7): "job 7 was not sampled (SITE_MONITOR=off?): while it runs in Slurm, `srun",
        ("--verdict", 8): f"there are no samples in {jobs / '8' / 'monitor'}: ",
        ("--verdict", 7, "--sample", 7): "argument --sample: not allowed with argument --verdict.",
        ("--sample", 7): "--sample is for jobs of Slurm: on this machine, give a command after --.",
    }
    for arguments, sentence in sentences.items():
        done = checkout.python(MONITOR, *arguments)
        assert done.stderr.startswith(f"error: {sentence}"), (arguments, done.stderr)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), (arguments, done.stderr)
    warning, error = failed(checkout.python(MONITOR, "--verdict", jobs / "9")).splitlines()
    assert warning.startswith("warning: ") and str(jobs / "9" / "monitor" / "n1.csv") in warning
    assert error.startswith("error: ")
    assert {path.name for path in jobs.iterdir()} == {"7", "8", "9"}
    checkout.site("SITE_SCRATCH_DIR=/proc/nowhere\n")
    done = checkout.python(MONITOR, "--", "true")
    assert done.stderr.startswith("error: samples cannot be written to /proc/nowhere/monitored-")
    checkout.site("SITE_MONITOR=no\n")
    done = checkout.submit_py("single", "--dry-run")
    assert done.stderr == (
        "error: SITE_MONITOR is on or off, not no: correct it in slurm/site.sh or in your shell.\n"
    )


# --- local processes --------------------------------------------------------------------------------


@pytest.mark.full
def test_a_job_without_slurm(checkout: Checkout) -> None:
    """Its log ends with the verdict, which submit.py --wait shows before its own last line."""
    plant(checkout, "pass")
    done = checkout.submit_py("single", "--script", "own.py", "--wait")
    assert (done.returncode, watch_lines(done.stdout)) == (0, []), done.stderr
    jobs = checkout.folder / "results" / "jobs" / "submitit"
    assert not list(jobs.rglob("monitor"))
    checkout.site(ON)
    plant(checkout, "wait_until_two_are_seen()", stage="03_multigpu_ddp")
    done = checkout.submit_py("ddp", "--script", "own.py", "--gpus", 2, "--wait")
    assert done.returncode == 0, done.stderr
    (verdict,) = jobs.rglob("verdict.json")
    (log,) = verdict.parents[1].glob("*_0_log.out")
    number = log.name.partition("_")[0]
    *_, last, ending = done.stdout.splitlines()
    assert last.startswith(f"watch   job {number} ")
    assert ending.startswith("done: ")
    assert (
        watch_lines(done.stdout)
        == watch_lines(log.read_text())
        == log.read_text().splitlines()[-len(watch_lines(done.stdout)) :]
    )
    assert ranks_in(verdict.parent) == {os.uname().nodename: {"0", "1"}}
    assert checkout.python(MONITOR, "--verdict", number).stdout.startswith(
        watch_lines(log.read_text())[0][8:]
    )


def test_the_number_of_an_array_gives_the_verdict_of_each_of_its_jobs(
    checkout: Checkout, make_job: MakeJob
) -> None:
    """It is also the number of its last job. A sweep prints it."""
    jobs = checkout.folder / "results" / "jobs"
    sampled = make_job([FULL] * 2)
    for number, element in (("98", "97_1"), ("97", "97_2")):
        shutil.copytree(sampled, jobs / number / "monitor")
        job_folder.keep_script(jobs / number, job_folder.Script("/t.py", [], array_element=element))
    of_array = checkout.python(MONITOR, "--verdict", 97).stdout
    assert "job 97_1 was watched for" in of_array and "job 97_2 was watched for" in of_array
    of_one = checkout.python(MONITOR, "--verdict", "97_1").stdout
    assert "job 97_1 was watched for" in of_one and "97_2" not in of_one
    assert str(jobs / "98") in one_error(checkout.python(MONITOR, "--verdict", 97, "--json"))


# --- a real Slurm -----------------------------------------------------------------------------------


def test_a_job_on_two_nodes_is_sampled(on_cluster: Checkout) -> None:
    """A training: a file of samples for each node, its ranks, its record, and the verdict."""
    job = on_cluster.submit("srun", *TRAINING, sbatch=("--nodes=2", "--ntasks-per-node=1"))
    assert on_cluster.cluster.wait(job)["JobState"] == "COMPLETED", on_cluster.log(job)
    log, folder = on_cluster.log(job), monitor_of(on_cluster, job)
    # Before it is an empty line, but where the ranks end within a line (PyTorch 2.15: "nanobind: leaked").
    assert re.search(rf"\n(watch   .*\n)*watch   job {job} .*\nended   .* with exit code 0\n$", log), log
    assert "not sampled" not in log
    assert ranks_in(folder) == {"n1": {"0"}, "n2": {"1"}}
    notes = {path.name for path in folder.parent.glob("rank-*")}
    assert notes == {"rank-0.finished", "rank-1.finished"}  # no monitor's
    assert not re.search("srun|Traceback", (folder / "log").read_text())
    (csv,) = (on_cluster.folder / "results" / "runs").glob("*.csv")
    assert samples.runs(folder) == [csv]
    assert samples.read_asked(folder).exclusive_helps is False  # all nodes are this machine
    facts = json.loads((folder / "verdict.json").read_text())
    assert json.loads(csv.with_suffix(".monitor.json").read_text()) == facts
    assert f"meet at n1:{10_000 + job}" in log
    verdict, *_ = (folder / "told").read_text().splitlines()
    listed = on_cluster.python("slurm/jobs.py").stdout
    finding = re.escape(verdict.removeprefix("watch   "))
    row = rf"{job} +mnist-ddp +03_multigpu_ddp/mnist_ddp\.py .* +done +\d+ s +0 +{finding}"
    assert re.search(f"^{row}$", listed, re.MULTILINE), listed
    used = on_cluster.python("slurm/jobs.py", "--asked").stdout
    assert re.search(rf"\n{job} +16G +[01]\.\dG +[12]G +2 +\d\.\d +[12]\n", used), used
    used = document(on_cluster.python("slurm/jobs.py", "--asked", "--json").stdout, "asked")["jobs"]
    (memory, cores) = next(row["asked"] for row in used if row["job"] == str(job))
    assert memory["asked_gib"] == 16 and memory["enough_gib"] in (1, 2) and cores["asked_cores"] == 2
    printed = document(on_cluster.python(MONITOR, "--verdict", job, "--json").stdout, "verdict")
    assert printed == facts


def test_the_monitor_sees_all_gpus_where_each_rank_has_its_own(checkout: Checkout) -> None:
    """Newer Slurm (seen: 26.05) tells of --gpus-per-task only by these variables, which srun takes over."""
    options_file = checkout.folder / "srun-told"
    checkout.site(ON)
    checkout.fake("python", f'exec "{sys.executable}" "$@"')
    record = "JobId=7 TresBind=gres/gpu:per_task:1 TresPerTask=cpu=1,gres/gpu=1 "
    checkout.fake("scontrol", f"[[ $* == *hostnames* ]] && echo 127.0.0.2 || echo '{record}'")
    keep = f"echo \"${{!SLURM_TRES_@}} $*\" >>'{options_file}'"
    checkout.fake("srun", f"[[ $* != *--job-name=monitor* ]] || {keep}")
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
    }
    job |= {"SLURM_TRES_PER_TASK": "cpu=1,gres/gpu=1", "SLURM_TRES_BIND": "gres/gpu:per_task:1"}
    place = checkout.folder / "03_multigpu_ddp"
    job |= {"SLURM_SUBMIT_DIR": str(place), "PATH": f"{checkout.commands}:/usr/bin:/bin"}
    checkout.run("bash", "slurm_submit.sh", cwd=place, **job)
    (line,) = options_file.read_text().splitlines()
    assert "--gpus-per-node=2 " in line and not line.startswith("SLURM_TRES"), line


def test_submitit_and_who_failed(on_cluster: Checkout) -> None:
    """submit.py shows the verdict, and the reason of the failure as ever."""
    ending = "(rank == '1' or time.sleep(60)) and os._exit(3)"
    plant(on_cluster, ending, stage="03_multigpu_ddp")
    done = on_cluster.submit_py("ddp", "--script", "own.py", "--gpus", 2, "--wait")
    assert done.returncode == 1
    assert " failed: rank 1 on n1 ended silently, with exit code 3 (in " in done.stderr, done.stderr
    job = done.stdout.split()[1]
    assert watch_lines(done.stdout)[-1].startswith(f"watch   job {job} ")


def test_a_job_that_goes_back_to_the_queue(on_cluster: Checkout) -> None:
    """Its samples go on in the same files; the signal before the time limit does not end them.

    It goes back as often as the site allows.
    """
    on_cluster.site(f"{ON}SITE_MOST_RESTARTS=1\n")
    ending = """
    wait_for_samples(1)
    if restart == "0":
        subprocess.run(["scancel", "--signal=USR2", os.environ["SLURM_JOB_ID"]], check=True)
        wait_for_samples(2)
    (folder / "stopped").write_text("here")"""
    job = on_cluster.submit("single", plant(on_cluster, ending))
    state = on_cluster.cluster.wait(job)
    log = on_cluster.log(job)
    assert (state["JobState"], state["Restarts"]) == ("FAILED", "1"), log
    assert len(re.findall(rf"\nwatch   job {job} .*\n(why .*\n)?ended ", log)) == 2, log
    assert re.search("^why .*SITE_MOST_RESTARTS.* with --checkpoint-dir here$", log, re.MULTILINE), log
    (file,) = monitor_of(on_cluster, job).glob("*.csv")
    assert file.read_text().count("time,") == 1
    assert len({row["time"] for row in samples.read(file.parent)}) >= 4


def test_a_job_that_cannot_be_sampled(on_cluster: Checkout) -> None:
    """One line gives the reason, and nothing else is different."""
    # A broken Python, a Slurm without --overlap, a step that hangs.
    faults = {
        "python": '[ "$SLURM_JOB_NAME" != monitor ] || { echo planted >&2; exit 3; }',
        "srun": 'for a; do [ "$a" != --overlap ] || { echo srun: unrecognized option >&2; exit 1; }; done',
        "hangs": 'case "$*" in *--overlap*) exec sleep 600;; esac',
    }
    reasons = {
        "python": "not sampled to the end: see ",
        "srun": "not sampled to the end: see ",
        "hangs": "no verdict within 10 seconds: manygpus monitor --verdict ",
    }
    script = on_cluster.job_env
    assert "tenths < 100" in script.read_text()
    script.write_text(script.read_text().replace("tenths < 100", "tenths < 50"))
    jobs = {}
    for name, fault in faults.items():
        command = "python" if name == "python" else "srun"
        place = on_cluster.folder / "tools" / name
        place.mkdir(parents=True)
        (place / command).write_text(f'#!/bin/sh\n{fault}\nPATH=${{PATH#*:}} exec {command} "$@"\n')
        (place / command).chmod(0o755)
        on_cluster.site(f"{ON}activate_environment() {{ PATH='{place}':$PATH; }}\n")
        jobs[name] = on_cluster.submit("single", plant(on_cluster, "pass"))
        on_cluster.cluster.wait(jobs[name])
    for name, reason in reasons.items():
        log = on_cluster.log(jobs[name])
        assert re.search(rf"\n\nwatch   {reason}.*\nended .* with exit code 0\n", log), log


def test_a_job_script_may_wait_for_what_it_has_started(on_cluster: Checkout) -> None:
    """And where Slurm refuses the way back to the queue, there is a verdict all the same."""
    script = on_cluster.folder / "01_singlegpu" / "slurm_submit.sh"
    first, launch = script.read_text().split("\nsrun ", 1)
    script.write_text(f"{first}\nsleep 1 & wait; echo all of mine have ended\nsrun {launch}")
    ending = "wait_for_samples(1); (folder / 'stopped').write_text('here')"
    job = on_cluster.submit("single", plant(on_cluster, ending), sbatch=("--no-requeue",))
    on_cluster.cluster.wait(job)
    log = on_cluster.log(job)
    assert "\nall of mine have ended\n" in log, log
    assert watch_lines(log)[-1].startswith(f"watch   job {job} "), log
    assert re.search(
        r"^error: this job is not requeued \(.+\): submit again with --checkpoint-dir here$",
        log,
        re.MULTILINE,
    )


def test_a_job_that_ignores_sigterm(on_cluster: Checkout) -> None:
    """Slurm kills it, and the job script, so the verdict comes before; USR1 ends nothing."""
    program = on_cluster.folder / "manygpus" / "monitor" / "watch.py"
    assert "\nPATIENCE_SECONDS = 8\n" in program.read_text()
    program.write_text(program.read_text().replace("PATIENCE_SECONDS = 8", "PATIENCE_SECONDS = 2"))
    ignores = """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    import torch
    wait_until(lambda text: f",rank,{rank}," in text)
    print("rank", rank, "is here", flush=True)
    time.sleep(600)"""
    plant(on_cluster, ignores, stage="03_multigpu_ddp")
    sbatch = ("--nodes=2", "--ntasks-per-node=1")
    job = on_cluster.submit("srun", "own.py", sbatch=sbatch)
    for rank in range(2):
        on_cluster.wait_for(f"rank {rank} is here", job)
    on_cluster.cluster.run(["scancel", "--signal=USR1", job])
    on_cluster.cluster.run(["scancel", job])
    wait_until(lambda: f"\nwatch   job {job} " in on_cluster.log(job))
    log = on_cluster.log(job)
    assert re.search(
        r"^watch   2 s after SIGTERM rank 0 on n1 .*rank 1 on n2 .*still ran", log, re.MULTILINE
    ), log


def test_a_job_that_is_cancelled(on_cluster: Checkout) -> None:
    job = on_cluster.submit("single", plant(on_cluster, "print('here', flush=True); time.sleep(600)"))
    on_cluster.wait_for("\nhere", job)
    on_cluster.cluster.run(["scancel", job])
    assert on_cluster.cluster.wait(job)["JobState"] == "CANCELLED"
    log = on_cluster.log(job)
    assert re.search(rf"\n\n(watch   .*\n)*watch   job {job} .*\nended from outside: .*\nended  ", log), log
