"""Check a job's ranks before any training: every rank measures, and reports each finding at once.

    srun ... python -m trainkit.doctor.checkup --data-dir DIR --results-dir DIR

`slurm/doctor.py --job` runs this instead of the training script. A rank prints each finding as one line of
JSON, so its findings are reported even if it hangs or dies later. For the same reason nothing is
imported before it is needed, and nothing waits without a limit.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from trainkit import files, job_folder
from trainkit.config.command_line import Parser
from trainkit.distributed import names
from trainkit.distributed.launchers import node
from trainkit.errors import UserError, entrypoint, first_line
from trainkit.jobs.site import SHARED_FOLDERS_FIX

OK, WARNING, FAULT = "ok", "warning", "fault"
# The prefix of every line for the doctor.
MARK = "checkup "
# The name of a file that shows whether a folder is shared.
NOTE = ".doctor-{job}-{node}"
# The limit of a step. CUDA and NCCL may need minutes to start on eight idle GPUs (without persistence mode),
# and the ranks then reach the group minutes apart.
STEP_SECONDS = 180
# What to do about an error that does not say so itself.
FIXES = {
    "folders": SHARED_FOLDERS_FIX,
    "software": "have activate_environment in slurm/site.sh choose one environment that every node sees",
    "gpus": "look at `nvidia-smi` on that node, and report it to your admin",
    "group": "fix the faults in ranks and names first; then try SITE_NETWORK_INTERFACE or NCCL_DEBUG=INFO",
    "all-reduce": "do not train there, and tell your admin; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 may help",
}
TO_THE_ADMIN = "report it to your admin"
# Until other nodes see a new file. NFS caches listings for a while.
NOTES_SECONDS = 15
# srun cuts the ranks' lines at 1,024 bytes.
MOST_OF_AN_ERROR_CHARACTERS = 500


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        check: its name.
        level: `OK`, `WARNING` or `FAULT`.
        message: what was seen.
        fix: what to do, if anything.
        node: the node that has seen it; None for the login node.
        rank: the rank that has seen it, if it is not the whole node's.
    """

    check: str
    level: str
    message: str
    fix: str = ""
    node: str | None = None
    rank: int | None = None


def has_fault(findings: Iterable[Finding]) -> bool:
    return any(finding.level == FAULT for finding in findings)


def fault_from(check: str, error: str, fix: str = "") -> Finding:
    """Turn an error's text into a fault; `fix` is for an error that does not say what to do.

    A `UserError` mostly does: "what is wrong (why): what to do".
    """
    message, _, own_fix = error.removeprefix("error: ").partition("): ")
    if own_fix:
        return Finding(check, FAULT, f"{message})", own_fix)
    return Finding(check, FAULT, message, fix)


def for_the_cpu_only(most_gpus: int) -> Finding:
    """Return the fault of a PyTorch that cannot use the GPUs of the cluster's nodes."""
    message = f"PyTorch is for the CPU only, but nodes of this cluster have up to {most_gpus} GPUs"
    return Finding(
        "gpus", FAULT, message, "install a PyTorch for GPUs: https://pytorch.org/get-started/locally"
    )


def read_messages(log: str) -> Iterator[dict]:
    """Yield the messages in a job's log; skip other lines, and those that are cut short."""
    for text in re.findall(MARK + r'(\{"rank": .*)', log):
        with suppress(ValueError):
            yield json.loads(text)


def findings_in(messages: Iterable[dict]) -> list[Finding]:
    return [Finding(**message["finding"]) for message in messages if "finding" in message]


@entrypoint
def main() -> None:
    """Measure, and report. The exit code is 0 whatever it finds."""
    parser = Parser(prog="python -m trainkit.doctor.checkup", description="Started by slurm/doctor.py.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--results-dir", type=Path, required=True)
    parser.add_argument(
        "--only-torch",
        action="store_true",
        help="for scripts that do not use the kit: check neither its data nor the packages of its trainings",
    )
    options = parser.parse_args()
    if "SLURM_STEP_NUM_TASKS" not in os.environ:
        raise UserError("the checkup runs in a job: start it with `python slurm/doctor.py --job`.")
    world_size = int(os.environ["SLURM_STEP_NUM_TASKS"])
    nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
    tasks_of_a_node = max(world_size // nodes, 1)
    folders = {"results": options.results_dir, "job": job_folder.here()}

    send(size=world_size, folder=str(folders["job"]))
    _step("cores", _cores)
    may_meet = _step("names", _names)
    if _speaks_for_its_node():
        _step("folders", _leave_notes, folders)

    def software() -> Iterable[Finding]:
        # What a rank imports.
        from trainkit.doctor import checkup_torch

        return checkup_torch.software(of_the_kit=not options.only_torch)

    if not _step("software", software):
        _end()
    from trainkit.doctor import checkup_torch

    may_meet &= _step("gpus", checkup_torch.gpus, tasks_of_a_node if _speaks_for_its_node() else None)
    if _speaks_for_its_node():
        if not options.only_torch:
            _step("data", checkup_torch.mnist, options.data_dir)
        _step("folders", _look_for_notes, folders, nodes)
    if may_meet and _step("group", checkup_torch.join):
        _step("all-reduce", checkup_torch.all_reduce, nodes)
    _end()


def send(**facts: object) -> None:
    """Print a line for the doctor, in one write."""
    line = MARK + json.dumps({"rank": int(os.environ.get("SLURM_PROCID", 0)), **facts})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _end() -> NoReturn:
    send(ended=True)
    job_folder.note("finished")
    # Python's normal exit could hang, or abort, in the threads of a group that failed to form.
    os._exit(0)


def _speaks_for_its_node() -> bool:
    """Return whether this rank does what one rank of each node does."""
    return os.environ["SLURM_LOCALID"] == "0"


def _step(step: str, check: Callable[..., Iterable[Finding]], *arguments: object) -> bool:
    """Report what `check` finds, or that it failed, or took too long, which ends this rank.

    Return whether there is no fault. Only one rank of a node reports success.
    """

    fix = FIXES.get(step, TO_THE_ADMIN)

    def report(finding: Finding) -> None:
        rank = None if finding.level == OK else int(os.environ["SLURM_PROCID"])
        send(finding=finding._replace(node=node(), rank=rank)._asdict())

    def give_up() -> None:
        report(Finding(step, FAULT, f"not finished after {STEP_SECONDS} s", fix))
        # The main thread hangs.
        _end()

    send(begun=step)
    watch = threading.Timer(STEP_SECONDS, give_up)
    watch.daemon = True
    watch.start()
    try:
        findings = list(check(*arguments))
    except Exception as error:
        # The doctor reports it, of whatever kind it is.
        text = first_line(error) or repr(error)
        findings = [fault_from(step, text[:MOST_OF_AN_ERROR_CHARACTERS], fix)]
    watch.cancel()
    reported = [finding for finding in findings if finding.level != OK]
    if not reported and _speaks_for_its_node():
        reported = findings
    for finding in reported:
        report(finding)
    return not has_fault(findings)


def _cores() -> Iterator[Finding]:
    """Check that this rank has the CPUs that it asked for."""
    asked = int(os.environ.get("SLURM_CPUS_PER_TASK", 1))
    usable = len(os.sched_getaffinity(0))
    if usable < asked:
        message = f"asked for {asked} cores, but may run on only {usable}"
        fix = "give srun --cpus-per-task, too (Slurm 22.05 to 23.02), and no --cpu-bind that pins all ranks"
        yield Finding("cores", FAULT if usable == 1 else WARNING, message, fix)
    yield Finding("cores", OK, f"{min(asked, usable)} per rank")


def _names() -> Iterator[Finding]:
    """Check that the names by which the ranks find each other mean the right nodes here."""
    master = os.environ["MASTER_ADDR"]
    problem = names.problem(master, gloo=False)
    if problem:
        yield Finding("names", FAULT, *problem)
        return
    several_nodes = os.environ["SLURM_STEP_NUM_NODES"] != "1"
    problem = names.problem(master, gloo=True) if several_nodes else None
    if problem:
        yield Finding("names", WARNING, *problem)
        return
    yield Finding("names", OK, f"resolves the master, {master}")


def _leave_notes(folders: dict[str, Path]) -> list[Finding]:
    """Leave a file in each shared folder, for the other nodes to see; the doctor removes it."""
    for name, folder in folders.items():
        files.check_writable(folder, f"the {name} folder's files", FIXES["folders"])
        (folder / NOTE.format(job=os.environ["SLURM_JOB_ID"], node=node())).touch()
    return []


def _look_for_notes(folders: dict[str, Path], nodes: int) -> Iterator[Finding]:
    pattern = NOTE.format(job=os.environ["SLURM_JOB_ID"], node="*")
    deadline = time.monotonic() + NOTES_SECONDS
    for name, folder in folders.items():
        # By listing, since opening a folder makes NFS ask its server again.
        seen = len(list(folder.glob(pattern)))
        while seen < nodes and time.monotonic() < deadline:
            time.sleep(0.5)
            seen = len(list(folder.glob(pattern)))
        if seen < nodes:
            message = f"sees the files of {seen} of {nodes} nodes in the {name} folder: it is not shared"
            yield Finding("folders", FAULT, message, FIXES["folders"])
    yield Finding(
        "folders", OK, "can write to the results and job folders, and sees the files of the other nodes"
    )


def in_words(number_of_bytes: int) -> str:
    """Format a size such as 4 MB."""
    if number_of_bytes < 2**20:
        return f"{number_of_bytes // 2**10} KB"
    return f"{number_of_bytes // 2**20} MB"


if __name__ == "__main__":
    main()
