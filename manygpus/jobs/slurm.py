"""Slurm's commands: run them, interpret their answers, and advise when they refuse.

It needs only the standard library: the doctor asks Slurm before any environment exists.
"""

import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from manygpus import launchers, project
from manygpus.errors import UserError, reason

# A command of Slurm may take so long. Its own limit is mostly 10 seconds per try.
ANSWER_SECONDS = 30
TIMED_OUT_EXIT_CODE = 124
NOT_FOUND_EXIT_CODE = 127

# States of a job, from the man page of squeue. Every other state is that of a running job.
QUEUED = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
)
COMPLETED = "COMPLETED"
PREEMPTED = "PREEMPTED"
OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
# Two of our own: Slurm does not answer, and Slurm has forgotten the job.
UNKNOWN = "UNKNOWN"
GONE = "GONE"
# States of a job that has failed, and what to say of it.
FAILED = {
    "FAILED": "",  # the ranks' notes and logs give the reason
    TIMEOUT: "it reached its time limit: give more --time",
    "CANCELLED": "it was cancelled",
    OUT_OF_MEMORY: "it needed more memory than it had asked for: export SBATCH_MEM_PER_NODE, e.g. as 32G",
    "NODE_FAIL": "one of its nodes failed: submit it again",
    "BOOT_FAIL": "one of its nodes did not boot: submit it again",
    PREEMPTED: "a job of higher priority took its place: submit it again",
    "DEADLINE": "it could not end before its deadline",
    GONE: "Slurm does not know this job (it forgets a job some minutes after its end)",
}
# Reasons for which a job would wait forever, unless an administrator changes the cluster: it asks for more
# than a job may have in its partition, or by its QOS or account, or for less than it has to. Berkeley's Savio
# tells its users of jobs that "will never start but do not give an error message", for the reasons
# QOSMaxWallDurationPerJobLimit, QOSMaxNodePerJobLimit, QOSMinCpuNotSatisfied and QOSMinGRES.
NEVER = re.compile(
    r"Partition(Config|NodeLimit|TimeLimit)|MaxMemPerLimit|(QOS|Assoc)Max\w+PerJob(Limit)?|QOSMin\w+|"
    r"Job's_(QOS|account)_not_permitted_to_use_this_partition.*"
)
# The reason of a job that Slurm has not looked at so far.
NO_REASON = "None"
# A reason for which a job is held until its user releases it: a node could not start it.
LAUNCH_FAILED = "launch_failed_requeued_held"

# What Slurm says when it refuses a job (slurm_errno.c) or never starts it (NEVER), and what to do about
# it; the first pattern found counts. `advice` puts in the name of the site file.
REFUSALS = {
    # From Slurm 26.05; before, where one of the two names a kind of GPU.
    "--gres=gpu are mutually exclusive|with and without type": "ask for GPUs in one way "
    "only, that of SITE_GPUS in {site_file}, such as --gres=gpu:a100:%d: remove SBATCH_GRES from there and "
    "from your shell, and --gres from the command line; or, with sbatch, change the line #SBATCH "
    "--gpus-per-node in the job script",
    "configuration file": "unset SLURM_CONF, or set it to the path of slurm.conf",
    "job array": "give a sweep shorter lists, and the other values in a second sweep with a different --out; "
    "`scontrol show config | grep MaxArraySize` shows what this site allows",
    "accounting/QOS policy": "wait for other jobs of yours to end, or ask for less, in a sweep by shorter "
    "lists, which may be longer with the same --out when those runs have ended; `sacctmgr show qos` and "
    "`sacctmgr show associations user=$USER` show the limits",
    "(QOS|Assoc)M(ax|in)": "ask for no more than your QOS and account allow; `sacctmgr show qos` and "
    "`sacctmgr show associations user=$USER` show the limits",
    # The second is what a site's own plugin may say, which names the option that it wants.
    "mutually exclusive|--(gres|gpus|mem|cpus)": "SITE_GPUS, SITE_CPUS and SITE_MEM in {site_file} "
    "say how this site wants GPUs, cores and memory requested (slurm/SITE.md); leave out options and "
    "SBATCH_* variables of a different form",
    "not_permitted_to_use_this_partition": "set SBATCH_QOS, SBATCH_ACCOUNT or SBATCH_PARTITION in "
    "{site_file}; `scontrol show partition` shows who may use which one",
    "account": "set SBATCH_ACCOUNT in {site_file} to one of yours, which `sacctmgr show associations "
    "user=$USER` lists",
    "partition": "set SBATCH_PARTITION in {site_file}, or sbatch --partition, to one that `sinfo -s` lists",
    "qos": "correct SBATCH_QOS in {site_file}; `sacctmgr show qos` lists them",
    "reservation": "correct SBATCH_RESERVATION in {site_file}; `scontrol show reservation` lists them",
    "feature": "correct SBATCH_CONSTRAINT in {site_file}; `sinfo -o '%N %f'` lists the features",
    "generic resource": "this Slurm has no such GPUs, or requires their type; `sinfo -o '%P %N %G'` shows "
    "what it has, and SITE_GPUS in {site_file} says how to ask for it, such as --gpus-per-node=a100:%d",
    "[Tt]ime ?[Ll]imit": "ask for less --time, or set SBATCH_TIMELIMIT in {site_file} for all jobs; "
    "`sinfo -o '%P %l'` shows the limits",
    "contact": "see if `sinfo` answers, and submit again when it does",
    "PartitionNodeLimit": "ask for a different number of --nodes, or set SBATCH_PARTITION in {site_file}; "
    "`sinfo -o '%P %s'` shows how many a job may have",
    "MaxMemPerLimit": "ask for fewer --gpus on a node, or less memory (export SBATCH_MEM_PER_NODE=4G in "
    "{site_file}); `scontrol show partition` shows the limit",
    "configuration|PartitionConfig|Node ?[Cc]ount|[Mm]emory|CPU count": "ask for fewer "
    "--gpus, --nodes or cores, or less --mem or --time (`sinfo -o '%P %D %s %c %m %G %l'` shows the limits), "
    "or wait for a node that is down (`sinfo -R`) or reserved (`scontrol show reservation`)",
    "": "ask your admin what it means (man sbatch); if this site wants GPUs, cores or memory requested in a "
    "different form, set SITE_GPUS, SITE_CPUS or SITE_MEM in {site_file}",
}
# What sbatch says where its job may be in the queue all the same, as the controller was busy (slurm_errno.c);
# the last is submitit's, where it names no number.
UNCLEAR = (
    "Socket timed out|Zero Bytes were transmitted|Message (receive|send) failure|Unexpected message|"
    "Could not make sense of sbatch output"
)


@dataclass(frozen=True)
class JobStatus:
    """What Slurm says of a job.

    Attributes:
        state: the job's state, in Slurm's word, such as RUNNING; or `UNKNOWN` or `GONE`.
        reason: why it waits, in Slurm's word, such as Priority; of an `UNKNOWN` job, Slurm's message; of a
            job that may start in one of several partitions, with their names, such as Priority_(short,long).
        restarts: how often it has come back to the queue.
    """

    state: str
    reason: str = ""
    restarts: int = 0


@dataclass(frozen=True)
class Trial:
    """What `sbatch --test-only` says of a job.

    Attributes:
        refusal: why Slurm would not take it; "" if it would.
        start: when it would start, by Slurm's estimate, in the cluster's time; None if it is refused.
        preempts: whether it would start in the place of jobs that run.
    """

    refusal: str = ""
    start: datetime | None = None
    preempts: bool = False


@dataclass(frozen=True)
class Wait:
    """How long a job has waited since nothing but the queue was before it."""

    nodes: int
    gpus: int
    seconds: float


def why_not_here() -> str:
    """Return why this machine cannot submit jobs; "" if it can, or the controller is just down."""
    for command in ("sbatch", "srun"):
        if not shutil.which(command):
            return f"{command} is not on PATH"
    fatal = re.search(r"fatal: (.*configuration.*)", ask("scontrol", "ping").stderr)
    return f"sbatch is on PATH, but finds no controller: {fatal[1]}" if fatal else ""


def job_of_this_shell() -> str:
    """Return what a new job does not get, as this shell's own job holds it; "" if it is in none."""
    job_id = os.environ.get("SLURM_JOB_ID")
    if not job_id:
        return ""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    how_to_use_it = "`SLURM_SUBMIT_DIR=$PWD bash slurm_submit.sh`, in the folder of a stage, trains there"
    if launchers.job_id():
        # This is one of its nodes, where a job script cannot call srun.
        how_to_use_it = "--local runs here"
    return (
        f"this shell is in job {job_id}, which holds its part of {nodes}: a new job gets different cores "
        f"and GPUs, or waits until this one ends (exit); {how_to_use_it}"
    )


def ask(
    *command: str, seconds: float = ANSWER_SECONDS, input: str | None = None, **where: object
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; never raise.

    Args:
        seconds: a command that takes longer is ended, with `TIMED_OUT_EXIT_CODE`. A missing one has
            `NOT_FOUND_EXIT_CODE`.
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
        message = f"{command[0]}: no answer after {seconds:.0f} s"
        return subprocess.CompletedProcess(command, TIMED_OUT_EXIT_CODE, stdout="", stderr=message)
    except OSError as error:
        message = f"{command[0]}: {reason(error)}"
        return subprocess.CompletedProcess(command, NOT_FOUND_EXIT_CODE, stdout="", stderr=message)


def tasks_sent_from(folder: Path) -> dict[int, str]:
    """Return the tasks of this user's arrays whose scripts are in `folder`, with the numbers of their arrays.

    Raises:
        UserError: if Slurm does not answer.
    """
    shown = _squeue("--array", "--format=%i %o")
    if shown.returncode:
        raise UserError(f"Slurm does not answer ({shown.stderr.strip()}): try again when `squeue` does.")
    tasks = {}
    for line in shown.stdout.splitlines():
        job_id, _, script = line.strip().partition(" ")
        array, _, task = job_id.partition("_")
        if task and Path(script).parent == folder:
            tasks[int(task)] = array
    return tasks


def queue(form: str) -> list[str]:
    """Return a line in squeue's `form` for each job of this user that waits or runs; none without Slurm."""
    return _squeue(f"--format={form}").stdout.splitlines()


def job_status(job_ids: Sequence[str]) -> dict[str, JobStatus]:
    """Ask Slurm for the status of jobs of this user: its controller once for all of them.

    A job of an array may be called as 17_2, or by its own number.
    Of jobs that it has forgotten, some minutes after their end, accounting is asked, if there is any.
    """
    shown = _squeue(
        "--array",
        "--states=all",
        f"--jobs={','.join(job_ids)}",
        "--Format=JobArrayID:20,JobID:20,State:20,RestartCnt:20,Partition:200,Reason:200",
    )
    # The message is for a single job; of several, those that are forgotten are left out.
    if shown.returncode and "Invalid job id" not in shown.stderr:
        message = shown.stderr.strip().rpartition("\n")[2]
        return dict.fromkeys(job_ids, JobStatus(UNKNOWN, message))
    known = {}
    for line in shown.stdout.splitlines():
        name, number, state, restarts, partitions, why = line.split(maxsplit=5)
        # Some reasons are sentences; scontrol shows them as one word, and so do the pages of Slurm.
        reason_word = why.strip().replace(" ", "_")
        if "," in partitions and reason_word != NO_REASON:
            # It is that of one partition, and the job may start in another (seen: 22.05 to 26.05).
            reason_word += f"_({partitions})"
        known[name] = known[number] = JobStatus(state, reason_word, int(restarts))
    forgotten = [job_id for job_id in job_ids if job_id not in known]
    if forgotten:
        known |= _status_by_accounting(forgotten)
    return known


def _squeue(*options: str) -> subprocess.CompletedProcess[str]:
    """Ask squeue for jobs of this user.

    With --me or a single number the controller sends only those, and not the jobs of everybody. The user's
    SQUEUE_... variables would leave jobs out, or contradict the options.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    return ask("squeue", "--me", "--noheader", *options, env=environment)


def _status_by_accounting(job_ids: Sequence[str]) -> dict[str, JobStatus]:
    """Return how jobs have ended that the controller has forgotten; `GONE` if that is not known.

    Accounting may call a job RUNNING that has ended while slurmdbd, or the controller, was down.
    """
    status = dict.fromkeys(job_ids, JobStatus(GONE))
    shown = ask(
        "sacct",
        f"--jobs={','.join(job_ids)}",
        "--allocations",
        "--noheader",
        "--parsable2",
        "--format=JobID,State",
    )
    for line in shown.stdout.splitlines():
        job_id, _, described = line.partition("|")
        # It may be "CANCELLED by 1000".
        state = described.partition(" ")[0]
        if job_id in status and (state == COMPLETED or state in FAILED):
            status[job_id] = JobStatus(state)
    return status


def test_only(options: Sequence[str], environment: Mapping[str, str], script: str = "#!/bin/sh\n") -> Trial:
    """Ask whether Slurm would take a job, and when it would start it; nothing is submitted.

    Of several partitions Slurm says the start in one, which need not be the first one (seen: 24.11), so a
    partition that is to be compared with others takes a call of its own.
    """
    # The form of a time is the user's choice, too.
    environment = {**environment, "SLURM_TIME_FORMAT": "standard"}
    done = ask("sbatch", "--test-only", *options, input=script, env=environment)
    start = re.search(r"Job \d+ to start at (\d{4}-\d\d-\d\dT[\d:]+)", done.stderr)
    if done.returncode or not start:
        return Trial(refusal=sbatch_message(done.stderr) or f"exit code {done.returncode}")
    return Trial(start=datetime.fromisoformat(start[1]), preempts="Preempts:" in done.stderr)


def waits(days: int) -> list[Wait]:
    """Return how long the jobs of this user have waited that started in the last days, by accounting."""
    done = ask(
        "sacct",
        f"--starttime=now-{days}days",
        "--allocations",
        "--noheader",
        "--parsable2",
        "--format=Eligible,Start,AllocTRES",
        env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
    )
    known = []
    for line in done.stdout.splitlines():
        eligible, start, resources = line.split("|")
        amounts = dict(re.findall(r"([\w/]+)=(\d+)", resources))
        # Of one that waits, or was cancelled before, a time is Unknown or None.
        if eligible[:1].isdigit() and start[:1].isdigit():
            seconds = (datetime.fromisoformat(start) - datetime.fromisoformat(eligible)).total_seconds()
            nodes, gpus = int(amounts.get("node", 0)), int(amounts.get("gres/gpu", 0))
            known.append(Wait(nodes=nodes, gpus=gpus, seconds=seconds))
    return known


def is_unclear(refusal: str) -> bool:
    """Return whether sbatch, which has said this, may have put the job into the queue all the same."""
    return not refusal or re.search(UNCLEAR, refusal) is not None


def never_starts(reason: str) -> bool:
    """Return whether a job that waits for this reason would wait forever, as the cluster is."""
    return NEVER.fullmatch(reason) is not None


def in_minutes(limit: str) -> int | None:
    """Return a time limit of Slurm in minutes, rounded up; None if it is no number of them, as UNLIMITED.

    Its forms are those of sbatch --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes and days-hours:minutes:seconds.
    """
    parts = re.fullmatch(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", limit)
    if not parts:
        return None
    first, second, third = (int(parts[name] or 0) for name in ("first", "second", "third"))
    if parts["days"] is None and parts["third"] is None:
        return first + math.ceil(second / 60)
    days = int(parts["days"] or 0)
    return (days * 24 + first) * 60 + second + math.ceil(third / 60)


def seconds(text: str) -> int | None:
    """Return a duration in Slurm's words, such as 1-02:03:04; None if it is none, such as UNLIMITED."""
    duration = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not duration:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in duration.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def time_in_words(seconds: float) -> str:
    """Return a time as "75 s", "12 min", "3.5 h" or "2.5 days"."""
    hours = seconds / 3600
    if seconds < 120:
        return f"{seconds:.0f} s"
    if hours < 2:
        return f"{seconds / 60:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def number_of_nodes(record: Mapping[str, str]) -> int | None:
    """Return how many nodes a job has, by the fields of its record; None if they do not say it."""
    number = re.match(r"\d+", record.get("NumNodes", ""))
    return int(number[0]) if number else None


def fields(shown: str) -> dict[str, str]:
    """Return the fields of an answer of `scontrol --oneliner show job` (or partition) by their names.

    The first field of a name counts: the user's command line, which is one of the last, may look like others.
    """
    values: dict[str, str] = {}
    for name, value in re.findall(r"(\w+)=(\S*)", shown):
        values.setdefault(name, value)
    return values


def array_element(shown: str) -> str:
    """Return what squeue and scancel call a job of an array, such as 17_2; "" if it is of none.

    One of them has the number of the array, by which scancel ends all.

    Args:
        shown: the answer of `scontrol --oneliner show job`.
    """
    job_fields = fields(shown)
    if "ArrayTaskId" not in job_fields:
        return ""
    return f"{job_fields['ArrayJobId']}_{job_fields['ArrayTaskId']}"


def cluster() -> str:
    """Return the cluster's name; empty if Slurm does not name it."""
    configuration = ask("scontrol", "show", "config").stdout
    name = re.search(r"^ClusterName\s*= (\S+)", configuration, re.MULTILINE)
    return name[1] if name else ""


def default_partition() -> str | None:
    """Return the default partition; None if there is none, or Slurm does not answer."""
    names = ask("sinfo", "--noheader", "--format=%P").stdout.split()
    for name in names:
        if name.endswith("*"):
            return name.rstrip("*")
    return None


def most_gpus(partition: str | None = None) -> int:
    """Return the largest number of GPUs on a node, of a partition or of all; 0 if unknown."""
    command = ["sinfo", "--noheader", "--format=%G"]
    if partition:
        command.append(f"--partition={partition}")
    resources_of_nodes = ask(*command).stdout.split()
    return max((gpus_by_kind(gres).total() for gres in resources_of_nodes), default=0)


def sbatch_message(text: str) -> str:
    """Return what sbatch says on stderr, without the prefixes that name sbatch."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("Try ")]
    prefixes = r"^(\S*sbatch: |error: |allocation failure: |Batch job submission failed: )*"
    return "; ".join(dict.fromkeys(re.sub(prefixes, "", line) for line in lines))


def advice(refusal: str) -> str:
    """Return advice on a refusal by sbatch, its text in `refusal`, or on a reason that `NEVER` matches."""
    # The last pattern matches every text.
    fix = next(fix for pattern, fix in REFUSALS.items() if re.search(pattern, refusal))
    return fix.replace("{site_file}", project.site_name())


def gpus_by_kind(gres: str) -> Counter[str]:
    """Count a node's GPUs by their kinds, which may have no name.

    Args:
        gres: Slurm's "gpu:2", "gpu:a100:2(S:0),gpu:v100:2" or "(null)".
    """
    kinds: Counter[str] = Counter()
    for kind, count in re.findall(r"\bgpu(?::([^:,(]+))?(?::[^:,(]+)*:(\d+)", gres):
        kinds[kind] += int(count)
    return kinds
