"""How the ranks agree, all after the same step, on what only some of them know."""

import time

import torch

from trainkit.runtime import clock, process_group

# Asking after every step would make each rank wait for the others.
SECONDS_BETWEEN = 1.0


class Agreement:
    """The ranks' meetings: about once a second, on every rank after the same step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps, self._due_after = 0, 1
        self._met_at = time.monotonic()

    def due(self) -> bool:
        """Return whether to meet now; to be called after every step."""
        self._steps += 1
        return self._steps >= self._due_after

    def ask(self, *questions: bool) -> list[bool]:
        """Return for each question whether any rank says yes."""
        clock.wait_for(self._device)  # steps done, not steps queued
        now, due_after = time.monotonic(), 0
        if process_group.is_rank_0():  # its clock decides, so that all ranks meet at the same step again
            steps_per_second = self._steps / (now - self._met_at)
            # At most twice as many as the last time: the first steps tell little about the others.
            due_after = max(1, min(2 * self._due_after, steps_per_second * SECONDS_BETWEEN))
        # The others add 0 to what rank 0 says, so the sum is rank 0's.
        numbers = torch.tensor([*questions, due_after], dtype=torch.float64, device=self._device)
        *answers, due_after = process_group.sum_in_place(numbers).tolist()
        self._steps, self._due_after, self._met_at = 0, int(due_after), now
        return [answer > 0 for answer in answers]
