"""A signal that asks a training to save and stop, on which all ranks act after the same step."""

from time import monotonic

import torch

from manygpus.devices import wait_for
from manygpus.distributed import process_group
from manygpus.signals import hear_stop, unblock_stop_signals

# The ranks meet about so often: after every step, each would wait for the others.
SECONDS_BETWEEN_MEETINGS = 1.0


class Agreement:
    """The ranks' meetings: about once a second, on every rank after the same step.

    Every rank creates one, calls `is_due` after each step, and `ask` when it is due.

    Args:
        device: the device that the rank trains on, and whose steps have to be done at a meeting.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0  # since the last meeting
        self._due_after_steps = 1
        self._met_at = monotonic()

    def is_due(self) -> bool:
        """Count a step, and return whether to meet after it."""
        self._steps += 1
        return self._steps >= self._due_after_steps

    def ask(self, *questions: bool) -> list[bool]:
        """Return for each question whether any rank says yes; every rank calls it, with as many questions."""
        # What counts are steps that are done, not those that are queued on a GPU.
        wait_for(self._device)
        now = monotonic()
        due_after_steps = 0.0
        if process_group.is_rank_0():
            # Its clock decides, so that all ranks meet after the same step again.
            steps_per_second = self._steps / (now - self._met_at)
            # At most twice as many as the last time: the first steps say little about the others.
            due_after_steps = max(
                1, min(2 * self._due_after_steps, steps_per_second * SECONDS_BETWEEN_MEETINGS)
            )
        # The others add 0 to rank 0's number of steps, so that the sum is rank 0's.
        numbers = torch.tensor([*questions, due_after_steps], dtype=torch.float64, device=self._device)
        *answers, due_after_steps = process_group.sum_in_place(numbers).tolist()
        self._steps = 0
        self._due_after_steps = int(due_after_steps)
        self._met_at = now
        return [answer > 0 for answer in answers]


class StopSignal:
    """Notes whether a signal asked this process to save and stop: from its creation on, USR2 or SIGTERM.

    They then do not end the process.
    """

    _was_sent = False  # to this process, whichever of its loops hears it

    def __init__(self) -> None:
        hear_stop(_note_signal)
        unblock_stop_signals()

    @property
    def was_sent(self) -> bool:
        """Return whether this process got the signal; other ranks may have got none, or not yet."""
        return StopSignal._was_sent


def _note_signal(*_: object) -> None:
    StopSignal._was_sent = True
