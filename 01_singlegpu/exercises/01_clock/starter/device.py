"""A device that works like a GPU: Python gives it work without waiting. There is nothing to change here."""

import queue
import threading
import time


class Device:
    """Trains on 64 images in 2 milliseconds. The first 20 steps load kernels, and take five times as long."""

    def __init__(self) -> None:
        self._queue = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def train(self, images: int) -> None:
        """Put a step into the queue, and return at once."""
        self._queue.put(images)

    def synchronize(self) -> None:
        """Wait until all steps are done, as `torch.cuda.synchronize()` does."""
        self._queue.join()

    def event(self) -> "Event":
        """Return a new mark for the queue, as `torch.cuda.Event(enable_timing=True)` does."""
        return Event(self._queue)

    def _work(self) -> None:
        done = 0
        while task := self._queue.get():
            if isinstance(task, Event):
                task.reached_at = time.perf_counter()
            else:
                time.sleep(0.002 * task / 64 * (5 if done < 20 else 1))
                done += 1
            self._queue.task_done()


class Event:
    """A mark in the queue of a device, which notes when the device reaches it."""

    def __init__(self, tasks: queue.Queue) -> None:
        self._tasks = tasks
        self.reached_at = 0.0

    def record(self) -> None:
        """Put the mark into the queue, after the steps that are there."""
        self._tasks.put(self)

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this mark to a later one, once the device has reached both."""
        return 1000 * (end.reached_at - self.reached_at)
