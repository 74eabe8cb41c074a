"""How many images per second does the device train?"""

import statistics
import time

from device import Device

EPOCHS, STEPS, BATCH = 4, 20, 64


def images_per_second(device, clock=time.perf_counter) -> float:
    speeds = []
    for _ in range(EPOCHS):
        start = clock()
        for _ in range(STEPS):
            device.train(BATCH)
        device.synchronize()
        seconds = clock() - start
        speeds.append(STEPS * BATCH / seconds)
    return statistics.median(speeds[1:])


if __name__ == "__main__":
    print(f"{images_per_second(Device()):,.0f} images/s")
