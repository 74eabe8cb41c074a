"""Gives the learner's clock a device whose time is computed, so that the true answer is known."""

from manygpus.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# Before you repair clock.py: is the number that it prints too high or too low?
prediction = high
"""
HINTS = """\
## 1

Print the `seconds` of every epoch. How long do 20 steps of 2 milliseconds take, and how long did they take
according to the clock?

## 2

What has to happen before you read the clock? `Device` has a method for it. Then look at the first epoch:
does its speed say anything about the others?

## 3

Call `device.synchronize()` before the clock is read for the second time: once per epoch, not once per step.
Leave out `speeds[0]`, and take the median of the others.
"""
SOLUTION = {
    "clock.py": '''\
@@
-"""How many images per second does the device train on? The answer is wrong for two reasons."""
+"""How many images per second does the device train on?"""
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
    ("clock.py", "        device.synchronize()\n", "", "stops while the device is still working"),
    ("clock.py", "        device.sync", "            device.sync", "after every step"),
    ("clock.py", "median(speeds[1:])", "mean(speeds)", "first epoch"),
    ("clock.py", "statistics.median(", "max(", "which no single epoch"),
    ("clock.py", "statistics.median(", "min(", "which no single epoch"),
    ("clock.py", "statistics.median(speeds[1:])", "speeds[-1]", "which no single epoch"),
    ("clock.py", "        seconds = clock()", "        seconds = -clock()", "negative"),
]  # fmt: skip
LAUNCH_SECONDS = 0.0002  # to queue a step
WORK_SECONDS = 0.002  # to do it
WARMUP_FACTOR = 5  # how many times as long the steps of the first epoch take


class Device:
    """Computes the seconds that it would work, and does no work."""

    def __init__(self, warm: bool = False, odd: dict[int, float] | None = None) -> None:
        self.now = self.done = 0.0
        self.steps = 20 * warm
        self.shares = {0: WARMUP_FACTOR} | (odd or {})  # which epoch takes how much of its usual time

    def train(self, images: int) -> None:
        self.now += LAUNCH_SECONDS
        share = self.shares.get(self.steps // 20, 1)
        self.done = max(self.now, self.done) + WORK_SECONDS * images / 64 * share
        self.steps += 1

    def synchronize(self) -> None:
        self.now = max(self.now, self.done)

    def event(self) -> "Event":
        return Event(self)

    def clock(self) -> float:
        return self.now


class Event:
    """Computes when the device comes to it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.reached_at = 0.0

    def record(self) -> None:
        self.reached_at = max(self.device.now, self.device.done)

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.reached_at - self.reached_at)


def check(workspace: Workspace) -> str:
    prediction = workspace.answers().word("prediction", "high", "low")
    measure = workspace.module("clock.py").images_per_second
    warm = Device(warm=True)
    cold = Device()
    without_warmup = measure(warm, warm.clock)
    with_warmup = measure(cold, cold.clock)
    true = 64 * 20 / (20 * WORK_SECONDS + LAUNCH_SECONDS)
    if without_warmup < 0:
        raise Wrong("The speed is negative: subtract the start from the end, not the end from the start.")
    if without_warmup > 1.5 * true:
        raise Wrong(
            f"The clock stops while the device is still working: it shows {without_warmup:,.0f} images/s for "
            f"a device that trains on {true:,.0f}. It measures how fast Python fills the queue."
        )
    if is_close(without_warmup, 64 / (LAUNCH_SECONDS + WORK_SECONDS), 0.01):
        raise Wrong(
            "Your program waits for the device after every step. The queue is then always empty, and the "
            "time to queue a step is added to every step. Wait once per epoch."
        )
    if not is_close(without_warmup, true, 0.01):
        raise Wrong(
            f"The clock shows {without_warmup:,.0f} images/s for a device that trains on {true:,.0f}."
        )
    if not is_close(with_warmup, true, 0.01):
        raise Wrong(
            f"The mean includes the first epoch, which loads kernels: {with_warmup:,.0f} images/s instead of "
            f"{true:,.0f}."
        )
    for odd in ({1: 0.9}, {2: 0.9}, {3: 0.9}, {2: 1.1}):
        device = Device(odd=odd)
        if not is_close(measure(device, device.clock), true, 0.05):
            change = "faster" if min(odd.values()) < 1 else "slower"
            raise Wrong(
                f"The device was {change} in one of its epochs, and you report that epoch. Take the median, "
                "which no single epoch changes much."
            )
    if prediction == "low":
        raise Wrong(
            "The clock is right now, but the prediction is not. Run the starter once more: is its number "
            "above or below 32,000?"
        )
    return (
        "The starter's number was far too high, because it timed how fast the queue was filled. The warm-up "
        "alone would have made it too low. For every images/s in this course, the clock waits for the "
        "device, and the first epoch is left out: see manygpus/training/clock.py."
    )
