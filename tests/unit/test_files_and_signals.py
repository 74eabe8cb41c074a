"""Locks of other users, and processes that a training has forked."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from trainkit.errors import UserError
from trainkit.files import locked
from trainkit.signals import STOP_SIGNALS, hear_stop


def test_a_lock_of_another_user(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch(mode=0o444)
    me = os.geteuid()
    os.seteuid(me or 65534)
    try:
        with pytest.raises(UserError, match="is another user's: give a folder of your own"):
            locked(tmp_path / ".lock", "held")
    finally:
        os.seteuid(me)


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
