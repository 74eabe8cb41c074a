"""A device that works like a GPU: giving it work does not wait. There is nothing to change here."""

import queue
import threading
import time


class Device:
    """Trains 64 images in 2 milliseconds; the first 20 steps, which load kernels, take five times as long."""

    def __init__(self) -> None:
        self._queue = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def train(self, images: int) -> None:
        """Put a step into the queue, and return at once."""
        self._queue.put(images)

    def synchronize(self) -> None:
        """Wait until all steps are done."""
        self._queue.join()

    def _work(self) -> None:
        done = 0
        while images := self._queue.get():
            time.sleep(0.002 * images / 64 * (5 if done < 20 else 1))
            done += 1
            self._queue.task_done()
