"""The signals that ask a training to save and stop."""

import os
import signal
from collections.abc import Callable

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
    """Let the signals through, which a job blocks until its training can handle them (slurm/job_env.sh)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
