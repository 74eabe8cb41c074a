"""Run torchrun, with the same options, and forward USR2 and SIGTERM to its ranks.

If Slurm keeps a job's processes in cgroups, it signals those that srun started: torchrun, and not the ranks,
which have to save and stop. torchrun itself dies on USR2, and kills its ranks on SIGTERM. In the ranks these
signals are blocked until the run handles them: a script without a `Run` has to unblock them itself.
"""

import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from trainkit.distributed import launchers as place
from trainkit.distributed import meeting, names
from trainkit.errors import fail
from trainkit.signals import STOP_SIGNALS

PATIENCE = 20  # seconds from SIGTERM on, as Slurm kills after 30


def main() -> None:
    """Run torchrun, and exit as the ranks do."""
    # Blocked, for the thread. The ranks inherit that until they handle them (training/checkpoint.py).
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_hand_on, daemon=True).start()
    sys.argv[1:1] = _by_slurm(sys.argv)
    from torch.distributed import run  # takes seconds, in which a signal may come
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

    try:
        run.main()
    except SignalException as end:  # which the ranks have had, too
        os._exit(128 + end.sigval)
    except (RendezvousConnectionError, socket.gaierror) as error:
        fail(_why_apart(error.__cause__ or error))
    except RendezvousTimeoutError:
        fail(
            "not all torchruns came to --rdzv-endpoint in time: see whether the one of another node has "
            "reported an error; if it was only slow, give more --rdzv-conf=join_timeout (seconds)."
        )


def _why_apart(error: BaseException) -> str:
    """Return why this torchrun could not reach the one that the others connect to, and what to do."""
    endpoint = re.search(r"--rdzv-endpoint[= ](\S+):(\d+)(?!\S)", " ".join(sys.argv))
    # The hostname is asked for in the end (getfqdn), whatever the address is.
    if endpoint is None or not names.addresses(socket.gethostname()) and isinstance(error, socket.gaierror):
        known = names.told(socket.gethostname())
        return f"the torchruns could not meet ({error}; on {place.node()}, {known}): have the names mended."
    master, port = endpoint.groups()
    opens_it = "--rdzv-conf=is_host=1" in sys.argv
    cause = meeting.no_store(master, int(port), opens_it=opens_it, error=error)
    return f"the torchruns could not meet at {master}:{port}: {cause.what}: {cause.fix}."


def _by_slurm(arguments: Sequence[str]) -> list[str]:
    """Return options by which the torchruns of a job find each other, whatever their nodes' hostnames are.

    By itself torchrun compares its hostname with the endpoint, to know whether it is the one that the others
    connect to (`_matches_machine_hostname` in its sources), and tells the ranks the hostname of the first
    (`RendezvousStoreInfo`). But it may not be the name that Slurm has for the node, or, as on Debian, an
    address that means another machine elsewhere.
    """
    number, master = os.environ.get("SLURM_NODEID"), os.environ.get("MASTER_ADDR")
    if number is None or master is None or not any(one.startswith("--rdzv-endpoint") for one in arguments):
        return []
    first = number == "0"
    return [f"--rdzv-conf=is_host={int(first)}", f"--local-addr={master if first else place.node()}"]


def _hand_on() -> None:
    waiting, until, begun = [], float("inf"), False  # signals for ranks that have not started yet
    while True:
        came = signal.sigtimedwait(STOP_SIGNALS, 0.1 if waiting else 3600 if begun else 1)
        # A call that is interrupted when its time is over returns no signal at all (seen: CPython 3.11).
        if came and came.si_signo in STOP_SIGNALS:
            waiting.append(came.si_signo)
            if came.si_signo == signal.SIGTERM:
                until = min(until, time.monotonic() + PATIENCE)
        ranks = []
        with suppress(OSError, psutil.Error):  # one ends just now
            # Importing PyTorch starts programs, too; torchrun gives a session to each rank.
            ranks = [one for one in psutil.Process().children() if os.getsid(one.pid) == one.pid]
        if ranks:
            for rank, number in itertools.product(ranks, waiting):
                # Slurm may have sent USR2 to the rank, too: one that has obeyed would be ended by the second.
                if number == signal.SIGTERM or _outlives(rank.pid, number):
                    with suppress(psutil.NoSuchProcess):
                        rank.send_signal(number)
            waiting, begun = [], True
        elif not begun and time.monotonic() > until:  # torchrun waits for another node
            os._exit(128 + signal.SIGTERM)


def _outlives(pid: int, number: int) -> bool:
    """Return whether a process blocks, ignores or hears a signal. At its end, Python no longer does."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        masks = re.findall(r"^Sig(?:Blk|Ign|Cgt):\s*(\w+)", status, re.MULTILINE)
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return False


if __name__ == "__main__":
    main()
