"""Check whether jobs can work here, before one fails: on the login node, and with --job also in a short job.

    python slurm/doctor.py                             the site file, Slurm, environment, data and folders
    python slurm/doctor.py --write-site                first find out how this cluster wants jobs to be
                                                       requested, and write the site file
    python slurm/doctor.py --job                       also a job with the shape of stage 03's: 2 GPUs
    python slurm/doctor.py --job --nodes 2 --gpus 4    with another shape
    python slurm/doctor.py --job -- --cpus-per-task=8  options after -- go to sbatch as they are
    python slurm/doctor.py --job --python ~/envs/mine/bin/python --plain train.py
                                                       a script of yours: its imports, PyTorch, and ranks

The job is scripts/doctor.sh, which makes everything ready as the job scripts do (scripts/job_env.sh), so
what works for it works for the training.

The exit code is 0 if there is no fault (warnings are allowed), 1 if there is one. Any Python from 3.10 on
will do: it needs only the standard library, and checks the job's environment, too.
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
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from manygpus import json_document, project
from manygpus.config.command_line import Parser, add_json, at_least, given
from manygpus.data.staging import shared_data_fix
from manygpus.errors import UserError, entrypoint, print_line, reason
from manygpus.jobs import local_job, slurm
from manygpus.jobs.doctor import login_node, site_file
from manygpus.jobs.doctor.checkup import NOTE
from manygpus.jobs.doctor.findings import (
    FAULT,
    OK,
    WARNING,
    Finding,
    findings_in,
    fix_of,
    has_fault,
    read_messages,
    size_in_words,
)
from manygpus.jobs.site import DEFAULT_MINUTES, OPTION_TEMPLATES, SCRIPTS, Site, shared_folders_fix
from manygpus.jobs.stages import STAGES, resources
from manygpus.jobs.submit import partition_limits
from manygpus.jobs.submit.slurm_options import of_variables, sbatch_options
from manygpus.jobs.user_program import Program, add_options, from_options, split
from manygpus.jobs.watch.job_status import NO_LOG, SlurmHandle
from manygpus.record import records
from manygpus.record.columns import DDP

# Of schemas/doctor.json.
SCHEMA_VERSION = 1
LABELS = {OK: "OK", WARNING: "warning", FAULT: "fault"}
JOB_SCRIPT = SCRIPTS / "doctor.sh"
STAGE_SCRIPT = STAGES[DDP].script.parent / "slurm_submit.sh"
# The time limit of the job.
MINUTES = 15


@entrypoint
def main() -> int:
    """Run all checks and print the findings; return the exit code."""
    options = _parse()
    # Leaving in this way also cancels the job.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    findings: list[Finding] = []
    rows: list[dict] = []
    for check_findings in _examine(options, rows):
        findings += check_findings
        if not options.json:
            _print_findings(check_findings)
    count = {level: sum(finding.level == level for finding in findings) for level in LABELS}
    if options.json:
        found = [finding._asdict() for finding in findings]
        document = {"schema_version": SCHEMA_VERSION, "findings": found, "all_reduce": rows}
        json_document.print_document(document)
    else:
        if rows:
            _print_all_reduce(rows)
        print_line(f"\n{count[FAULT]} fault(s), {count[WARNING]} warning(s), {count[OK]} OK")
    return 1 if count[FAULT] else 0


def _print_findings(findings: list[Finding]) -> None:
    """Print what several nodes or ranks share once."""
    by_content: dict[tuple, list[Finding]] = {}
    for finding in findings:
        content = (finding.check, finding.level, finding.message, finding.fix)
        by_content.setdefault(content, []).append(finding)
    for (check, level, message, fix), alike in by_content.items():
        print_line(f"{LABELS[level]:8} {check:12} {_seen_by(alike)}{message}")
        if fix:
            print_line(f"{'':21} fix: {fix}")


def _seen_by(findings: list[Finding]) -> str:
    """Return which ranks and nodes have seen it, as in "rank 0, 1 on n1: "; "" for the login node."""
    nodes = ", ".join(dict.fromkeys(finding.node for finding in findings if finding.node))
    ranks = ", ".join(str(finding.rank) for finding in findings if finding.rank is not None)
    if not nodes:
        return ""
    if ranks:
        return f"rank {ranks} on {nodes}: "
    return f"{nodes}: "


def _print_all_reduce(rows: list[dict]) -> None:
    print_line("\nall-reduce     time ms   bus GB/s")
    for row in rows:
        size = size_in_words(row["bytes"])
        milliseconds = 1000 * row["seconds"]
        print_line(f"{size:>10} {milliseconds:11.3f} {row['bus_gb_s']:10.3f}")
    print_line("the most that links carry: see 03_multigpu_ddp/SCALING.md#how-fast-is-the-network")


def _parse() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--job", action="store_true", help="also check inside a short job, on every node")
    parser.add_argument(
        "--nodes", type=at_least(1), default=1, metavar="N", help="nodes of the job (default: %(default)s)"
    )
    parser.add_argument(
        "--gpus", type=at_least(1), metavar="N", help="GPUs of the whole job (default: 2 per node)"
    )
    parser.add_argument(
        "--time",
        type=at_least(3),
        metavar="MIN",
        help=f"time limit of the job (default: {MINUTES}, or the site file's if that is less)",
    )
    parser.add_argument(
        "--wait",
        type=at_least(0),
        default=120,
        metavar="S",
        help="seconds that the job may stay in the queue (default: %(default)s)",
    )
    parser.add_argument(
        "--write-site",
        action="store_true",
        help=f"first write {project.site_name()}, for jobs of --gpus and --nodes; if there is one, it "
        f"stays, and the proposal is {project.site_name()}.new",
    )
    add_json(parser, "the findings")
    parser.add_argument(
        "--plain",
        metavar="PROGRAM",
        type=given,
        help="also check this script in its environment; everything after it is its own arguments "
        "(slurm/SITE.md)",
    )
    add_options(parser)
    parser.add_argument("sbatch_options", nargs="*", metavar="-- OPTION", help="more options for sbatch")
    own_words, others = split(sys.argv[1:], parser)
    options = parser.parse_args(own_words)
    stage = STAGES[DDP]
    options.program = None
    # Of the kit's ranks, until `_examine` has looked at the script's Python.
    options.checkup = ["python"]
    user_folder = Path(os.environ.get("MANYGPUS_USER_FOLDER", Path.cwd()))
    if options.plain:
        options.program = from_options(options, [user_folder, stage.script.parent])
        options.program_arguments = others
    else:
        options.sbatch_options += others
        if not project.IS_CHECKOUT:
            # Without stages all scripts are the user's.
            options.program = Program(path=user_folder / "a script.py", user_folder=user_folder)
            options.program_arguments = []
    gpus = options.gpus or stage.default_gpus * options.nodes
    options.shape = resources(stage, gpus, options.nodes)
    for word in options.sbatch_options:
        if not word.startswith("-"):
            raise UserError(f"{word!r} is not an option: options for sbatch follow --, as in: -- --mem=8G")
    return options


def _examine(options: argparse.Namespace, rows: list[dict]) -> Iterator[list[Finding]]:
    """Yield the findings, check by check; add the all-reduce timings to `rows`."""
    site, findings = login_node.check_site()
    yield findings
    findings = login_node.check_slurm()
    yield findings
    if site and options.write_site and not has_fault(findings):
        yield site_file.write_site(options.shape)
        site, site_findings = login_node.check_site()
        yield site_findings
    blocked = site is None or has_fault(findings)
    if site:
        if not blocked:
            findings = _check_submission(options, site)
            blocked = has_fault(findings)
            yield findings
        environment_findings = []
        if project.IS_CHECKOUT:
            environment_findings = login_node.check_environment(
                site, in_job_too=options.job, with_data=not options.plain
            )
        yield environment_findings
        if options.program:
            checked = login_node.check_program(options.program, options.program_arguments)
            options.checkup = [checked.python, "--only-torch"]
            blocked = blocked or has_fault(checked.findings)
            yield checked.findings
        findings = login_node.check_folders(site)
        blocked = blocked or has_fault(findings)
        yield findings
    if options.job and blocked:
        yield [Finding("job", FAULT, "not started, because it could not work", "fix the faults above first")]
    elif options.job:
        job_findings = _check_job(options, site, rows)
        if any(finding.check == "data" and finding.level == OK for finding in environment_findings):
            # To get the data once more would change nothing.
            job_findings = [_with_shared_data(finding) for finding in job_findings]
        yield job_findings


def _with_shared_data(finding: Finding) -> Finding:
    """Return what a rank has found; of data that only the login node has, with the remedy for that."""
    if (finding.check, finding.level) != ("data", FAULT):
        return finding
    return finding._replace(fix=shared_data_fix())


def _check_submission(options: argparse.Namespace, site: Site) -> list[Finding]:
    """Ask Slurm whether it would accept the job, and the stages' job scripts as they are."""
    done = _sbatch(site, [JOB_SCRIPT], "--test-only", *_request(options, site))
    refusal = _refusal("submission", done)
    if refusal:
        return [refusal]
    words = (word.removeprefix("--").partition("=") for word in options.sbatch_options)
    asked = {
        "nodes": str(options.nodes),
        "time": str(DEFAULT_MINUTES),
        **sbatch_options(site, options.shape),
        **of_variables(site.sbatch),
        **{option: value for option, _, value in words},
    }
    beyond = partition_limits.excess(asked)
    if beyond:
        message = f"such jobs would never start ({beyond.reason}: {beyond.limit})"
        return [Finding("submission", FAULT, message, slurm.advice(beyond.reason))]
    # It names a job, but there is none.
    when = re.sub(r"^.*?Job \d+ to start at", "it would start at", slurm.sbatch_message(done.stderr))
    findings = [Finding("submission", OK, f"Slurm would accept the job (nothing was submitted): {when}")]
    if not project.IS_CHECKOUT:
        return findings
    done = _sbatch(site, [STAGE_SCRIPT], "--test-only", *options.sbatch_options)
    refusal = _refusal("submission", done)
    if refusal:
        fix = refusal.fix
        if site.option_templates != OPTION_TEMPLATES:
            wanted = " ".join(_as_options(sbatch_options(site, options.shape)))
            fix = f"have its #SBATCH lines ask as this site wants it ({wanted}), or use submit.py"
        message = f"with the job script of stage 03, {refusal.message}"
        findings.append(refusal._replace(level=WARNING, message=message, fix=fix))
    return findings


def _check_job(options: argparse.Namespace, site: Site, rows: list[dict]) -> list[Finding]:
    """Return the findings of a job that checks every rank; add the all-reduce timings to `rows`."""
    started_at = datetime.now(timezone.utc)
    name = f"doctor-{secrets.token_hex(4)}"
    log = site.jobs_dir / f"{name}.log"
    findings: list[Finding] = []
    try:
        findings = [_run(options, site, name, log)]
        messages = _messages_in(log)
        if messages:
            findings += findings_of_ranks(messages, log)
        rows += [message["row"] for message in messages if "row" in message]
        if rows:
            findings.append(_keep_all_reduce(rows, site, started_at))
    finally:
        _clear(log, site)
        if not has_fault(findings):
            log.unlink(missing_ok=True)
    return findings


def _messages_in(log: Path) -> list[dict]:
    """Return what the ranks have sent; nothing if there is no log."""
    if not log.exists():
        return []
    return list(read_messages(log.read_text(errors="replace")))


def _keep_all_reduce(rows: list[dict], site: Site, started_at: datetime) -> Finding:
    """Write the timings where predictions for more nodes look for them (manygpus.reports.advice)."""
    shape = f"{rows[0]['ranks']}x{rows[0]['nodes']}"
    path = site.results_dir / "all_reduce" / f"{started_at:%Y%m%d-%H%M%S}-{shape}.tsv"
    facts = {"started_at": f"{started_at:%Y-%m-%dT%H:%M:%SZ}"}
    table = [row | facts for row in rows]
    try:
        records.put_table(path, records.ALL_REDUCE_COLUMNS, table, delimiter="\t")
    except OSError as error:
        message = f"the times cannot be written to {path} ({reason(error)})"
        return Finding("all-reduce", WARNING, message, "free the space, or fix the permissions")
    return Finding("all-reduce", OK, f"the times are saved in {path}")


def _clear(log: Path, site: Site) -> None:
    """Remove the job's folder, and the notes by which its nodes have seen whether they share folders."""
    # The job itself names its folder: one with its number may be left from another job.
    folders = {Path(message["folder"]) for message in _messages_in(log) if "folder" in message}
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        for note in site.results_dir.glob(NOTE.format(job=folder.name, node="*")):
            note.unlink(missing_ok=True)


def findings_of_ranks(messages: list[dict], log: Path) -> list[Finding]:
    """Return what the ranks found, and which of them did not finish."""
    findings = findings_in(sorted(messages, key=lambda message: message["rank"]))
    versions = {finding.message for finding in findings if finding.check == "software"}
    if len(versions) > 1:
        message = "the software is not the same on every node"
        findings.append(Finding("software", FAULT, message, fix_of("software")))
    world_size = max(message.get("size", 0) for message in messages)
    ended = {message["rank"] for message in messages if "ended" in message}
    silent = sorted(set(range(world_size)) - ended)
    if not silent:
        return [Finding("ranks", OK, f"{world_size} ranks reported"), *findings]
    last_steps = {message["rank"]: message["begun"] for message in messages if "begun" in message}
    for rank in silent:
        message = f"rank {rank} never reported: its Python did not start"
        if rank in last_steps:
            message = f"rank {rank} was killed or crashed while it checked {last_steps[rank]}"
        findings.append(
            Finding("ranks", FAULT, message, f"see {log}; if memory was short, give sbatch --mem=32G")
        )
    return findings


def _sbatch(site: Site, command: Sequence[Path | str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run sbatch for a job script with its arguments, in its folder, with the site's SBATCH_* variables."""
    environment = local_job.outside_of_jobs() | site.sbatch
    script, *arguments = command
    return slurm.ask("sbatch", *options, script.name, *arguments, cwd=script.parent, env=environment)


def _refusal(check: str, done: subprocess.CompletedProcess[str]) -> Finding | None:
    """Return a fault with what sbatch said if it refused the job."""
    if not done.returncode:
        return None
    refusal = slurm.sbatch_message(done.stderr) or f"exit code {done.returncode}"
    return Finding(check, FAULT, f"Slurm refuses the job: {refusal}", slurm.advice(refusal))


def _request(options: argparse.Namespace, site: Site) -> list[str]:
    """Return the options for sbatch that shape the job, in the words of the site."""
    asked = {
        "nodes": options.nodes,
        "ntasks-per-node": options.shape.tasks_per_node,
        **sbatch_options(site, options.shape),
    }
    return [*_as_options(asked), *options.sbatch_options]


def _as_options(values: dict[str, object]) -> list[str]:
    """Return {"nodes": 2} as ["--nodes=2"]."""
    return [f"--{name}={value}" for name, value in values.items()]


def _run(options: argparse.Namespace, site: Site, name: str, log: Path) -> Finding:
    """Submit the job and wait for its end; cancel it if it does not start in time, or on Ctrl-C."""
    minutes = options.time or min(MINUTES, site.minutes or MINUTES)
    settings = (f"--job-name={name}", f"--time={minutes}", "--no-requeue", f"--output={log}")
    try:
        job = [JOB_SCRIPT, "\n".join(project.assignments()), *options.checkup]
        done = _sbatch(site, job, "--parsable", *_request(options, site), *settings)
        refusal = _refusal("job", done)
        if refusal:
            return refusal
        # The last line is the number, and where there are several clusters the name of one.
        job_id = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
        held_by_this_shell = slurm.job_of_this_shell()
        if held_by_this_shell:
            print_line(f"note: {held_by_this_shell}", sys.stderr)
        job = SlurmHandle(
            job_id=job_id,
            tasks=options.shape.tasks,
            log=log,
            folder=site.jobs_dir / job_id,
            results=site.results_dir,
        )
        return _wait_for(job, options.wait)
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
            print_line(f"job {job.job_id} {state.name}{detail}", sys.stderr)
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
    if job.left_no_log:
        message = f"job {job.job_id} has ended ({job.status.state}): {NO_LOG.format(folder=job.log.parent)}"
        return Finding("job", FAULT, message, shared_folders_fix())
    if state.name == "failed":
        return Finding("job", FAULT, f"job {job.job_id} failed: {state.detail}", f"see {job.log}")
    return Finding("job", OK, f"job {job.job_id} ran")


if __name__ == "__main__":
    main()
