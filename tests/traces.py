"""Sampled jobs to judge: real ones of CPUs, and written ones of what no machine of ours could show.

    python tests/traces.py    write those in results/sample/traces again

The README there tells how the real ones were recorded; those of one GPU are in results/sample/h100/traces.
The written ones are not measured: what an imaginary GPU of 400 W would tell, by what NVIDIA says of NVML
(nvmlDeviceGetPowerUsage, ...GetUtilizationRates: "percent of time over the past sample period during which
one or more kernels was executing", ...GetCurrentClocksEventReasons)
and by what is written of such jobs. Of these only the ones that a page or an exercise shows are committed.
"""

import random
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from conftest import REPOSITORY

from trainkit.record import records, samples

TRACES = REPOSITORY / "results" / "sample" / "traces"
PACKED = TRACES / "cpu.zip"
H100 = REPOSITORY / "results" / "sample" / "h100" / "traces"
BEGAN, START, EVALUATE = 1_790_000_000.0, 6.0, 1.5  # of the written ones: s, since 1970 and of their phases
IDLE_W, LIMIT_W, MEMORY_MB, CLOCK_MHZ, HOST_MB = 55, 400, 40_000, 1_400, 64_000
NAME = f"imaginary GPU, {LIMIT_W} W"
# Of every record; whatever the verdict does not read is what the tutorial has.
FACTS = {"stage": "ddp", "launcher": "srun", "model": "Net", "lr": 1.0, "gamma": 0.7}
FACTS |= {"parameters": 1_199_882, "threads_per_worker": 4, "global_batch": 2_000, "precision": "bf16"}
FACTS |= {"images": 60_000, "test_images": 10_000, "train_loss": 0.1, "test_loss": 0.1, "test_accuracy": 97.0}
FACTS |= {"learning_rate": 1.0, "job_id": "", "torch_version": "none", "cuda_version": "", "git_commit": ""}


@dataclass(frozen=True)
class Gpu:
    """What a GPU, and the rank of its number, do while they train; `own` and `data`: parts of that time."""

    power: float = 290  # W
    utilisation: float = 97  # %
    memory: float = 0.6  # of all
    limit: float = LIMIT_W
    clock: float = 1_380  # MHz
    slowed: tuple[str, float] = ("-", 0)  # why, and in what part of the time
    celsius: float = 62
    ranks: str | None = None  # on it; None: that of its number
    cores: float = 1.0
    waiting: float = 0.01
    loaders: int = 0
    loader_cores: float = 0
    own: float = 0.93
    data: float = 0.03


@dataclass(frozen=True)
class Written:
    """A job of so many `nodes` with these GPUs, and of so many `epochs` of `train` seconds."""

    gpus: list[Gpu]
    ranks: int = 0  # of a node; 0: as many as GPUs
    nodes: int = 1
    network: float = 0.2  # MB/s
    host: float = 0.13  # of the memory
    epochs: int = 3
    train: float = 12
    facts: dict[str, object] = field(default_factory=dict)  # columns of its record

    @property
    def of_a_node(self) -> int:
        return self.ranks or len(self.gpus)


FULL, UNUSED = Gpu(), Gpu(power=IDLE_W, utilisation=0, memory=0.01, ranks="-")
STARVED = Gpu(power=85, utilisation=23, cores=0.4, loaders=2, loader_cores=1.98, own=0.95, data=0.71)
HOT = Gpu(power=190, utilisation=100, clock=840, slowed=("heat", 0.8), celsius=91, own=0.94)
CAPPED = Gpu(power=148, limit=150, clock=690, slowed=("power", 1))
SPREAD_OUT = Gpu(power=115, utilisation=100, own=0.38)
FROM_LOADERS = {"loader": "workers", "workers_per_loader": 2}
WRITTEN = {
    "gpu_no_rank": Written([FULL, FULL, UNUSED], ranks=2),
    # Both compute on the first one, as for CUDA they have the same number; the other has a context only.
    "gpu_idle": Written([Gpu(ranks="0+1", power=330), Gpu(power=IDLE_W + 8, utilisation=0, memory=0.02)]),
    "gpu_memory_full": Written([Gpu(memory=0.985), Gpu(memory=0.97)]),
    "gpu_throttled_by_heat": Written([Gpu(power=175, utilisation=99, own=0.6), HOT]),
    "gpu_throttled_by_cap": Written([CAPPED] * 2),
    "gpu_network_bound": Written([SPREAD_OUT], nodes=2, network=231),
    # The kernels of the others run all the time, and wait in NCCL for those of the last one.
    "gpu_slow_rank": Written(
        [Gpu(power=105, utilisation=100, own=0.33)] * 2 + [Gpu(power=120, utilisation=38, cores=1.6)]
    ),
}
COMMITTED = ("gpu_slow_rank",)
PLACE = tempfile.TemporaryDirectory(prefix="traces-")  # of the others; it goes when the process ends


def folder_of(name: str) -> Path:
    """Where the trace is. One that is packed or not committed is unpacked or written first."""
    if (TRACES / name).exists():
        return TRACES / name
    folder = Path(PLACE.name, name)
    if name in WRITTEN and not folder.exists():
        write(folder, WRITTEN[name])
    elif not folder.exists():
        with zipfile.ZipFile(PACKED) as packed:
            packed.extractall(PLACE.name)
    return folder


def recorded() -> list[Path]:
    """The traces of CPUs, which are measured."""
    with zipfile.ZipFile(PACKED) as packed:
        names = sorted({Path(file).parts[0] for file in packed.namelist()})
    return [*TRACES.glob("cpu_*/"), *map(folder_of, names)]


def write(folder: Path, written: Written) -> None:
    """A trace, in place of what there was."""
    shutil.rmtree(folder, ignore_errors=True)
    chance = random.Random(folder.name)
    nodes = [f"n{place + 1}" for place in range(written.nodes)]
    for place, node in enumerate(nodes):
        energy = [7e6] * len(written.gpus)
        rows = []
        for second in range(int(START + written.epochs * (written.train + EVALUATE)) + 2):
            moment = {"time": BEGAN + second * samples.PERIOD}  # and the row tells of the second before
            rows += [moment | row for row in _rows(written, place, second - 0.5 - START, chance, energy)]
        samples.Writer(folder, node).add(rows)
    _record(folder, written, nodes)


def _rows(
    written: Written, place: int, since: float, chance: random.Random, energy: list[float]
) -> Iterator[dict[str, object]]:
    """Of the node at `place`, so many seconds after the start of the first epoch; counts its `energy`."""
    phase = since % (written.train + EVALUATE)
    training, evaluating = since >= 0 and phase < written.train, since >= 0 and phase >= written.train
    there = since > -2  # is a CUDA context
    ranks = written.of_a_node
    yield {
        "what": samples.NODE,
        "memory_mb": HOST_MB * written.host,
        "memory_limit_mb": HOST_MB,
        "cores": sum(gpu.cores + gpu.loader_cores for gpu in written.gpus[:ranks]),
        "core_list": f"0-{4 * ranks - 1}",
        "network_mb_s": written.network if training else 0.1,
    }
    for number, gpu in enumerate(written.gpus):
        used = gpu.utilisation > 0
        power, utilisation = gpu.power if gpu.ranks != "-" and there else IDLE_W, 0.0
        if training and used:
            power, utilisation = chance.gauss(gpu.power, 3), min(chance.gauss(gpu.utilisation, 1), 100)
        elif evaluating and used:
            power, utilisation = 150, 60
        elif used:
            power = IDLE_W + 8 * there
        power = min(power, gpu.limit)
        energy[number] += power * samples.PERIOD
        slow = training and phase >= written.train * (1 - gpu.slowed[1])
        yield {
            "what": samples.GPU,
            "number": number,
            "name": NAME,
            "memory_mb": MEMORY_MB * gpu.memory if there else 4,
            "memory_limit_mb": MEMORY_MB,
            "ranks": gpu.ranks or str(place * ranks + number) if there else "-",
            "utilisation": round(utilisation),
            "power_w": round(power, 1),
            "power_limit_w": gpu.limit,
            "energy_j": round(energy[number]),
            "clock_mhz": gpu.clock if slow else CLOCK_MHZ if used and there else 210,
            "clock_limit_mhz": CLOCK_MHZ,
            "throttled": gpu.slowed[0] if slow else "-",
            "temperature_c": gpu.celsius if training and used else 38,
        }
    for number, gpu in enumerate(written.gpus[:ranks]):
        yield {
            "what": samples.RANK,
            "number": place * ranks + number,
            "name": "R",
            "memory_mb": HOST_MB * written.host / ranks,
            "cores": gpu.cores if training else 1.0,
            "core_list": f"{4 * number}-{4 * number + 3}",
            "waiting": gpu.waiting,
            "loaders": gpu.loaders,
            "loader_cores": gpu.loader_cores if training else 0.0,
        }


def _record(folder: Path, written: Written, nodes: list[str]) -> None:
    """What its training would have left behind."""
    devices = len(nodes) * written.of_a_node
    facts = FACTS | written.facts | {"device_name": NAME, "node_list": ",".join(nodes)}
    facts["run_id"] = f"{facts['stage']}-written"
    facts |= {"world_size": devices, "devices": devices, "nodes": len(nodes), "started_at": _moment(BEGAN)}
    facts["batch_per_device"] = facts["global_batch"] // devices
    recorder = records.RecordWriter(folder / "training", facts)
    for epoch in range(1, written.epochs + 1):
        seconds = START + epoch * (written.train + EVALUATE)
        of_ranks = [
            {"epoch": epoch, "rank": place * written.of_a_node + number, "host": node}
            | {"device": f"cuda:{number}", "device_name": NAME, "peak_memory_mb": MEMORY_MB * gpu.memory}
            | {"own_seconds": written.train * gpu.own, "data_seconds": written.train * gpu.data}
            for place, node in enumerate(nodes)
            for number, gpu in enumerate(written.gpus[: written.of_a_node])
        ]
        row = {
            "epoch": epoch,
            "steps": facts["images"] // facts["global_batch"],
            "train_seconds": written.train,
            "images_per_s": facts["images"] / written.train,
            "eval_seconds": EVALUATE,
            "peak_memory_mb": max(row["peak_memory_mb"] for row in of_ranks),
            "elapsed_s": seconds,
            "recorded_at": _moment(BEGAN + seconds),
        }
        recorder.add(row, of_ranks)


def _moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"


if __name__ == "__main__":
    for name in COMMITTED:
        write(TRACES / name, WRITTEN[name])
