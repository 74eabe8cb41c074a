"""The signals that ask a training to stop, and processes that it has forked."""

import multiprocessing
import signal
import time

from manygpus.signals import STOP_SIGNALS, hear_stop


def test_a_process_that_a_training_has_forked_can_be_ended() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    fork = multiprocessing.get_context("fork")
    started = fork.Event()
    try:
        hear_stop(lambda *_: None)
        child = fork.Process(target=lambda: started.set() or time.sleep(600))
        child.start()
        assert started.wait(60)
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM
    finally:
        child.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
