"""Look whether jobs can work here, before one fails: first on the login node, with --job in a short job too.

    python slurm/doctor.py                             the site file, Slurm, environment, data and folders
    python slurm/doctor.py --job                       also a job with the shape of stage 03's job script
    python slurm/doctor.py --job --nodes 2 --gpus 4    with another shape
    python slurm/doctor.py --job -- --cpus-per-task=8  options after -- go to sbatch as they are

Inside an allocation (salloc), --job looks at that allocation. The job is stage 03's own job script
with the training replaced by `trainkit.checkup`, so what holds for it holds for the training.

Exit code 0 if there is no fault (warnings are allowed), 1 if there is one. Any Python from 3.10 on will
do: only the standard library is needed here, and the job's own environment is among the things looked at.
"""

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # trainkit, where it is not installed

from trainkit import checkup, errors  # noqa: E402
from trainkit.checkup import FAULT, OK, WARNING, Finding  # noqa: E402
from trainkit.errors import UserError  # noqa: E402
from trainkit.site import Site, read_site  # noqa: E402

DDP = REPOSITORY / "03_multigpu_ddp"
JOB_SCRIPT = DDP / "slurm_submit.sh"
USABLE = ("idle", "mix", "alloc", "comp", "resv", "plnd")  # states of nodes, as sinfo abbreviates them
PROGRAMS = ("sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")

ANSWER_SECONDS = 30  # for a command of Slurm; its own limit is mostly 10 s per try
IMPORT_SECONDS = 180
POLL_SECONDS = 1
SILENT_SECONDS = 60  # for which slurmctld may not answer about a job
FREE_GB = 1.0
# File systems that only their own machine sees, by their names in Linux.
LOCAL = {"tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "squashfs"}

# What Slurm says when it refuses a job (slurm_errno.c), and what to do about it.
REFUSALS = {
    "partition name": "set SBATCH_PARTITION in slurm/site.sh, or --partition, to one of: {partitions}",
    "account": "set SBATCH_ACCOUNT in slurm/site.sh to one of yours: sacctmgr show associations user=$USER",
    "qos": "correct SBATCH_QOS in slurm/site.sh: sacctmgr show qos",
    "reservation": "correct SBATCH_RESERVATION in slurm/site.sh: scontrol show reservation",
    "feature": "correct SBATCH_CONSTRAINT in slurm/site.sh; the features are: sinfo -o '%N %f'",
    "node configuration": "ask for less per node, or for more --nodes: the largest nodes have {largest}",
    "Node count": "ask for fewer --nodes; sinfo shows how many there are",
    "generic resource": "this Slurm has no such GPUs; see what it has: sinfo -o '%P %N %G'",
    "time limit": "ask for less time: sinfo -o '%P %l' shows the limits",
    "emory": "ask for less: sbatch --mem=...; the largest nodes have {largest}",
    "CPU count": "ask for fewer: sbatch --cpus-per-task=...; the largest nodes have {largest}",
}

# The shell of a job, up to the job's Python.
ENVIRONMENT = """
set -euo pipefail
source "$1/slurm/site_env.sh"; shift
if [[ ${SITE_SRUN_ARGS[*]-} == *--container* ]]; then echo "srun's container"; exit; fi
activate
exec "${SITE_CONTAINER[@]}" python -c "$@"
"""
# Run by the job's Python: tells who it is, then reads the data as a job would.
IMPORTS = """
import json, pathlib, sys
import torch, numpy, tqdm, psutil, filelock
from trainkit import checkup, data, errors
print(checkup.MARK + json.dumps({"python": sys.executable, "torch": torch.__version__}), flush=True)
errors.run(lambda: data.load("mnist", pathlib.Path(sys.argv[1])) and None)
"""

LABELS = {OK: "OK", WARNING: "warning", FAULT: "fault"}
COLOURS = {OK: "\033[32m", WARNING: "\033[33m", FAULT: "\033[31m"}


class Outcome(NamedTuple):
    """What became of the job: its name for people, state in Slurm, nodes, and why it was given up, if so."""

    job: str
    state: str
    nodes: str
    given_up: list[Finding]


def main() -> int:
    try:
        return _diagnose(_parse())
    except BrokenPipeError:  # of `doctor.py | head`; Python would complain again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _diagnose(options: argparse.Namespace) -> int:
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
        print(json.dumps(document, indent=1))
    else:
        _show_bandwidths(rows)
        print(f"\n{count[FAULT]} fault(s), {count[WARNING]} warning(s), {count[OK]} OK")
    return 1 if count[FAULT] else 0


def _parse() -> argparse.Namespace:
    parser = _Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--job", action="store_true", help="also look inside a short job, on every node")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the job (default: the job script's)")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of the whole job (default: the job script's)"
    )
    parser.add_argument("--partition", metavar="NAME", help="default: the site file's, else Slurm's")
    parser.add_argument(
        "--time", type=int, default=10, metavar="MIN", help="time limit of the job (default: %(default)s)"
    )
    parser.add_argument(
        "--wait",
        type=int,
        default=120,
        metavar="S",
        help="seconds that the job may stay in the queue (default: %(default)s)",
    )
    parser.add_argument(
        "--num-workers",
        type=int,
        default=4,
        metavar="N",
        help="loader processes that each task is going to have (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("sbatch_options", nargs="*", metavar="-- OPTION", help="more options for sbatch")
    options = parser.parse_args()
    for name, smallest in {"nodes": 1, "gpus": 1, "time": 3, "wait": 0, "num_workers": 0}.items():
        number = getattr(options, name)
        if number is not None and number < smallest:
            option = name.replace("_", "-")
            raise UserError(f"--{option} {number} is too small, it must be {smallest} or more.")
    if options.gpus and options.gpus % (options.nodes or 1):
        raise UserError(f"{options.gpus} GPUs do not divide among {options.nodes} nodes: change one of them.")
    for word in options.sbatch_options:
        if not word.startswith("-"):
            raise UserError(f"{word!r} is not an option: those for sbatch are like this: -- --mem=8G")
    shape = [options.nodes, options.gpus, options.partition, *options.sbatch_options]
    if options.job and "SLURM_JOB_ID" in os.environ and any(shape):
        raise UserError(
            f"this shell is inside job {os.environ['SLURM_JOB_ID']}, whose shape is given: leave out "
            "--nodes, --gpus, --partition and options for sbatch, or run the doctor on the login node."
        )
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(f"{message}. See --help.")


def _examine(options: argparse.Namespace, rows: list[dict]) -> Iterator[list[Finding]]:
    """The findings, check by check; adds the all-reduce timings to `rows`."""
    site, found = _check_site()
    yield found
    found = _check_slurm()
    yield found
    blocked = site is None or _has_fault(found)
    if site:
        if not blocked and "SLURM_JOB_ID" not in os.environ:
            found = _check_submission(options, site)
            blocked = _has_fault(found)
            yield found
        yield _check_environment(site, options)
        found = _check_folders(site, options)
        blocked = blocked or _has_fault(found)
        yield found
    if options.job and blocked:
        yield [Finding("job", FAULT, "not started, it could not work", "mend the faults above first")]
    elif options.job:
        yield _check_job(options, site, rows)


def _has_fault(found: list[Finding]) -> bool:
    return any(finding.level == FAULT for finding in found)


# --- on the login node ----------------------------------------------------------------------------


def _check_site() -> tuple[Site | None, list[Finding]]:
    try:
        site = read_site()
    except UserError as error:
        fix = "slurm/site.example.sh shows the form"
        return None, [Finding("site", FAULT, str(error), fix)]
    told = ", ".join(f"{name}={value}" for name, value in sorted(site.sbatch.items()))
    there = (REPOSITORY / "slurm" / "site.sh").is_file()
    what = "slurm/site.sh is valid" if there else "no slurm/site.sh: the defaults hold"
    return site, [Finding("site", OK, f"{what}{f' ({told})' if told else ''}")]


def _check_slurm() -> list[Finding]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        what = "there is no Slurm here" if len(missing) == len(PROGRAMS) else "Slurm is here only in part"
        message = f"{what}: {', '.join(missing)} not on PATH"
        fix = "go to the login node, `module load slurm` on some sites; without a cluster: make cluster-up"
        return [Finding("slurm", FAULT, message, fix)]
    ping = _run("scontrol", "ping")
    if " UP" not in ping.stdout:
        told = re.search(r".* is DOWN", ping.stdout)
        why = told[0] if told else _last_line(ping.stderr)
        fix = "try again later, or tell your admin; of the practice cluster: make cluster-down cluster-up"
        return [Finding("slurm", FAULT, f"Slurm's controller does not answer ({why})", fix)]
    nodes = dict(line.split("|") for line in _run("sinfo", "-h", "-N", "-o", "%N|%t").stdout.split())
    # The signs tell of power saving and planned reservations; a node with * does not answer.
    up = [name for name, state in nodes.items() if state.rstrip("~#!%$@^-") in USABLE]
    if not up:
        message = f"no node can run a job, their states are {', '.join(sorted(set(nodes.values())))}"
        return [Finding("slurm", FAULT, message, "see `sinfo --list-reasons`, tell your admin")]
    version = _run("scontrol", "--version").stdout.strip()
    return [Finding("slurm", OK, f"{version} answers, {len(up)} of {len(nodes)} node(s) can run jobs")]


def _check_submission(options: argparse.Namespace, site: Site) -> list[Finding]:
    done = _sbatch(site, "--test-only", *_shape(options), JOB_SCRIPT.name)
    told = _told_by_sbatch(done)
    if done.returncode == 0:
        return [Finding("submission", OK, f"Slurm would take the job: {told}")]
    fix = next((fix for words, fix in REFUSALS.items() if words in told), "ask your admin what it means")
    partitions = ", ".join(sorted(set(_run("sinfo", "-h", "-o", "%R").stdout.split())))
    largest = _largest_nodes()
    gpus = _gpus_per_node(options)
    if gpus > largest["GPUs"] and ("node configuration" in told or "generic resource" in told):
        told = f"{gpus} GPUs per node, but no node has more than {largest['GPUs']} ({told})"
    what = ", ".join(f"{number} {name}" for name, number in largest.items())
    fix = fix.format(partitions=partitions, largest=what)
    return [Finding("submission", FAULT, f"Slurm refuses the job: {told}", fix)]


def _sbatch(site: Site, *arguments: str, script: str | None = None) -> subprocess.CompletedProcess:
    """sbatch in stage 03's folder, with the site's SBATCH_* variables."""
    return _run("sbatch", *arguments, cwd=DDP, env=os.environ | site.sbatch, input=script)


def _told_by_sbatch(done: subprocess.CompletedProcess) -> str:
    """What it says, without what only says that it comes from sbatch."""
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("Try ")]
    empty = r"^(\S*sbatch: |error: |allocation failure: |Batch job submission failed: )*"
    return "; ".join(re.sub(empty, "", line) for line in lines) or f"exit code {done.returncode}"


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


def _largest_nodes() -> dict[str, int]:
    """The most that any node has, of each: GPUs, CPUs, GB of memory."""
    largest = {"GPUs": 0, "CPUs": 0, "GB": 0}
    for line in _run("sinfo", "-h", "-N", "-o", "%G|%c|%m").stdout.splitlines():
        gres, cpus, megabytes = line.split("|")
        # Such as gpu:2, gpu:a100:4(S:0-1) or (null).
        gpus = sum(int(number) for number in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", gres))
        here = {"GPUs": gpus, "CPUs": int(cpus), "GB": int(megabytes) // 1024}
        largest = {name: max(number, here[name]) for name, number in largest.items()}
    return largest


def _check_environment(site: Site, options: argparse.Namespace) -> list[Finding]:
    """The job's Python and, read by it, the data."""
    command = ("bash", "-c", ENVIRONMENT, "environment", str(REPOSITORY), IMPORTS, str(site.data_dir))
    done = _run(*command, seconds=IMPORT_SECONDS)
    told = [line for line in done.stdout.splitlines() if line.startswith(checkup.MARK)]
    if "srun's container" in done.stdout:
        message = "Python and data are seen from inside srun's container only"
        return [Finding("environment", WARNING, message, "see with `doctor.py --job`")]
    if not told:
        # What a command said, and what became of it.
        problem = "; ".join(done.stderr.strip().splitlines()[-2:]) or f"exit code {done.returncode}"
        message = f"the job's Python does not work here: {problem}"
        fix = "mend activate_environment in slurm/site.sh; for the default, .venv: make .venv/ready"
        # It may work on the compute nodes alone, which the job is going to tell.
        return [Finding("environment", WARNING if options.job else FAULT, message, fix)]
    python = json.loads(told[0].removeprefix(checkup.MARK))
    found = [Finding("environment", OK, f"{python['python']}, torch {python['torch']}")]
    if done.returncode:
        message, _, fix = _last_line(done.stderr).removeprefix("error: ").partition("): ")
        return [*found, Finding("data", FAULT, f"{message})" if fix else message, fix)]
    return [*found, Finding("data", OK, f"MNIST in {site.data_dir}")]


def _check_folders(site: Site, options: argparse.Namespace) -> list[Finding]:
    found, local = [], []
    for folder in dict.fromkeys((site.results_dir, site.jobs_dir, DDP)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            free = shutil.disk_usage(folder).free / checkup.GB
        except OSError as error:
            fix = "set SITE_RESULTS_DIR and SITE_SCRATCH_DIR in slurm/site.sh to shared folders of yours"
            if folder == DDP:
                fix = "jobs write their logs there: put this checkout where you may write"
            found.append(Finding("folders", FAULT, f"{folder} cannot be written to ({error.strerror})", fix))
            continue
        if free < FREE_GB:
            message = f"{free:.2f} GB free in {folder}"
            fix = "make room, or choose another folder in slurm/site.sh"
            found.append(Finding("folders", WARNING, message, fix))
        if set(_run("df", "--output=fstype", str(folder)).stdout.split()) & LOCAL:
            local.append(str(folder))
    # In a job the nodes look for each other's files, which tells more than the kind of file system.
    if local and (options.nodes or 1) > 1 and not options.job:
        message = f"on a file system that other nodes may not see: {', '.join(local)}"
        fix = "see with `doctor.py --job`; shared folders are set in slurm/site.sh"
        found.append(Finding("folders", WARNING, message, fix))
    message = f"results, checkpoints and logs can be written: {site.results_dir}, {site.jobs_dir}, {DDP}"
    return found or [Finding("folders", OK, message)]


def _run(
    *command: str, seconds: float = ANSWER_SECONDS, input: str | None = None, **where: object
) -> subprocess.CompletedProcess:
    """Run a command to its end; one that takes too long has exit code 124, one that is not there 127."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            input=input or "",
            timeout=seconds,
            **where,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]}: no answer after {seconds:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {error.strerror}")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


# --- in a job -------------------------------------------------------------------------------------


def _check_job(options: argparse.Namespace, site: Site, rows: list[dict]) -> list[Finding]:
    name = f"doctor-{secrets.token_hex(4)}"
    log = site.jobs_dir / f"{name}.log"
    run = _run_here if "SLURM_JOB_ID" in os.environ else _submit
    found: list[Finding] = []
    try:
        outcome = run(options, site, name, log)
        ranks = checkup.facts(_text(log))
        if ranks:
            hosts = _run("scontrol", "show", "hostnames", outcome.nodes).stdout.split()
            found = checkup.judge(ranks, hosts, options.num_workers)
            rows += checkup.bandwidths(ranks)
        found = [*(outcome.given_up or [_judge_job(outcome, log, found)]), *found]
        return found
    finally:
        # The job's folder by its own word: one of that number may be another's, from before.
        for folder in {Path(told["place"]["folder"]) for told in checkup.facts(_text(log)).values()}:
            shutil.rmtree(folder, ignore_errors=True)
            for note in site.results_dir.glob(checkup.NOTE.format(job=folder.name, node="*")):
                note.unlink(missing_ok=True)  # of ranks that were killed
        if not _has_fault(found):
            log.unlink(missing_ok=True)


def _judge_job(outcome: Outcome, log: Path, found: list[Finding]) -> Finding:
    """About the job itself; `found` is what was found in it."""
    if not log.exists():
        message = f"{outcome.job} ended as {outcome.state} and left no log in {log.parent}"
        fix = "set SITE_SCRATCH_DIR in slurm/site.sh to a folder that the compute nodes see, too"
        return Finding("job", FAULT, message, fix)
    if found and outcome.state in ("COMPLETED", "GONE"):  # Slurm may forget a job at once
        where = f"; its log: {log}" if _has_fault(found) else ""
        return Finding("job", OK, f"{outcome.job} ran on {outcome.nodes}{where}")
    lines = _text(log).splitlines()
    told = next((line for line in lines if "error:" in line), lines[-1] if lines else "its log is empty")
    message = f"{outcome.job} ended as {outcome.state}: {told.removeprefix('error: ')}"
    return Finding("job", FAULT, message, f"see {log}")


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _script() -> str:
    """Stage 03's job script with the checkup for the training; and a rank that dies leaves the others be."""
    text = JOB_SCRIPT.read_text()
    script = text.replace("python mnist_ddp.py", "python -m trainkit.checkup")
    if script == text:
        raise UserError(f"there is no `python mnist_ddp.py` in {JOB_SCRIPT}, whose place the checkup takes.")
    return script.replace("--kill-on-bad-exit=1", "--kill-on-bad-exit=0")


def _submit(options: argparse.Namespace, site: Site, name: str, log: Path) -> Outcome:
    """Send the job and wait for its end. It is cancelled if it does not start in time, or on Ctrl-C."""
    settings = (f"--job-name={name}", f"--time={options.time}", "--no-requeue", f"--output={log}")
    try:
        done = _sbatch(site, "--parsable", *_shape(options), *settings, script=_script())
        if done.returncode:
            message = f"Slurm refuses the job: {_told_by_sbatch(done)}"
            refusal = Finding("job", FAULT, message, "try the same options with sbatch and a script of yours")
            return Outcome("the job", "refused", "", [refusal])
        job_id = _last_line(done.stdout).partition(";")[0]
        return Outcome(f"job {job_id}", *_follow(job_id, options))
    finally:
        # By its name, since Ctrl-C may come before the number is known.
        _run("scancel", "--quiet", f"--name={name}")


def _follow(job_id: str, options: argparse.Namespace) -> tuple[str, str, list[Finding]]:
    """Wait for the job's end; its last state and nodes, and a fault if it was given up."""
    begin = heard = time.monotonic()
    shown = ""
    while True:
        asked = _run("scontrol", "show", "job", "--oneliner", job_id)
        job = dict(re.findall(r"(\w+)=(\S*)", asked.stdout))
        now = time.monotonic()
        if "Invalid job id" in asked.stderr:
            return "GONE", "", []
        state, nodes = job.get("JobState", "UNKNOWN"), job.get("NodeList", "")
        if state != "UNKNOWN":
            heard = now
        waits = state in ("PENDING", "CONFIGURING")
        if f"{state} {nodes}" != shown:
            shown = f"{state} {nodes}"
            reason = f" ({job['Reason']})" if waits else ""
            print(f"job {job_id}: {state.lower()}{reason}", file=sys.stderr)
        if state == "COMPLETING":  # the script has ended, some nodes still clean up
            state = "COMPLETED" if job["ExitCode"] == "0:0" else "FAILED"
        if not waits and state not in ("UNKNOWN", "RUNNING", "SUSPENDED", "STOPPED"):
            return state, nodes, []
        message = ""
        if waits and now - begin > options.wait:
            message = f"job {job_id} did not start within {options.wait} s, Slurm's reason: {job['Reason']}"
            fix = "wait longer with --wait, or ask for less; `man squeue` explains the reasons"
        elif now - heard > SILENT_SECONDS:
            message = f"Slurm's controller fell silent about job {job_id}: {_last_line(asked.stderr)}"
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


# --- telling --------------------------------------------------------------------------------------


def _show(found: list[Finding]) -> None:
    """Print findings, those that several nodes or ranks have in common once."""
    together: dict[tuple, list[Finding]] = {}
    for finding in found:
        together.setdefault(finding[:4], []).append(finding)
    for (check, level, message, fix), alike in together.items():
        label = f"{LABELS[level]:8}"
        if sys.stdout.isatty() and "NO_COLOR" not in os.environ:  # https://no-color.org
            label = f"{COLOURS[level]}{label}\033[0m"
        print(f"{label} {check:12} {_where(alike)}{message}")
        if fix:
            print(f"{'':21} fix: {fix}")
    sys.stdout.flush()


def _where(alike: list[Finding]) -> str:
    nodes = ", ".join(dict.fromkeys(finding.node for finding in alike if finding.node))
    ranks = ", ".join(str(finding.rank) for finding in alike if finding.rank is not None)
    return f"{f'rank {ranks} on ' if ranks else ''}{nodes}: " if nodes else ""


def _show_bandwidths(rows: list[dict]) -> None:
    if rows:
        print("\nall-reduce     time ms   algorithm GB/s   bus GB/s")
    for row in rows:
        size = f"{row['bytes'] // 2**10} KB" if row["bytes"] < 2**20 else f"{row['bytes'] // 2**20} MB"
        milliseconds, algorithm, bus = row["seconds"] * 1e3, row["algorithm_gb_s"], row["bus_gb_s"]
        print(f"{size:>10} {milliseconds:11.3f} {algorithm:16.3f} {bus:10.3f}")


if __name__ == "__main__":
    errors.run(main)
