"""One device against two, from the CSVs in runs/ next to this file."""

import csv
from pathlib import Path
from statistics import median

# The global batch on one device, and on two.
STRONG = (128, 128)
WEAK = (128, 256)


def images_per_s(epochs: list[dict]) -> float:
    """Return the median of the epochs that count. Each has `warmup`, 0 or 1, and `images_per_s`."""
    return median(epoch["images_per_s"] for epoch in epochs if not epoch["warmup"])


def total_s(epochs: list[dict]) -> float:
    """Return the seconds of the whole run, with tests. Each epoch has `elapsed_s`, the clock at its end."""
    return epochs[-1]["elapsed_s"]


def speedup(one: float, two: float) -> float:
    """Return the speedup from the images/s of one device and of two."""
    return two / one


def efficiency(one: float, two: float, devices: int) -> float:
    """Return the share of what `devices` would do at best."""
    return two / one / devices


def runs() -> dict[tuple[int, int], list[dict]]:
    """Return the epochs of every run, by (devices, global batch)."""
    found = {}
    for path in sorted(Path(__file__).with_name("runs").glob("*.csv")):
        with path.open() as file:
            epochs = [{name: number(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
        found.setdefault((epochs[0]["devices"], epochs[0]["global_batch"]), []).extend(epochs)
    return found


def number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def main() -> None:
    found = runs()
    missing = sorted({(devices, batch) for devices in (1, 2) for batch in (128, 256)} - set(found))
    if missing:
        raise SystemExit(f"in runs/ there is none yet of (devices, batch) {missing}")
    print("devices  batch  images/s  total s  accuracy %")
    for (devices, batch), epochs in sorted(found.items()):
        last = epochs[-1]["test_accuracy"]
        speed, total = images_per_s(epochs), total_s(epochs)
        print(f"{devices:7.0f}  {batch:5.0f}  {speed:8,.0f}  {total:7.1f}  {last:10.2f}")
    print("\n        one -> two  speedup  efficiency  total time is shorter by")
    for name, (batch, batch_on_two) in {"strong": STRONG, "weak": WEAK}.items():
        one, two = found[1, batch], found[2, batch_on_two]
        x, y, shorter = images_per_s(one), images_per_s(two), total_s(one) / total_s(two)
        pair = f"{batch} -> {batch_on_two}"
        print(f"{name:6}  {pair:>10}  {speedup(x, y):7.2f}  {efficiency(x, y, 2):10.0%}  {shorter:.2f} times")


if __name__ == "__main__":
    main()
