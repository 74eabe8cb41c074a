"""Run torchrun, with a rank for each GPU of a job's node, and forward USR2 and SIGTERM to its ranks.

Without --nproc-per-node, the number of ranks is that of the GPUs that Slurm gives this node. All other
options are torchrun's.

If Slurm keeps a job's processes in cgroups, it signals those that srun started: torchrun, and not the ranks,
which have to save and stop. torchrun itself dies on USR2, and kills its ranks on SIGTERM. In the ranks these
signals are blocked until the run handles them: a script without a `Run` has to unblock them itself.
"""

import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import psutil

from manygpus import launchers
from manygpus.distributed import host_names, meeting_problems
from manygpus.errors import print_line
from manygpus.signals import STOP_SIGNALS, hears

# From SIGTERM on, for ranks to start that can answer it: Slurm kills after 30 seconds.
PATIENCE_SECONDS = 20
# How long to wait for the next signal: while signals wait for ranks to start; before the ranks have started;
# and afterwards, when there is nothing else to look at.
LOOK_FOR_RANKS_SECONDS = 0.1
BEFORE_RANKS_SECONDS = 1
WITH_RANKS_SECONDS = 3600

ranks_have_started = threading.Event()


def main() -> None:
    """Run torchrun, and exit as the ranks do."""
    # Blocked, so that the thread gets them. The ranks inherit that until they handle them (signals.py).
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_forward_signals, daemon=True).start()
    try:
        launchers.check_variables_of_srun()  # without them, each node would have one rank
    except ValueError as error:
        _fail(str(error))
    sys.argv[1:1] = [*_options_of_the_job(sys.argv), *_a_rank_per_gpu(sys.argv)]
    # When the torchrun of another node has ended, after a rank of its own, this one would print a page of C++
    # frames every 5 seconds. Importing PyTorch reads the variable, which is not for the ranks.
    ranks_variables = dict(os.environ)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import run  # takes seconds, in which a signal may come
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

    os.environ.clear()
    os.environ.update(ranks_variables)
    try:
        run.main()
    except SignalException as end:  # which the ranks have had, too
        os._exit(128 + end.sigval)
    except (RendezvousConnectionError, socket.gaierror) as error:
        if ranks_have_started.is_set():
            _fail("the torchrun of the first node has ended: if one of its ranks failed, that is the reason.")
        _fail(_why_not_met(error.__cause__ or error))
    except RendezvousTimeoutError:
        _fail(
            "not all torchruns came to --rdzv-endpoint in time: see whether the one of another node has "
            "reported an error; if it was only slow, give more --rdzv-conf=join_timeout (seconds)."
        )


def _fail(text: str) -> NoReturn:
    """End this process with an error, without the note of a rank: it is none, though srun has numbered it."""
    print_line(f"\nerror: {text}", sys.stderr)
    os._exit(1)


def _why_not_met(error: BaseException) -> str:
    """Return why this torchrun could not reach the one that the others connect to, and what to do."""
    endpoint = re.search(r"--rdzv-endpoint[= ](\S+):(\d+)(?!\S)", " ".join(sys.argv))
    hostname = socket.gethostname()
    # torchrun asks for the hostname in the end (getfqdn), whatever the address is.
    hostname_unknown = isinstance(error, socket.gaierror) and not host_names.addresses(hostname)
    if endpoint is None or hostname_unknown:
        where = f"on {launchers.node()}, {host_names.with_addresses(hostname)}"
        return f"the torchruns could not meet ({error}; {where}): have the names mended."
    master, port = endpoint.groups()
    opens_it = "--rdzv-conf=is_host=1" in sys.argv
    cause = meeting_problems.no_store(master, int(port), opens_it=opens_it, error=error)
    return f"the torchruns could not meet at {master}:{port}: {cause.what}: {cause.fix}."


def _options_of_the_job(arguments: Sequence[str]) -> list[str]:
    """Return options by which the torchruns of a job find each other, whatever their nodes' hostnames are.

    By itself torchrun compares its hostname with the endpoint, to know whether it is the one that the others
    connect to (`_matches_machine_hostname` in its sources), and tells the ranks the hostname of the first
    (`RendezvousStoreInfo`). But it may not be the name that Slurm has for the node, or, as on Debian, an
    address that means another machine elsewhere.

    The first is the one whose --local-addr comes first in the alphabet (`_mark_rendezvous_complete`), and
    nobody uses what the others say. So all begin with the address at which the job meets, the only one that
    is known to work, and go on with the number of their node. (Seen: a node that Slurm calls n2, a name that
    has no address, came before the first one, which was to be met at z1.)
    """
    node_number = os.environ.get("SLURM_NODEID")
    master = os.environ.get("MASTER_ADDR")
    has_endpoint = any(argument.startswith("--rdzv-endpoint") for argument in arguments)
    if node_number is None or master is None or not has_endpoint:
        return []
    if node_number == "0":
        return ["--rdzv-conf=is_host=1", f"--local-addr={master}"]
    return ["--rdzv-conf=is_host=0", f"--local-addr={master} node {int(node_number):06} {launchers.node()}"]


def _a_rank_per_gpu(arguments: Sequence[str]) -> list[str]:
    """Return the option by which torchrun starts a rank for each GPU that Slurm gives this node.

    Nodes may differ, as two of a job with --gpus=3. The ranks share the threads of their one task.
    """
    is_given = any(re.match("--nproc[-_]per[-_]node", argument) for argument in arguments)
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if is_given or not gpus.isdecimal() or int(gpus) == 0:
        return []
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():
        os.environ["OMP_NUM_THREADS"] = str(max(int(threads) // int(gpus), 1))
    return [f"--nproc-per-node={gpus}"]


def _forward_signals() -> None:
    """Send what comes to the ranks, and keep it for them until they have started.

    End this process if it has got SIGTERM, and no rank starts, as when torchrun waits for another node.
    """
    pending: list[int] = []
    deadline = math.inf
    while True:
        number = _next_signal(_seconds_to_wait(pending))
        if number is not None:
            pending.append(number)
        if number == signal.SIGTERM:
            deadline = min(deadline, time.monotonic() + PATIENCE_SECONDS)
        ranks = _ranks()
        if ranks:
            for rank in ranks:
                for number in pending:
                    _send(rank, number)
            pending = []
            ranks_have_started.set()
        elif not ranks_have_started.is_set() and time.monotonic() > deadline:
            os._exit(128 + signal.SIGTERM)


def _seconds_to_wait(pending: Sequence[int]) -> float:
    if pending:
        return LOOK_FOR_RANKS_SECONDS
    return WITH_RANKS_SECONDS if ranks_have_started.is_set() else BEFORE_RANKS_SECONDS


def _next_signal(timeout: float) -> int | None:
    """Return the next signal that stops a training; None if there was none within `timeout` seconds."""
    received = signal.sigtimedwait(STOP_SIGNALS, timeout)
    # A call that is interrupted when its time is over returns no signal at all (seen: CPython 3.11).
    if received is None or received.si_signo not in STOP_SIGNALS:
        return None
    return received.si_signo


def _ranks() -> list[psutil.Process]:
    """List the ranks that have started: torchrun gives a session to each.

    Importing PyTorch starts programs, too, which stay in torchrun's session.
    """
    with suppress(OSError, psutil.Error):  # one ends just now
        children = psutil.Process().children()
        return [child for child in children if os.getsid(child.pid) == child.pid]
    return []


def _send(rank: psutil.Process, number: int) -> None:
    """Send a signal, but no USR2 that would end the rank: Slurm may have sent it one that it has obeyed.

    At its end, Python no longer hears it.
    """
    if number == signal.SIGTERM or hears(rank.pid, number):
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


if __name__ == "__main__":
    main()
