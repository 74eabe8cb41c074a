"""The doctor's checks on the login node: the site file, Slurm, the job's environment, data and folders.

Only the standard library is needed.
"""

import json
import os
import re
import shlex
import shutil
import stat
from pathlib import Path

from trainkit import files
from trainkit.errors import UserError
from trainkit.jobs import slurm
from trainkit.jobs.finding import FAULT, MARK, OK, WARNING, Finding, fault_of
from trainkit.jobs.judging import cards_in_words
from trainkit.jobs.site import Site, read_site
from trainkit.jobs.stages import REPOSITORY, STAGES

USABLE = ("idle", "mix", "alloc", "comp", "resv", "plnd")  # states of nodes, as sinfo abbreviates them
PROGRAMS = ("sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")

IMPORT_SECONDS = 180
FREE_GB = 1.0
# File systems that only their own machine sees, by their names in Linux.
LOCAL = {"tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "squashfs"}

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
from trainkit import data, errors
from trainkit.jobs import checkup, finding
print(finding.MARK + json.dumps(checkup.seen_from_login_node()), flush=True)
errors.run(lambda: data.load("mnist", pathlib.Path(sys.argv[1])) and None)
"""


def check_site() -> tuple[Site | None, list[Finding]]:
    """What slurm/site.sh says, if it can be read."""
    try:
        site = read_site()
    except UserError as error:
        return None, [Finding("site", FAULT, str(error), "slurm/site.example.sh shows the form")]
    told = ", ".join(f"{name}={value}" for name, value in sorted(site.sbatch.items()))
    file = REPOSITORY / "slurm" / "site.sh"
    others = check_owner(file.parent, "what jobs run") + (check_owner(file, "it") if file.exists() else [])
    what = "slurm/site.sh is valid" if file.exists() else "no slurm/site.sh: the defaults hold"
    return site, others or [Finding("site", OK, f"{what}{f' ({told})' if told else ''}")]


def check_owner(path: Path, what: str, check: str = "site") -> list[Finding]:
    """Whether nobody but the user (and root) could change `what` behind the user's back."""
    status, quoted = path.stat(), shlex.quote(str(path))
    if status.st_uid not in (os.getuid(), 0):
        message = f"{path} belongs to user {status.st_uid}, who can change {what}"
        return [Finding(check, FAULT, message, "put a copy of your own in its place")]
    if status.st_mode & stat.S_IWOTH:
        message = f"everybody can write to {path}, and so change {what}"
        return [Finding(check, FAULT, message, f"chmod o-w {quoted}")]
    # Many systems give every user a group of their own, with the user's number.
    if status.st_mode & stat.S_IWGRP and status.st_gid not in (os.getuid(), 0):
        message = f"group {status.st_gid} can write to {path}, and so change {what}"
        return [Finding(check, WARNING, message, f"chmod g-w {quoted}, if you do not trust all of them")]
    return []


def check_slurm() -> list[Finding]:
    """Whether Slurm's programs are here, its controller answers, and a node can run jobs."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        what = "there is no Slurm here" if len(missing) == len(PROGRAMS) else "Slurm is here only in part"
        message = f"{what}: {', '.join(missing)} not on PATH"
        fix = "go to the login node, `module load slurm` on some sites; without a cluster: make cluster-up"
        return [Finding("slurm", FAULT, message, fix)]
    ping = slurm.ask("scontrol", "ping")
    if " UP" not in ping.stdout:
        told = re.search(r".* is DOWN", ping.stdout)
        why = told[0] if told else ping.stderr.strip().rpartition("\n")[2]
        fix = "try again later, or tell your admin; of the practice cluster: make cluster-down cluster-up"
        return [Finding("slurm", FAULT, f"Slurm's controller does not answer ({why})", fix)]
    listed = slurm.ask("sinfo", "--noheader", "--Node", "--format=%N|%t").stdout
    nodes = dict(line.split("|") for line in listed.split())
    # The signs tell of power saving and planned reservations; a node with * does not answer.
    up = [name for name, state in nodes.items() if state.rstrip("~#!%$@^-") in USABLE]
    if not up:
        message = f"no node can run a job, their states are {', '.join(sorted(set(nodes.values())))}"
        return [Finding("slurm", FAULT, message, "see `sinfo --list-reasons`, tell your admin")]
    version = slurm.ask("scontrol", "--version").stdout.strip()
    return [Finding("slurm", OK, f"{version} answers, {len(up)} of {len(nodes)} node(s) can run jobs")]


def check_environment(site: Site, in_job_too: bool) -> list[Finding]:
    """The job's Python and, read by it, the data; `in_job_too` if a job is going to look again."""
    # It may work on the compute nodes alone, which the job is going to tell.
    level = WARNING if in_job_too else FAULT
    command = ("bash", "-c", ENVIRONMENT, "environment", str(REPOSITORY), IMPORTS, str(site.data_dir))
    done = slurm.ask(*command, seconds=IMPORT_SECONDS)
    told = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if "srun's container" in done.stdout:
        message = "Python and data are seen from inside srun's container only"
        return [Finding("environment", WARNING, message, "see with `doctor.py --job`")]
    if not told:
        # What a command said, and what became of it.
        problem = "; ".join(done.stderr.strip().splitlines()[-2:]) or f"exit code {done.returncode}"
        message = f"the job's Python does not work here: {problem}"
        fix = "mend activate_environment in slurm/site.sh; for the default, .venv: make .venv/ready"
        return [Finding("environment", level, message, fix)]
    python = json.loads(told[0].removeprefix(MARK))
    found = _judge_python(python, level)
    if done.returncode:
        return [*found, fault_of("data", done.stderr.strip().rpartition("\n")[2])]
    return [*found, Finding("data", OK, f"MNIST in {site.data_dir}")]


def _judge_python(python: dict, level: str) -> list[Finding]:
    """What the job's Python can compute on; `level` is that of a fault that the nodes may not have."""
    torch = f"torch {python['version'].partition('+')[0]} for {python['build']}"
    software = ", ".join(filter(None, [python["python"], torch, python["nccl"]]))
    if "unusable" in python:
        unusable = fault_of("gpus", python["unusable"], "see `nvidia-smi` here, ask your admin")
        return [Finding("environment", OK, software), unusable._replace(level=WARNING)]  # no job's GPU
    gpus = "no GPU here, as usual on a login node"
    if python["gpus"]:
        gpus = ", ".join(filter(None, [cards_in_words(python["gpus"]), python["driver"]]))
    found = [Finding("environment", OK, f"{software}; {gpus}")]
    most = slurm.largest_nodes()["GPUs"]
    if python["build"] == "the CPU only" and most and slurm.cluster() != "practice":
        message = f"{torch}, but nodes of this cluster have up to {most} GPUs"
        fix = "install a PyTorch for GPUs: https://pytorch.org/get-started/locally"
        found.append(Finding("gpus", level, message, fix))
    return found


def check_folders(site: Site, several_nodes: bool, in_job_too: bool) -> list[Finding]:
    """Whether what jobs write to can be written to, has room, and may be seen by other nodes."""
    logs = STAGES["ddp"].script.parent
    own = "set SITE_RESULTS_DIR and SITE_SCRATCH_DIR in slurm/site.sh to shared folders of yours"
    folders = {
        site.results_dir: ("results", own),
        site.jobs_dir: ("checkpoints", own),
        logs: ("logs", "put this checkout where you may write"),
    }
    found, local = [], []
    for folder, (what, fix) in folders.items():
        try:
            files.check_writable(folder, what, fix)
            slurm.check_path(folder)
        except UserError as error:
            found.append(fault_of("folders", str(error)))
            continue
        found += check_owner(folder, f"the {what}", "folders")
        free = shutil.disk_usage(folder).free / 1e9
        if free < FREE_GB:
            message = f"{free:.2f} GB free in {folder}"
            fix = "make room, or choose another folder in slurm/site.sh"
            found.append(Finding("folders", WARNING, message, fix))
        if set(slurm.ask("df", "--output=fstype", str(folder)).stdout.split()) & LOCAL:
            local.append(str(folder))
    # In a job the nodes look for each other's files, which tells more than the kind of file system.
    if local and several_nodes and not in_job_too:
        message = f"on a file system that other nodes may not see: {', '.join(local)}"
        fix = "see with `doctor.py --job`; shared folders are set in slurm/site.sh"
        found.append(Finding("folders", WARNING, message, fix))
    message = f"results, checkpoints and logs can be written: {', '.join(map(str, folders))}"
    return found or [Finding("folders", OK, message)]
