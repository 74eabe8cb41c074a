"""The doctor's job: stage 03's own job script with the checkup in the place of the training.

Only the standard library is needed.
"""

import argparse
import re
import secrets
import shutil
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from trainkit import records
from trainkit.errors import UserError, reason
from trainkit.jobs import checkup, local, slurm
from trainkit.jobs.finding import FAULT, NOTE, OK, WARNING, Finding, findings, has_fault, read_lines
from trainkit.jobs.following import SlurmHandle
from trainkit.jobs.site import Site
from trainkit.jobs.stages import STAGES

JOB_SCRIPT = STAGES["ddp"].script.parent / "slurm_submit.sh"


def check_submission(options: argparse.Namespace, site: Site) -> list[Finding]:
    """Whether Slurm would take the job."""
    done = _sbatch(site, "--test-only", *_shape(options), JOB_SCRIPT.name)
    told = _told(done)
    if done.returncode == 0:
        when = re.sub(r"^.*?Job \d+ to start at", "it would start at", told)  # there is no such job
        return [Finding("submission", OK, f"Slurm would take the job (nothing was submitted): {when}")]
    return [Finding("submission", FAULT, f"Slurm refuses the job: {told}", slurm.advice(told))]


def check_job(options: argparse.Namespace, site: Site, rows: list[dict]) -> list[Finding]:
    """What a job finds, in which every rank is looked at; adds the all-reduce timings to `rows`."""
    started = datetime.now(timezone.utc)
    name = f"doctor-{secrets.token_hex(4)}"
    log = site.jobs_dir / f"{name}.log"
    found: list[Finding] = []
    try:
        about_job = _run(options, site, name, log)
        told = list(read_lines(_text(log)))
        found = [about_job, *(judge(told, log) if told else [])]
        rows += next((one["rows"] for one in told if "rows" in one), [])
        if rows:
            found.append(_keep(rows, site.results_dir / "all_reduce", started))
    finally:
        # The job's folder by its own word: one of that number may be another's, from before.
        for folder in {Path(one["folder"]) for one in read_lines(_text(log)) if "folder" in one}:
            shutil.rmtree(folder, ignore_errors=True)
            for note in site.results_dir.glob(NOTE.format(job=folder.name, node="*")):
                note.unlink(missing_ok=True)
        if not has_fault(found):
            log.unlink(missing_ok=True)
    return found


def judge(told: list[dict], log: Path) -> list[Finding]:
    """What the ranks found, and what they could not tell of themselves."""
    found = findings(sorted(told, key=lambda one: one["rank"]))
    if len({finding.message for finding in found if finding.check == "software"}) > 1:
        message = "it is not the same on every node"
        found.append(Finding("software", FAULT, message, checkup.FIXES["software"]))
    return [*_judge_ranks(told, log), *found]


def _judge_ranks(told: list[dict], log: Path) -> list[Finding]:
    """Whether all ranks came to their end."""
    size = max(one.get("size", 0) for one in told)
    steps = {one["rank"]: one["begun"] for one in told if "begun" in one}  # the last of each
    ended = {one["rank"] for one in told if "ended" in one}
    found = []
    for rank in sorted(set(range(size)) - ended):
        message = f"rank {rank} never reported: its Python did not start"
        if rank in steps:
            message = f"rank {rank} ended without a word in its check of {steps[rank]}: killed, or crashed"
        found.append(Finding("ranks", FAULT, message, f"see {log}; more memory: sbatch --mem=32G"))
    return found or [Finding("ranks", OK, f"{size} ranks reported")]


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


def _sbatch(site: Site, *arguments: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    """sbatch in stage 03's folder, with the site's SBATCH_* variables."""
    env = local.outside_of_jobs() | site.sbatch
    return slurm.ask("sbatch", *arguments, cwd=JOB_SCRIPT.parent, env=env, input=script)


def _told(done: subprocess.CompletedProcess[str]) -> str:
    return slurm.told_by_sbatch(done.stderr) or f"exit code {done.returncode}"


def _shape(options: argparse.Namespace) -> list[str]:
    """What the options say about the job, for sbatch; what they do not is in the job script."""
    shape = [f"--nodes={options.nodes}"] if options.nodes else []
    if options.gpus:
        gpus = options.gpus // (options.nodes or 1)
        shape += [f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}"]
    return [*shape, *options.sbatch_options]


def _script(num_workers: int) -> str:
    """Stage 03's job script with the checkup for the training; and a rank that goes leaves the others be.

    Each of them ends by itself, within its own limits; --wait is for one that hangs even then.
    """
    text = JOB_SCRIPT.read_text()
    for training, ours in {
        'python "$script"': f"python -m trainkit.jobs.checkup --num-workers {num_workers}",
        "--kill-on-bad-exit=1": "--kill-on-bad-exit=0",
        "--wait=60": f"--wait={sum(checkup.LIMITS.values())}",
    }.items():
        if training not in text:
            raise UserError(f"there is no `{training}` in {JOB_SCRIPT}, in whose place comes `{ours}`.")
        text = text.replace(training, ours)
    return text


def _run(options: argparse.Namespace, site: Site, name: str, log: Path) -> Finding:
    """Send the job and wait for its end. It is cancelled if it does not start in time, or on Ctrl-C."""
    settings = (f"--job-name={name}", f"--time={options.time}", "--no-requeue", f"--output={log}")
    try:
        script = _script(options.num_workers)
        done = _sbatch(site, "--parsable", *_shape(options), *settings, script=script)
        if done.returncode:
            told = _told(done)
            return Finding("job", FAULT, f"Slurm refuses the job: {told}", slurm.advice(told))
        job_id = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
        return _wait_for(SlurmHandle(job_id, 0, log, site.jobs_dir / job_id, site.results_dir), options.wait)
    finally:
        # By its name, since Ctrl-C may come before the number is known.
        slurm.ask("scancel", "--quiet", f"--name={name}")


def _wait_for(job: SlurmHandle, most_seconds: float) -> Finding:
    """Wait for the job's end, and for its start at most so long; what became of it."""
    began, shown = time.monotonic(), None
    while (state := job.state()).name not in ("done", "failed"):
        if state != shown:
            why = f": {state.detail}" if state.name == "queued" else ""
            print(f"job {job.job_id} {state.name}{why}", file=sys.stderr)
            shown = state
        if state.name == "queued" and time.monotonic() - began > most_seconds:
            message = (
                f"job {job.job_id} did not start within {most_seconds} s, Slurm's reason: {state.detail}"
            )
            fix = "wait longer with --wait, or ask for less; `man squeue` explains the reasons"
            return Finding("job", FAULT, message, fix)
        time.sleep(job.poll_seconds)
    if not job.log.exists():
        message = f"job {job.job_id} left no log in {job.log.parent} ({state.detail})"
        fix = "set SITE_SCRATCH_DIR in slurm/site.sh to a folder that the compute nodes see, too"
        return Finding("job", FAULT, message, fix)
    if state.name == "failed":
        return Finding("job", FAULT, f"job {job.job_id} failed: {state.detail}", f"see {job.log}")
    return Finding("job", OK, f"job {job.job_id} ran")
