"""What a check of the doctor finds, and the lines by which ranks report it from a job's log.

It needs the standard library only: a login node may have no more.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from manygpus import project
from manygpus.jobs.site import shared_folders_fix

OK, WARNING, FAULT = "ok", "warning", "fault"
# The prefix of every line for the doctor.
MARK = "checkup "
# The limit of a step. CUDA and NCCL may need minutes to start on eight idle GPUs (without persistence mode),
# and the ranks then reach the group minutes apart.
STEP_SECONDS = 180


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


def fix_of(check: str) -> str:
    """Return what to do about an error in a check, if the error does not say so itself."""
    site_file = project.site_name()
    fixes = {
        "folders": shared_folders_fix(),
        "software": f"have activate_environment in {site_file} choose one environment for all nodes",
        "gpus": "look at `nvidia-smi` on that node, and report it to your admin",
        "group": "fix the faults in ranks and names first; then try SITE_NETWORK_INTERFACE or "
        "NCCL_DEBUG=INFO",
        "all-reduce": "do not train there, and tell your admin; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 "
        "may help",
    }
    return fixes.get(check, "report it to your admin")


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


def send(**facts: object) -> None:
    """Print a line for the doctor, in one write."""
    line = MARK + json.dumps({"rank": int(os.environ.get("SLURM_PROCID", 0)), **facts})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def size_in_words(number_of_bytes: int) -> str:
    """Format a size such as 4 MB."""
    if number_of_bytes < 2**20:
        return f"{number_of_bytes // 2**10} KB"
    return f"{number_of_bytes // 2**20} MB"
