"""The signals that ask a training to save and stop."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

# Slurm sends USR2 before the time limit, as the job scripts ask it to, and SIGTERM before it ends a job.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


def hear_stop(handler: Callable[..., None]) -> None:
    """Call `handler` when a signal says: save and stop.

    Processes that are forked later would inherit the handler, and SIGTERM, by which PyTorch and
    multiprocessing end their worker processes, would no longer end them. So they get the default back.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def unblock_stop_signals() -> None:
    """Let the signals through, which a job blocks until its training can handle them (scripts/job_env.sh)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def hears(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, or blocks it until it has (proc(5), status).

    With a trap for EXIT, Bash catches every signal that would end it, and ends: it hears none of them.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    masks = re.findall(r"^Sig(?:Blk|Cgt):\s*(\w+)", status, re.MULTILINE)
    blocked, caught = (int(mask, 16) for mask in masks)
    is_bash_with_a_trap = caught >> (signal.SIGXCPU - 1) & 1
    return bool((blocked | caught) >> (number - 1) & 1) and not is_bash_with_a_trap


def obey_the_trainer(_worker: int) -> None:
    """In a loader process, end when the training process says so (SIGTERM), but not when Slurm does.

    Slurm signals all processes of a job. A worker that ended by that would end the training, unsaved. Give it
    to a DataLoader as its `worker_init_fn`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    trainer = multiprocessing.parent_process().pid
    if not Path(f"/proc/{trainer}").exists():  # it was killed while this one started
        os._exit(0)

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
            pass
        os._exit(0)

    try:
        threading.Thread(target=wait, daemon=True).start()
    except RuntimeError:  # no more threads may be started
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
