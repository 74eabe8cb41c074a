"""Check whether jobs can work here, before one fails: on the login node, and with --job also in a short job.

    python slurm/doctor.py                             the site file, Slurm, environment, data and folders
    python slurm/doctor.py --job                       also a job with the shape of stage 03's: 2 GPUs
    python slurm/doctor.py --job --nodes 2 --gpus 4    with another shape
    python slurm/doctor.py --job -- --cpus-per-task=8  options after -- go to sbatch as they are

The job is slurm/doctor.sh, which makes everything ready as the job scripts do (slurm/job_env.sh), so what
works for it works for the training.

The exit code is 0 if there is no fault (warnings are allowed), 1 if there is one. Any Python from 3.10 on
will do: it needs only the standard library, and checks the job's environment, too.
"""

import argparse
import json
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from trainkit import errors
from trainkit.config.command_line import Parser, at_least
from trainkit.doctor import checkup, login_node
from trainkit.doctor.checkup import FAULT, NOTE, OK, WARNING, Finding, findings_in, has_fault, read_messages
from trainkit.errors import UserError, reason, tell
from trainkit.jobs import local, slurm
from trainkit.jobs.following import SlurmHandle
from trainkit.jobs.sbatch_options import sbatch_options
from trainkit.jobs.site import WORDS, Site
from trainkit.jobs.stages import REPOSITORY, STAGES, resources
from trainkit.record import records
from trainkit.record.columns import DDP

LABELS = {OK: "OK", WARNING: "warning", FAULT: "fault"}
JOB_SCRIPT = REPOSITORY / "slurm" / "doctor.sh"
STAGE_SCRIPT = STAGES[DDP].script.parent / "slurm_submit.sh"
MINUTES = 15


def main() -> int:
    """Run all checks and print the findings; return the exit code."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which also cancels the job
    found: list[Finding] = []
    rows: list[dict] = []
    for some in _examine(options, rows):
        found += some
        together: dict[tuple, list[Finding]] = {}  # what several nodes or ranks share is printed once
        for finding in () if options.json else some:
            together.setdefault(finding[:4], []).append(finding)
        for (check, level, message, fix), alike in together.items():
            nodes = ", ".join(dict.fromkeys(finding.node for finding in alike if finding.node))
            ranks = ", ".join(str(finding.rank) for finding in alike if finding.rank is not None)
            where = f"{f'rank {ranks} on ' if ranks else ''}{nodes}: " if nodes else ""
            tell(f"{LABELS[level]:8} {check:12} {where}{message}")
            if fix:
                tell(f"{'':21} fix: {fix}")
    count = {level: sum(finding.level == level for finding in found) for level in LABELS}
    if options.json:
        document = {"findings": [finding._asdict() for finding in found], "all_reduce": rows}
        tell(json.dumps(document, indent=1))
    else:
        if rows:
            tell("\nall-reduce     time ms   bus GB/s")
            for row in rows:
                size, milliseconds = checkup.in_words(row["bytes"]), 1000 * row["seconds"]
                tell(f"{size:>10} {milliseconds:11.3f} {row['bus_gb_s']:10.3f}")
            tell("what links carry at most: 03_multigpu_ddp/SCALING.md#how-fast-is-the-network")
        tell(f"\n{count[FAULT]} fault(s), {count[WARNING]} warning(s), {count[OK]} OK")
    return 1 if count[FAULT] else 0


def _parse() -> argparse.Namespace:
    parser = Parser(prog="doctor.py", description=__doc__)
    add = parser.add_argument
    add("--job", action="store_true", help="also check inside a short job, on every node")
    add("--nodes", type=at_least(1), default=1, metavar="N", help="nodes of the job (default: %(default)s)")
    add("--gpus", type=at_least(1), metavar="N", help="GPUs of the whole job (default: 2 per node)")
    limit = f"its time limit (default: {MINUTES}, or the site file's if that is less)"
    add("--time", type=at_least(3), metavar="MIN", help=limit)
    in_queue = "seconds that the job may stay in the queue (default: %(default)s)"
    add("--wait", type=at_least(0), default=120, metavar="S", help=in_queue)
    add("--json", action="store_true", help="print one JSON document and nothing else")
    add("sbatch_options", nargs="*", metavar="-- OPTION", help="more options for sbatch")
    options = parser.parse_args()
    stage = STAGES[DDP]
    options.shape = resources(stage, options.gpus or stage.default_gpus * options.nodes, options.nodes)
    for word in options.sbatch_options:
        if not word.startswith("-"):
            raise UserError(f"{word!r} is not an option: give those for sbatch as in: -- --mem=8G")
    return options


def _examine(options: argparse.Namespace, rows: list[dict]) -> Iterator[list[Finding]]:
    """Yield the findings, check by check; add the all-reduce timings to `rows`."""
    site, found = login_node.check_site()
    yield found
    found = login_node.check_slurm()
    yield found
    blocked = site is None or has_fault(found)
    if site:
        if not blocked:
            found = _check_submission(options, site)
            blocked = has_fault(found)
            yield found
        yield login_node.check_environment(site, in_job_too=options.job)
        found = login_node.check_folders(site)
        blocked = blocked or has_fault(found)
        yield found
    if options.job and blocked:
        yield [Finding("job", FAULT, "not started, since it could not work", "fix the faults above first")]
    elif options.job:
        yield _check_job(options, site, rows)


def _check_submission(options: argparse.Namespace, site: Site) -> list[Finding]:
    """Ask Slurm whether it would take the job, and the stages' job scripts as they are."""
    done = _sbatch(site, JOB_SCRIPT, "--test-only", *_request(options, site))
    if refusal := _refusal("submission", done):
        return [refusal]
    # There is no such job.
    when = re.sub(r"^.*?Job \d+ to start at", "it would start at", slurm.sbatch_message(done.stderr))
    found = [Finding("submission", OK, f"Slurm would take the job (nothing was submitted): {when}")]
    done = _sbatch(site, STAGE_SCRIPT, "--test-only", *options.sbatch_options)
    if refusal := _refusal("submission", done):
        fix = refusal.fix
        if site.words != WORDS:
            asked = sbatch_options(site, options.shape).items()
            ours = " ".join(f"--{name}={value}" for name, value in asked)
            fix = f"have their #SBATCH lines ask in this site's words ({ours}), or use submit.py"
        message = f"of the job script of stage 03: {refusal.message}"
        found.append(refusal._replace(level=WARNING, message=message, fix=fix))
    return found


def _check_job(options: argparse.Namespace, site: Site, rows: list[dict]) -> list[Finding]:
    """Return the findings of a job that checks every rank; add the all-reduce timings to `rows`."""
    started = datetime.now(timezone.utc)
    name = f"doctor-{secrets.token_hex(4)}"
    log = site.jobs_dir / f"{name}.log"
    found: list[Finding] = []
    try:
        found = [_run(options, site, name, log)]
        messages = list(read_messages(log.read_text(errors="replace"))) if log.exists() else []
        found += findings_of_ranks(messages, log) if messages else []
        rows += [one["row"] for one in messages if "row" in one]
        if rows:  # predictions for more nodes look for these times there
            shape = f"{rows[0]['ranks']}x{rows[0]['nodes']}"
            facts = {"started_at": f"{started:%Y-%m-%dT%H:%M:%SZ}"}
            path = site.results_dir / "all_reduce" / f"{started:%Y%m%d-%H%M%S}-{shape}.tsv"
            kept = Finding("all-reduce", OK, f"its times are kept in {path}")
            try:
                table = [row | facts for row in rows]
                records.put_table(path, records.ALL_REDUCE_COLUMNS, table, delimiter="\t")
            except OSError as error:
                message = f"its times cannot be written to {path} ({reason(error)})"
                fix = "free the space, or fix the permissions"
                kept = Finding("all-reduce", WARNING, message, fix)
            found.append(kept)
    finally:
        # The folder that the job itself names: one with its number may be left from another job.
        text = log.read_text(errors="replace") if log.exists() else ""
        for folder in {Path(one["folder"]) for one in read_messages(text) if "folder" in one}:
            shutil.rmtree(folder, ignore_errors=True)
            for note in site.results_dir.glob(NOTE.format(job=folder.name, node="*")):
                note.unlink(missing_ok=True)
        if not has_fault(found):
            log.unlink(missing_ok=True)
    return found


def findings_of_ranks(messages: list[dict], log: Path) -> list[Finding]:
    """Return what the ranks found, and which of them did not finish."""
    found = findings_in(sorted(messages, key=lambda one: one["rank"]))
    if len({finding.message for finding in found if finding.check == "software"}) > 1:
        message = "it is not the same on every node"
        found.append(Finding("software", FAULT, message, checkup.FIXES["software"]))
    size = max(one.get("size", 0) for one in messages)
    steps = {one["rank"]: one["begun"] for one in messages if "begun" in one}  # the last of each
    silent = sorted(set(range(size)) - {one["rank"] for one in messages if "ended" in one})
    if not silent:
        return [Finding("ranks", OK, f"{size} ranks reported"), *found]
    for rank in silent:
        message = f"rank {rank} never reported: its Python did not start"
        if rank in steps:
            message = f"rank {rank} was killed, or crashed, in its check of {steps[rank]}"
        found.append(Finding("ranks", FAULT, message, f"see {log}; more memory: sbatch --mem=32G"))
    return found


def _sbatch(site: Site, script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run sbatch for a job script, in its folder, with the site's SBATCH_* variables."""
    env = local.outside_of_jobs() | site.sbatch
    return slurm.ask("sbatch", *options, script.name, cwd=script.parent, env=env)


def _refusal(check: str, done: subprocess.CompletedProcess[str]) -> Finding | None:
    """Return a fault with what sbatch said if it refused the job."""
    if not done.returncode:
        return None
    refusal = slurm.sbatch_message(done.stderr) or f"exit code {done.returncode}"
    return Finding(check, FAULT, f"Slurm refuses the job: {refusal}", slurm.advice(refusal))


def _request(options: argparse.Namespace, site: Site) -> list[str]:
    """Return the options for sbatch that shape the job, in the words of the site."""
    tasks = options.shape.tasks_per_node
    asked = {"nodes": options.nodes, "ntasks-per-node": tasks} | sbatch_options(site, options.shape)
    return [*(f"--{name}={value}" for name, value in asked.items()), *options.sbatch_options]


def _run(options: argparse.Namespace, site: Site, name: str, log: Path) -> Finding:
    """Submit the job and wait for its end; cancel it if it does not start in time, or on Ctrl-C."""
    minutes = options.time or min(MINUTES, site.minutes or MINUTES)
    settings = (f"--job-name={name}", f"--time={minutes}", "--no-requeue", f"--output={log}")
    try:
        done = _sbatch(site, JOB_SCRIPT, "--parsable", *_request(options, site), *settings)
        if refusal := _refusal("job", done):
            return refusal
        job_id = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
        if held := slurm.job_of_this_shell():
            tell(f"note: {held}", sys.stderr)
        return _wait_for(SlurmHandle(job_id, 0, log, site.jobs_dir / job_id, site.results_dir), options.wait)
    finally:
        # By name, since Ctrl-C may come before the number is known.
        slurm.ask("scancel", "--quiet", f"--name={name}")


def _wait_for(job: SlurmHandle, most_seconds: float) -> Finding:
    """Wait for the job's end, and for its start at most `most_seconds`; return how it went."""
    submitted_at = time.monotonic()
    shown = None
    state = job.state()
    while not state.is_final:
        if state != shown:
            detail = f": {state.detail}" if state.name == "queued" else ""
            tell(f"job {job.job_id} {state.name}{detail}", sys.stderr)
            shown = state
        never_starts = slurm.never_starts(state.reason)
        too_late = time.monotonic() - submitted_at > most_seconds
        if state.name == "queued" and (never_starts or too_late):
            message = f"job {job.job_id} did not start (--wait {most_seconds}); Slurm says: {state.reason}"
            fix = "wait longer with --wait, or ask for less; `man squeue` explains the reasons"
            if never_starts:
                fix = slurm.advice(state.reason)
            return Finding("job", FAULT, message, fix)
        time.sleep(job.poll_seconds)
        state = job.state()
    if not job.log.exists():
        message = f"job {job.job_id} left no log in {job.log.parent} ({state.detail})"
        fix = "set SITE_SCRATCH_DIR in slurm/site.sh to a folder that the compute nodes also see"
        return Finding("job", FAULT, message, fix)
    if state.name == "failed":
        return Finding("job", FAULT, f"job {job.job_id} failed: {state.detail}", f"see {job.log}")
    return Finding("job", OK, f"job {job.job_id} ran")


if __name__ == "__main__":
    errors.run(main)
