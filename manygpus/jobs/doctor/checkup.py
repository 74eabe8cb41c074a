"""Check a job's ranks before any training: every rank measures, and reports each finding at once.

    srun ... python -m manygpus.jobs.doctor.checkup --data-dir DIR --results-dir DIR

`slurm/doctor.py --job` runs this instead of the training script. A rank prints each finding as one line of
JSON, so its findings are reported even if it hangs or dies later. For the same reason nothing is
imported before it is needed, and nothing waits without a limit.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from manygpus import files, job_folder
from manygpus.config.command_line import Parser
from manygpus.distributed import host_names
from manygpus.errors import UserError, entrypoint, first_line
from manygpus.jobs.doctor.findings import (
    FAULT,
    OK,
    STEP_SECONDS,
    WARNING,
    Finding,
    fault_from,
    fix_of,
    has_fault,
    send,
)
from manygpus.launchers import node

# The name of a file that shows whether a folder is shared.
NOTE = ".doctor-{job}-{node}"
# Until other nodes see a new file. NFS caches listings for a while.
NOTES_SECONDS = 15
# srun cuts the ranks' lines at 1,024 bytes.
MOST_OF_AN_ERROR_CHARACTERS = 500


@entrypoint
def main() -> None:
    """Measure, and report. The exit code is 0 whatever it finds."""
    parser = Parser(prog="python -m manygpus.jobs.doctor.checkup", description="Started by slurm/doctor.py.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--results-dir", type=Path, required=True)
    parser.add_argument(
        "--only-torch",
        action="store_true",
        help="for scripts that do not use the kit: check neither its data nor the packages of its trainings",
    )
    options = parser.parse_args()
    if "SLURM_STEP_NUM_TASKS" not in os.environ:
        raise UserError("the checkup runs in a job: start it with `manygpus doctor --job`.")
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
        from manygpus.jobs.doctor import checkup_torch

        return checkup_torch.software(trains_with_kit=not options.only_torch)

    if not _step("software", software):
        _end()
    from manygpus.jobs.doctor import checkup_torch

    may_meet &= _step("gpus", checkup_torch.gpus, tasks_of_a_node if _speaks_for_its_node() else None)
    if _speaks_for_its_node():
        if not options.only_torch:
            _step("data", checkup_torch.mnist, options.data_dir)
        _step("folders", _look_for_notes, folders, nodes)
    if may_meet and _step("group", checkup_torch.join):
        _step("all-reduce", checkup_torch.all_reduce, nodes)
    _end()


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

    fix = fix_of(step)

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
    problem = host_names.problem(master, gloo=False)
    if problem:
        yield Finding("names", FAULT, *problem)
        return
    several_nodes = os.environ["SLURM_STEP_NUM_NODES"] != "1"
    problem = host_names.problem(master, gloo=True) if several_nodes else None
    if problem:
        yield Finding("names", WARNING, *problem)
        return
    yield Finding("names", OK, f"resolves the master, {master}")


def _leave_notes(folders: dict[str, Path]) -> list[Finding]:
    """Leave a file in each shared folder, for the other nodes to see; the doctor removes it."""
    for name, folder in folders.items():
        files.check_writable(folder, f"the {name} folder's files", fix_of("folders"))
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
            yield Finding("folders", FAULT, message, fix_of("folders"))
    yield Finding(
        "folders", OK, "can write to the results and job folders, and sees the files of the other nodes"
    )


if __name__ == "__main__":
    main()
