"""Look whether jobs can work here, before one fails: first on the login node, with --job in a short job too.

    python slurm/doctor.py                             the site file, Slurm, environment, data and folders
    python slurm/doctor.py --job                       also a job with the shape of stage 03's job script
    python slurm/doctor.py --job --nodes 2 --gpus 4    with another shape
    python slurm/doctor.py --job -- --cpus-per-task=8  options after -- go to sbatch as they are

The job is stage 03's own job script with the training replaced by `trainkit.jobs.checkup`, so what holds
for it holds for the training.

Exit code 0 if there is no fault (warnings are allowed), 1 if there is one. Any Python from 3.10 on will
do: only the standard library is needed here, and the job's own environment is among the things looked at.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator

from trainkit import errors
from trainkit.command_line import Parser, at_least
from trainkit.errors import UserError, printable, tell
from trainkit.jobs import checkup_job, login_node
from trainkit.jobs.checkup import in_words
from trainkit.jobs.finding import FAULT, OK, WARNING, Finding, has_fault

LABELS = {OK: "OK", WARNING: "warning", FAULT: "fault"}


def main() -> int:
    """Look at everything and show it; returns the exit code."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job is cancelled then, too
    findings: list[Finding] = []
    rows: list[dict] = []
    for found in _examine(options, rows):
        findings += found
        if not options.json:
            _show(found)
    count = {level: sum(finding.level == level for finding in findings) for level in LABELS}
    if options.json:
        document = {"findings": [finding._asdict() for finding in findings], "all_reduce": rows}
        tell(json.dumps(document, indent=1))
    else:
        _show_bandwidths(rows)
        tell(f"\n{count[FAULT]} fault(s), {count[WARNING]} warning(s), {count[OK]} OK")
    return 1 if count[FAULT] else 0


def _parse() -> argparse.Namespace:
    parser = Parser(prog="doctor.py", description=__doc__)
    add = parser.add_argument
    add("--job", action="store_true", help="also look inside a short job, on every node")
    add("--nodes", type=at_least(1), metavar="N", help="nodes of the job (default: the job script's)")
    add("--gpus", type=at_least(1), metavar="N", help="GPUs of the whole job (default: the job script's)")
    add("--time", type=at_least(3), default=15, metavar="MIN", help="its time limit (default: %(default)s)")
    in_queue = "seconds that the job may stay in the queue (default: %(default)s)"
    add("--wait", type=at_least(0), default=120, metavar="S", help=in_queue)
    loader_processes = "loader processes that each task is going to have (default: %(default)s)"
    add("--num-workers", type=at_least(0), default=4, metavar="N", help=loader_processes)
    add("--json", action="store_true", help="print one JSON document and nothing else")
    add("sbatch_options", nargs="*", metavar="-- OPTION", help="more options for sbatch")
    options = parser.parse_args()
    if options.gpus and options.gpus % (options.nodes or 1):
        raise UserError(f"{options.gpus} GPUs do not divide among {options.nodes} nodes: change one of them.")
    for word in options.sbatch_options:
        if not word.startswith("-"):
            raise UserError(f"{word!r} is not an option: those for sbatch are like this: -- --mem=8G")
    return options


def _examine(options: argparse.Namespace, rows: list[dict]) -> Iterator[list[Finding]]:
    """The findings, check by check; adds the all-reduce timings to `rows`."""
    site, found = login_node.check_site()
    yield found
    found = login_node.check_slurm()
    yield found
    blocked = site is None or has_fault(found)
    if site:
        if not blocked:
            found = checkup_job.check_submission(options, site)
            blocked = has_fault(found)
            yield found
        yield login_node.check_environment(site, in_job_too=options.job)
        found = login_node.check_folders(site)
        blocked = blocked or has_fault(found)
        yield found
    if options.job and blocked:
        yield [Finding("job", FAULT, "not started, it could not work", "mend the faults above first")]
    elif options.job:
        yield checkup_job.check_job(options, site, rows)


def _show(found: list[Finding]) -> None:
    """Print findings, those that several nodes or ranks have in common once."""
    together: dict[tuple, list[Finding]] = {}
    for finding in found:
        together.setdefault(finding[:4], []).append(finding)
    for (check, level, message, fix), alike in together.items():
        tell(f"{LABELS[level]:8} {check:12} {_where(alike)}{printable(message)}")
        if fix:
            tell(f"{'':21} fix: {fix}")


def _where(alike: list[Finding]) -> str:
    nodes = ", ".join(dict.fromkeys(finding.node for finding in alike if finding.node))
    ranks = ", ".join(str(finding.rank) for finding in alike if finding.rank is not None)
    return f"{f'rank {ranks} on ' if ranks else ''}{nodes}: " if nodes else ""


def _show_bandwidths(rows: list[dict]) -> None:
    if rows:
        tell("\nall-reduce     time ms   algorithm GB/s   bus GB/s")
    for row in rows:
        milliseconds, algorithm, bus = row["seconds"] * 1e3, row["algorithm_gb_s"], row["bus_gb_s"]
        tell(f"{in_words(row['bytes']):>10} {milliseconds:11.3f} {algorithm:16.3f} {bus:10.3f}")


if __name__ == "__main__":
    errors.run(main)
