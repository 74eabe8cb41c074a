"""The `worker_init_fn` of the loaders in the scripts beside this file."""

import multiprocessing
import os
import signal
import threading


def obey_the_trainer(_worker: int) -> None:
    """Let a loader worker end when the training process sends SIGTERM, but not when Slurm does.

    Slurm signals all processes of a job. If a worker ended then, the training would fail before it has saved.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
    trainer = multiprocessing.parent_process().pid

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
