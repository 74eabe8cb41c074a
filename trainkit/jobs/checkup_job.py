"""The doctor's job: stage 03's own job script with the checkup in the place of the training.

Only the standard library is needed.
"""

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from trainkit import records
from trainkit.errors import UserError, reason
from trainkit.jobs import checkup, judging, slurm
from trainkit.jobs.finding import FAULT, NOTE, OK, WARNING, Finding, has_fault, read_facts
from trainkit.jobs.site import Site
from trainkit.jobs.stages import STAGES

DDP = STAGES["ddp"].script.parent
JOB_SCRIPT = DDP / "slurm_submit.sh"

POLL_SECONDS = 1
SILENT_SECONDS = 60  # for which slurmctld may not answer about a job


class Outcome(NamedTuple):
    """What became of the job: its name for people, state in Slurm, nodes, and why it was given up, if so."""

    job: str
    state: str
    nodes: str
    given_up: list[Finding]


def check_submission(options: argparse.Namespace, site: Site) -> list[Finding]:
    """Whether Slurm would take the job."""
    done = _sbatch(site, "--test-only", *_shape(options), JOB_SCRIPT.name)
    told = _told(done)
    if done.returncode == 0:
        when = re.sub(r"^.*?Job \d+ to start at", "it would start at", told)  # there is no such job
        return [Finding("submission", OK, f"Slurm would take the job (nothing was submitted): {when}")]
    fix = slurm.advice(told)
    gpus, most = _gpus_per_node(options), slurm.largest_nodes()["GPUs"]
    if gpus > most and ("node configuration" in told or "generic resource" in told):
        told = f"{gpus} GPUs per node, but no node has more than {most} ({told})"
    return [Finding("submission", FAULT, f"Slurm refuses the job: {told}", fix)]


def check_job(options: argparse.Namespace, site: Site, rows: list[dict]) -> list[Finding]:
    """What a job finds, in which every rank is looked at; adds the all-reduce timings to `rows`.

    Raises:
        UserError: if the allocation that this shell is in has been trained in.
    """
    started = datetime.now(timezone.utc)
    name = f"doctor-{secrets.token_hex(4)}"
    log = site.jobs_dir / f"{name}.log"
    run = _run_here if "SLURM_JOB_ID" in os.environ else _submit
    found: list[Finding] = []
    try:
        outcome = run(options, site, name, log)
        ranks = read_facts(_text(log))
        if ranks:
            hosts = slurm.ask("scontrol", "show", "hostnames", outcome.nodes).stdout.split()
            found = judging.judge(ranks, hosts, options.num_workers)
            rows += judging.bandwidths(ranks)
            if rows:
                found.append(_keep(rows, site.results_dir / "all_reduce", started))
        found = [*(outcome.given_up or [_judge_job(outcome, log, found)]), *found]
    finally:
        # The job's folder by its own word: one of that number may be another's, from before.
        for folder in {Path(told["place"]["folder"]) for told in read_facts(_text(log)).values()}:
            shutil.rmtree(folder, ignore_errors=True)
            for note in site.results_dir.glob(NOTE.format(job=folder.name, node="*")):
                note.unlink(missing_ok=True)  # of ranks that were killed
        if not has_fault(found):
            log.unlink(missing_ok=True)
    return found


def _judge_job(outcome: Outcome, log: Path, found: list[Finding]) -> Finding:
    """About the job itself; `found` is what was found in it."""
    if not log.exists():
        message = f"{outcome.job} ended as {outcome.state} and left no log in {log.parent}"
        fix = "set SITE_SCRATCH_DIR in slurm/site.sh to a folder that the compute nodes see, too"
        return Finding("job", FAULT, message, fix)
    if found and outcome.state in ("COMPLETED", "GONE"):  # Slurm may forget a job at once
        where = f"; its log: {log}" if has_fault(found) else ""
        return Finding("job", OK, f"{outcome.job} ran on {outcome.nodes}{where}")
    lines = _text(log).splitlines()
    told = next((line for line in lines if "error:" in line), lines[-1] if lines else "its log is empty")
    message = f"{outcome.job} ended as {outcome.state}: {told.removeprefix('error: ')}"
    return Finding("job", FAULT, message, f"see {log}")


def _keep(rows: list[dict], folder: Path, started: datetime) -> Finding:
    """Leave the all-reduce timings in the results, where predictions of what more nodes pay look for them."""
    path = folder / f"{started:%Y%m%d-%H%M%S}-{rows[0]['ranks']}x{rows[0]['nodes']}.tsv"
    facts = {"started_at": f"{started:%Y-%m-%dT%H:%M:%SZ}"}
    try:
        records.put_all_reduce(path, [row | facts for row in rows])
    except OSError as error:
        message = f"its times cannot be written to {path} ({reason(error)})"
        return Finding("all-reduce", WARNING, message, "free the space, or mend the permissions")
    return Finding("all-reduce", OK, f"its times are kept in {path}")


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


# --- asking for it --------------------------------------------------------------------------------


def _sbatch(site: Site, *arguments: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    """sbatch in stage 03's folder, with the site's SBATCH_* variables."""
    return slurm.ask("sbatch", *arguments, cwd=DDP, env=os.environ | site.sbatch, input=script)


def _told(done: subprocess.CompletedProcess[str]) -> str:
    return slurm.told_by_sbatch(done.stderr) or f"exit code {done.returncode}"


def _shape(options: argparse.Namespace) -> list[str]:
    """What the options say about the job, for sbatch; what they do not is in the job script."""
    shape = [f"--nodes={options.nodes}"] if options.nodes else []
    if options.gpus:
        gpus = _gpus_per_node(options)
        shape += [f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}"]
    if options.partition:
        shape.append(f"--partition={options.partition}")
    return [*shape, *options.sbatch_options]


def _gpus_per_node(options: argparse.Namespace) -> int:
    if options.gpus:
        return options.gpus // (options.nodes or 1)
    asked = "\n".join([JOB_SCRIPT.read_text(), *options.sbatch_options])
    found = re.findall(r"^(?:#SBATCH +)?--gpus-per-node=(\d+)", asked, re.MULTILINE)
    return int(found[-1]) if found else 0


def _script() -> str:
    """Stage 03's job script with the checkup for the training; and a rank that goes leaves the others be.

    Each of them ends by itself, within its own limits; --wait is for one that hangs even then.
    """
    text = JOB_SCRIPT.read_text()
    for training, ours in {
        'python "$script"': "python -m trainkit.jobs.checkup",
        "--kill-on-bad-exit=1": "--kill-on-bad-exit=0",
        "--wait=60": f"--wait={sum(checkup.LIMITS.values())}",
    }.items():
        if training not in text:
            raise UserError(f"there is no `{training}` in {JOB_SCRIPT}, in whose place comes `{ours}`.")
        text = text.replace(training, ours)
    return text


# --- running it -----------------------------------------------------------------------------------


def _submit(options: argparse.Namespace, site: Site, name: str, log: Path) -> Outcome:
    """Send the job and wait for its end. It is cancelled if it does not start in time, or on Ctrl-C."""
    settings = (f"--job-name={name}", f"--time={options.time}", "--no-requeue", f"--output={log}")
    try:
        done = _sbatch(site, "--parsable", *_shape(options), *settings, script=_script())
        if done.returncode:
            told = _told(done)
            refusal = Finding("job", FAULT, f"Slurm refuses the job: {told}", slurm.advice(told))
            return Outcome("the job", "refused", "", [refusal])
        job_id = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
        return Outcome(f"job {job_id}", *_wait_for(job_id, options))
    finally:
        # By its name, since Ctrl-C may come before the number is known.
        slurm.ask("scancel", "--quiet", f"--name={name}")


def _wait_for(job_id: str, options: argparse.Namespace) -> tuple[str, str, list[Finding]]:
    """Wait for the job's end; its last state and nodes, and a fault if it was given up."""
    begin = heard = time.monotonic()
    nodes = shown = ""
    while True:
        job = slurm.job_facts(job_id)
        state, nodes, reason = job["JobState"], job.get("NodeList", nodes), job.get("Reason", "")
        now = time.monotonic()
        waits = state in slurm.QUEUED
        if state != "UNKNOWN":
            heard = now
        if f"{state} {nodes}" != shown:
            shown = f"{state} {nodes}"
            print(f"job {job_id}: {state.lower()}{f' ({reason})' if waits else ''}", file=sys.stderr)
        if state == "COMPLETING":  # the script has ended, some nodes still clean up
            state = "COMPLETED" if job["ExitCode"] == "0:0" else "FAILED"
        if not waits and state not in ("UNKNOWN", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING"):
            return state, nodes, []
        message = ""
        if waits and now - begin > options.wait:
            message = f"job {job_id} did not start within {options.wait} s, Slurm's reason: {reason}"
            fix = "wait longer with --wait, or ask for less; `man squeue` explains the reasons"
        elif now - heard > SILENT_SECONDS:
            message = f"Slurm's controller fell silent about job {job_id}: {reason}"
            fix = "try again later, or tell your admin"
        elif now - begin > options.wait + options.time * 60 + SILENT_SECONDS:
            message, fix = f"job {job_id} outlived its time limit", "tell your admin"
        if message:
            return state, nodes, [Finding("job", FAULT, message, fix)]
        time.sleep(POLL_SECONDS)


def _run_here(options: argparse.Namespace, site: Site, name: str, log: Path) -> Outcome:
    """Run the job script in the allocation that this shell is in."""
    job_id, nodes = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_JOB_NODELIST", "")
    folder = site.jobs_dir / job_id
    if folder.exists():
        raise UserError(f"a training of job {job_id} has its folder, {folder}: use another allocation.")
    job, given_up = f"the checkup in allocation {job_id}", []
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-c", _script(), name],
            cwd=DDP,
            env={"SLURM_CPUS_PER_TASK": "1"} | os.environ | {"SLURM_SUBMIT_DIR": str(DDP)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = shell.wait(options.time * 60)
        state = "COMPLETED" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        state, message = "unfinished", f"{job} did not end within {options.time} min"
        fix = "see that no other step holds its CPUs: squeue --steps --job=$SLURM_JOB_ID"
        given_up = [Finding("job", FAULT, message, fix)]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
    return Outcome(job, state, nodes, given_up)
