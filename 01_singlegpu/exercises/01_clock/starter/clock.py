"""How many images per second does the device train on? The answer is wrong for two reasons."""

import statistics
import time

from device import Device

EPOCHS = 4
STEPS = 20
BATCH = 64


def images_per_second(device, clock=time.perf_counter) -> float:
    speeds = []
    for _ in range(EPOCHS):
        start = clock()
        for _ in range(STEPS):
            device.train(BATCH)
        seconds = clock() - start
        speeds.append(STEPS * BATCH / seconds)
    return statistics.mean(speeds)


if __name__ == "__main__":
    print(f"{images_per_second(Device()):,.0f} images/s")
