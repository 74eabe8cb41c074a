"""Gives the learner's clock a device whose time is computed, so that the true answer is known."""

from trainkit.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# Too high or too low: what is the number of clock.py before you repair it?
prediction = high
"""
HINTS = """\
## 1

Print `seconds` of every epoch. How long do 20 steps of 2 milliseconds take, and how long did the clock see?

## 2

What must have happened before the clock may be read? `Device` has a method for it. And look at the first
epoch: does it say anything about the others?

## 3

`torch.cuda.synchronize()` is called `device.synchronize()` here. Call it before the clock is read, once per
epoch, not once per step. Leave `speeds[0]` out.
"""
SOLUTION = {
    "clock.py": '''\
@@
-"""How many images per second does the device train? The answer is wrong for two reasons."""
+"""How many images per second does the device train?"""
@@
+        device.synchronize()
         seconds = clock() - start
@@
-    return statistics.mean(speeds)
+    return statistics.median(speeds[1:])
''',
}
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "= high", "= low", "Run the starter once more"),
    ("clock.py", "        device.synchronize()\n", "", "stops while the device still works"),
    ("clock.py", "        device.sync", "            device.sync", "after every step"),
    ("clock.py", "median(speeds[1:])", "mean(speeds)", "first epoch"),
    ("clock.py", "statistics.median(", "max(", "the luckiest"),
    ("clock.py", "        seconds = clock()", "        seconds = -clock()", "negative"),
]  # fmt: skip
LAUNCH, WORK, WARMUP = 0.0002, 0.002, 5  # seconds to queue a step and to do it; how much slower at first


class Device:
    """Counts its seconds in place of working."""

    def __init__(self, warm: bool = False, lucky: float = 1) -> None:
        self.now = self.done = 0.0
        self.steps, self.lucky = 20 * warm, lucky  # the third epoch takes so much of its usual time

    def train(self, images: int) -> None:
        self.now += LAUNCH
        self.done = max(self.now, self.done) + WORK * images / 64 * {0: WARMUP, 2: self.lucky}.get(
            self.steps // 20, 1
        )
        self.steps += 1

    def synchronize(self) -> None:
        self.now = max(self.now, self.done)

    def clock(self) -> float:
        return self.now


def check(mine: Workspace) -> str:
    prediction = mine.answers().word("prediction", "high", "low")
    measure = mine.module("clock.py").images_per_second
    warm, cold = Device(warm=True), Device()
    without_warmup, with_warmup = measure(warm, warm.clock), measure(cold, cold.clock)
    true = 64 * 20 / (20 * WORK + LAUNCH)
    if without_warmup < 0:
        raise Wrong("The speed is negative: the seconds are the end minus the start.")
    if without_warmup > 1.5 * true:
        raise Wrong(
            f"The clock stops while the device still works: it says {without_warmup:,.0f} images/s of a "
            f"device that does {true:,.0f}. It sees how fast Python fills the queue."
        )
    if is_close(without_warmup, 64 / (LAUNCH + WORK), 0.01):
        raise Wrong(
            "The device is waited for after every step. So its queue is always empty, and each step also "
            "pays for being queued. Wait once per epoch."
        )
    if not is_close(without_warmup, true, 0.01):
        raise Wrong(f"The clock says {without_warmup:,.0f} images/s of a device that does {true:,.0f}.")
    if not is_close(with_warmup, true, 0.01):
        raise Wrong(
            f"The mean has the first epoch in it, which loads kernels: {with_warmup:,.0f} images/s in place "
            f"of {true:,.0f}."
        )
    lucky = Device(lucky=0.9)
    if not is_close(measure(lucky, lucky.clock), true, 0.05):
        raise Wrong(
            "Of a device that was faster in one of its epochs you report the luckiest one. Take the median: "
            "no single epoch changes it much."
        )
    if prediction == "low":
        raise Wrong(
            "The clock is right now, the prediction is not. Run the starter once more: is its number above "
            "or below 32,000?"
        )
    return (
        "The starter's number was far too high: it timed the filling of the queue. The warm-up alone would "
        "have made it too low. Every images/s of this tutorial waits for the device and leaves the first "
        "epoch out: see trainkit/runtime/clock.py."
    )
