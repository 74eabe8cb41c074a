"""Slurm's commands: run them, interpret their answers, and advise when they refuse.

It needs only the standard library: the doctor asks Slurm before any environment exists.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainkit.distributed import launchers as place
from trainkit.errors import reason

ANSWER_SECONDS = 30  # for a command of Slurm; its own limit is mostly 10 s per try

# States of a job, from the man page of squeue, and our own: GONE. Every other state is that of a running job.
QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
FAILED = {
    "FAILED": "",  # the ranks' notes and logs give the reason
    "TIMEOUT": "it reached its time limit: give more --time",
    "CANCELLED": "it was cancelled",
    "OUT_OF_MEMORY": "it needed more memory than it had asked for: export SBATCH_MEM_PER_NODE, e.g. as 32G",
    "NODE_FAIL": "a node of it failed: submit it again",
    "BOOT_FAIL": "a node of it did not boot: submit it again",
    "PREEMPTED": "a job of higher priority took its place: submit it again",
    "DEADLINE": "it could not end before its deadline",
    "GONE": "Slurm does not know this job (it forgets a job some minutes after its end)",
}
# Reasons for which a job would wait forever, unless an administrator changes the cluster.
NEVER = ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit")

# What Slurm says when it refuses a job (slurm_errno.c) or never starts it (NEVER), and what to do about
# it; the first pattern found counts.
REFUSALS = {
    # From Slurm 26.05; before, where one of the two names a kind of GPU.
    "--gres=gpu are mutually exclusive|with and without type": "ask for GPUs in one way, which SITE_GPUS in "
    "slurm/site.sh tells, such as --gres=gpu:a100:%d: take SBATCH_GRES out of there and of your shell, and "
    "--gres off the command line; or, for sbatch, change the line #SBATCH --gpus-per-node of the job script",
    "configuration file": "unset SLURM_CONF, or have it name Slurm's file",
    "accounting/QOS policy": "wait for other jobs of yours to end, or ask for less; `sacctmgr show qos` and "
    "`sacctmgr show associations user=$USER` show the limits",
    # The second is what a site's own plugin may say, which names the option that it wants.
    "mutually exclusive|--(gres|gpus|mem|cpus)": "SITE_GPUS, SITE_CPUS and SITE_MEM in slurm/site.sh tell "
    "how this site wants to be asked for GPUs, cores and memory (slurm/README.md); leave out options and "
    "SBATCH_... variables of another form",
    "account": "set SBATCH_ACCOUNT in slurm/site.sh to one of yours, which `sacctmgr show associations "
    "user=$USER` lists",
    "partition": "set SBATCH_PARTITION in slurm/site.sh, or sbatch --partition, to one that `sinfo -s` lists",
    "qos": "correct SBATCH_QOS in slurm/site.sh; `sacctmgr show qos` lists them",
    "reservation": "correct SBATCH_RESERVATION in slurm/site.sh; `scontrol show reservation` lists them",
    "feature": "correct SBATCH_CONSTRAINT in slurm/site.sh; `sinfo -o '%N %f'` lists the features",
    "generic resource": "this Slurm has no such GPUs, or wants their kind; `sinfo -o '%P %N %G'` shows what "
    "it has, and SITE_GPUS in slurm/site.sh tells how to ask for it, such as --gpus-per-node=a100:%d",
    "[Tt]ime ?[Ll]imit": "ask for less --time, or always, by SBATCH_TIMELIMIT in slurm/site.sh; "
    "`sinfo -o '%P %l'` shows the limits",
    "contact": "see if `sinfo` answers, and submit again when it does",
    "configuration|PartitionConfig|Node ?[Cc]ount|PartitionNodeLimit|[Mm]emory|CPU count": "ask for fewer "
    "--gpus, --nodes or cores, or less --mem or --time (`sinfo -o '%P %D %s %c %m %G %l'` shows the limits), "
    "or wait for a node that is down: `sinfo -R`",
    "": "ask your admin what it means (man sbatch); where GPUs, cores or memory are to be asked for in other "
    "words, set SITE_GPUS, SITE_CPUS or SITE_MEM in slurm/site.sh",
}
# What sbatch says where its job may be in the queue all the same, as the controller was busy (slurm_errno.c);
# the last is submitit's, where it names no number.
UNCLEAR = (
    "Socket timed out|Zero Bytes were transmitted|Message (receive|send) failure|Unexpected message|"
    "Could not make sense of sbatch output"
)
QUEUE_SECONDS = 20  # until such a job is in the queue, if it is to be there


def why_not_here() -> str:
    """Return why this machine cannot submit jobs; "" if it can, or the controller is just down."""
    if missing := [command for command in ("sbatch", "srun") if not shutil.which(command)]:
        return f"{missing[0]} is not on PATH"
    fatal = re.search(r"fatal: (.*configuration.*)", ask("scontrol", "ping").stderr)
    return f"sbatch is on PATH, but knows no controller: {fatal[1]}" if fatal else ""


def job_of_this_shell() -> str:
    """Return what a new job does not get, as this shell's own job holds it; "" if it is in none."""
    number, nodes = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if not number:
        return ""
    in_it = "`SLURM_SUBMIT_DIR=$PWD bash slurm_submit.sh`, in the folder of a stage, trains there"
    if place.job_id():  # on a node, where a job script cannot call srun
        in_it = "--local runs here"
    return (
        f"this shell is in job {number}, which holds its part of {nodes}: a new job gets other cores and "
        f"GPUs, or waits until that one ends (exit); {in_it}"
    )


def ask(
    *command: str, seconds: float = ANSWER_SECONDS, input: str | None = None, **where: object
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; never raise.

    Args:
        seconds: a command that takes longer is ended, with exit code 124. A missing one has 127.
        input: its standard input.
        where: `cwd` and `env`, as for `subprocess.run`.
    """
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
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {reason(error)}")


def sent_from(folder: Path, seconds: float = 0) -> str:
    """Return the number of this user's job whose script is in `folder`, once it is queued; "" if it is not.

    Args:
        folder: where only one job has its script.
        seconds: how long to look for it.
    """
    until = time.monotonic() + seconds
    while True:
        for line in ask("squeue", "--me", "--noheader", "--format=%i %o").stdout.splitlines():
            number, _, script = line.strip().partition(" ")
            if Path(script).parent == folder:
                return number
        if time.monotonic() >= until:
            return ""
        time.sleep(1)


def job_facts(job_id: str) -> dict[str, str]:
    """Ask `scontrol show job` for facts such as JobState, Reason, ExitCode, NodeList and Restarts.

    While Slurm does not answer that, JobState is UNKNOWN and Reason its message. For a job that it has
    forgotten there is only JobState, from accounting if there is any, else GONE.
    """
    shown = ask("scontrol", "--oneliner", "show", "job", job_id)
    if shown.returncode == 0:
        unknown = {"JobState": "UNKNOWN", "Reason": "its answer names no state"}
        return unknown | fields(shown.stdout)
    if "Invalid job id" not in shown.stderr:
        return {"JobState": "UNKNOWN", "Reason": shown.stderr.strip().rpartition("\n")[2]}
    ended = ask("sacct", f"--jobs={job_id}", "--allocations", "--noheader", "--format=State%20")
    return {"JobState": (ended.stdout.split() or ["GONE"])[0]}


def fields(shown: str) -> dict[str, str]:
    """Return the fields of an answer of `scontrol --oneliner show job` by their names.

    The first field of a name counts: the user's command line, which is one of the last, may look like others.
    """
    found: dict[str, str] = {}
    for name, value in re.findall(r"(\w+)=(\S*)", shown):
        found.setdefault(name, value)
    return found


def cluster() -> str:
    """Return the cluster's name; empty if Slurm does not name it."""
    found = re.search(r"^ClusterName\s*= (\S+)", ask("scontrol", "show", "config").stdout, re.MULTILINE)
    return found[1] if found else ""


def default_partition() -> str | None:
    """Return the default partition; None if there is none, or Slurm does not answer."""
    names = ask("sinfo", "--noheader", "--format=%P").stdout.split()
    return next((name.rstrip("*") for name in names if name.endswith("*")), None)


def most_gpus(partition: str | None = None) -> int:
    """Return the largest number of GPUs on a node, of a partition or of all; 0 if unknown."""
    chosen = [f"--partition={partition}"] if partition else []
    return max(map(_gpus, ask("sinfo", "--noheader", "--format=%G", *chosen).stdout.split()), default=0)


def numbers(text: str) -> Iterator[int]:
    """Yield the numbers of ranks or cores in a list such as 0,2-4; what is no number is left out."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        with suppress(ValueError):
            yield from range(int(first), int(last or first) + 1)


def sbatch_message(text: str) -> str:
    """Return what sbatch says on stderr, without the prefixes that name sbatch."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("Try ")]
    empty = r"^(\S*sbatch: |error: |allocation failure: |Batch job submission failed: )*"
    return "; ".join(dict.fromkeys(re.sub(empty, "", line) for line in lines))


def advice(refusal: str) -> str:
    """Return advice on a refusal by sbatch, its text in `refusal`, or on one of the reasons in `NEVER`."""
    return next(fix for words, fix in REFUSALS.items() if re.search(words, refusal))


def _gpus(gres: str) -> int:
    """Count a node's GPUs from Slurm's "gpu:2", "gpu:a100:2(S:0),gpu:v100:2" (two kinds: 4) or "(null)"."""
    return sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)*:(\d+)", gres)))
