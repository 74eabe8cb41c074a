"""One device against two, from the CSVs in runs/ next to this file. Six gaps `...`."""

import csv
from pathlib import Path
from statistics import median

# The global batch on one device, and on two.
STRONG = (128, ...)
WEAK = (128, ...)


def images_per_s(epochs: list[dict]) -> float:
    """Return the median of the epochs that count. Each has `warmup`, 0 or 1, and `images_per_s`."""
    return median(...)


def total_s(epochs: list[dict]) -> float:
    """Return the seconds of the whole run, with tests. Each epoch has `elapsed_s`, the clock at its end."""
    return ...


def speedup(one: float, two: float) -> float:
    """Return the speedup from the images/s of one device and of two."""
    return ...


def efficiency(one: float, two: float, devices: int) -> float:
    """Return the speedup as a share of the best possible one on `devices`."""
    return ...


def runs() -> dict[tuple[int, int], list[dict]]:
    """Return the epochs of every run, by (devices, global batch)."""
    epochs_of = {}
    for path in sorted(Path(__file__).with_name("runs").glob("*.csv")):
        with path.open() as file:
            epochs = [{name: number(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
        epochs_of.setdefault((epochs[0]["devices"], epochs[0]["global_batch"]), []).extend(epochs)
    return epochs_of


def number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def main() -> None:
    epochs_of = runs()
    missing = sorted({(devices, batch) for devices in (1, 2) for batch in (128, 256)} - set(epochs_of))
    if missing:
        raise SystemExit(f"runs/ has no run yet with (devices, batch) {missing}")
    print("devices  batch  images/s  total s  accuracy %")
    for (devices, batch), epochs in sorted(epochs_of.items()):
        last = epochs[-1]["test_accuracy"]
        speed = images_per_s(epochs)
        total = total_s(epochs)
        print(f"{devices:7.0f}  {batch:5.0f}  {speed:8,.0f}  {total:7.1f}  {last:10.2f}")
    print("\n        one -> two  speedup  efficiency  total time is shorter by")
    for name, (batch, batch_on_two) in {"strong": STRONG, "weak": WEAK}.items():
        one = epochs_of[1, batch]
        two = epochs_of[2, batch_on_two]
        speed_of_one = images_per_s(one)
        speed_of_two = images_per_s(two)
        pair = f"{batch} -> {batch_on_two}"
        times_as_fast = speedup(speed_of_one, speed_of_two)
        share = efficiency(speed_of_one, speed_of_two, 2)
        shorter = total_s(one) / total_s(two)
        print(f"{name:6}  {pair:>10}  {times_as_fast:7.2f}  {share:10.0%}  {shorter:.2f} times")


if __name__ == "__main__":
    main()
