"""Sampled jobs to judge: real ones of CPUs, and synthetic ones of what no machine of ours could show.

    python tools/traces.py    write the synthetic ones in results/sample/traces again

The README there tells how the real ones were recorded; those of one GPU are in results/sample/h100/traces.
The synthetic ones are not measured: what an imaginary GPU of 400 W would tell, by what NVIDIA says of NVML
(nvmlDeviceGetPowerUsage, ...GetUtilizationRates: "percent of time over the past sample period during which
one or more kernels was executing", ...GetCurrentClocksEventReasons) and by what is written of such jobs.
Of these only the ones that a page or an exercise shows are committed.
"""

import random
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from manygpus.monitor import samples
from manygpus.record import records

REPOSITORY = Path(__file__).resolve().parents[1]
TRACES = REPOSITORY / "results" / "sample" / "traces"
PACKED = TRACES / "cpu.zip"
H100 = REPOSITORY / "results" / "sample" / "h100" / "traces"

# The phases of a synthetic job: seconds, the first since 1970.
BEGAN_AT_SECONDS = 1_790_000_000.0
LOADING_SECONDS = 6.0
EVALUATION_SECONDS = 1.5
CONTEXT_SECONDS = 2  # before the first epoch a rank makes its CUDA context

# The imaginary GPU, and its node.
GPU_NAME = "imaginary GPU, 400 W"
IDLE_W = 55
CONTEXT_W = 8  # more than when idle, with a CUDA context and no work
EVALUATION_W = 150
LIMIT_W = 400
MEMORY_MB = 40_000
IDLE_MEMORY_MB = 4
CLOCK_MHZ = 1_400
IDLE_CLOCK_MHZ = 210
IDLE_CELSIUS = 38
HOST_MEMORY_MB = 64_000
CORES_OF_A_RANK = 4
FIRST_ENERGY_J = 7e6  # the counter of a GPU does not begin at 0

# What every record says; whatever the verdict does not read is what the tutorial has.
FACTS: dict[str, object] = {
    "stage": "ddp",
    "launcher": "srun",
    "model": "Net",
    "lr": 1.0,
    "gamma": 0.7,
    "parameters": 1_199_882,
    "threads_per_worker": 4,
    "global_batch": 2_000,
    "precision": "bf16",
    "images": 60_000,
    "test_images": 10_000,
    "train_loss": 0.1,
    "test_loss": 0.1,
    "test_accuracy": 97.0,
    "learning_rate": 1.0,
    "job_id": "",
    "torch_version": "none",
    "cuda_version": "",
    "git_commit": "",
}
FROM_LOADERS: dict[str, object] = {"loader": "workers", "workers_per_loader": 2}


class Throttling(NamedTuple):
    """Why a GPU's clock is low, as the column `throttled` says it, and for what share of the training."""

    reason: str = "-"
    share: float = 0


@dataclass(frozen=True)
class Gpu:
    """What a GPU does, and the rank of its number, while they train. Shares are from 0 to 1."""

    power_w: float = 290
    utilisation: float = 97  # %
    memory_share: float = 0.6
    power_limit_w: float = LIMIT_W
    clock_mhz: float = 1_380
    throttling: Throttling = field(default_factory=Throttling)
    celsius: float = 62
    ranks: str | None = None  # with a process on this GPU; None: the one of its number
    cores: float = 1.0
    waiting_share: float = 0.01  # of the time, for a core
    loaders: int = 0
    loader_cores: float = 0
    own_share: float = 0.93  # of the training time, that the rank worked itself
    data_share: float = 0.03  # of the training time, that it waited for batches within that


@dataclass(frozen=True)
class SyntheticJob:
    """A job whose nodes have these GPUs each, and the training that it ran."""

    gpus: list[Gpu]
    ranks: int = 0  # of a node; 0: as many as GPUs
    nodes: int = 1
    network_mb_s: float = 0.2
    host_memory_share: float = 0.13
    epochs: int = 3
    train_seconds: float = 12  # of an epoch
    facts: dict[str, object] = field(default_factory=dict)  # columns of its record

    @property
    def ranks_per_node(self) -> int:
        return self.ranks or len(self.gpus)

    @property
    def epoch_seconds(self) -> float:
        return self.train_seconds + EVALUATION_SECONDS


FULL = Gpu()
UNUSED = Gpu(power_w=IDLE_W, utilisation=0, memory_share=0.01, ranks="-")
STARVED = Gpu(
    power_w=85, utilisation=23, cores=0.4, loaders=2, loader_cores=1.98, own_share=0.95, data_share=0.71
)
HOT = Gpu(
    power_w=190,
    utilisation=100,
    clock_mhz=840,
    throttling=Throttling("heat", 0.8),
    celsius=91,
    own_share=0.94,
)
CAPPED = Gpu(power_w=148, power_limit_w=150, clock_mhz=690, throttling=Throttling("power", 1))
SPREAD_OUT = Gpu(power_w=115, utilisation=100, own_share=0.38)
# Its kernels run all the time, and wait in NCCL for those of a slower rank.
WAITS_IN_NCCL = Gpu(power_w=105, utilisation=100, own_share=0.33)
SYNTHETIC = {
    "gpu_no_rank": SyntheticJob([FULL, FULL, UNUSED], ranks=2),
    # Both ranks compute on the first GPU, which has the same number for both; the other has a context only.
    "gpu_idle": SyntheticJob(
        [
            Gpu(ranks="0+1", power_w=330),
            Gpu(power_w=IDLE_W + CONTEXT_W, utilisation=0, memory_share=0.02),
        ]
    ),
    "gpu_memory_full": SyntheticJob([Gpu(memory_share=0.985), Gpu(memory_share=0.97)]),
    "gpu_throttled_by_heat": SyntheticJob([Gpu(power_w=175, utilisation=99, own_share=0.6), HOT]),
    "gpu_throttled_by_cap": SyntheticJob([CAPPED, CAPPED]),
    "gpu_network_bound": SyntheticJob([SPREAD_OUT], nodes=2, network_mb_s=231),
    "gpu_slow_rank": SyntheticJob(
        [WAITS_IN_NCCL, WAITS_IN_NCCL, Gpu(power_w=120, utilisation=38, cores=1.6)]
    ),
}
COMMITTED = ("gpu_slow_rank",)
# Where the others are while the process lives.
UNPACKED = tempfile.TemporaryDirectory(prefix="traces-")


def folder_of(name: str) -> Path:
    """Return the folder of a trace. One that is packed is unpacked first, one not committed is written."""
    if (TRACES / name).exists():
        return TRACES / name
    folder = Path(UNPACKED.name, name)
    if folder.exists():
        return folder
    if name in SYNTHETIC:
        write(folder, SYNTHETIC[name])
        return folder
    with zipfile.ZipFile(PACKED) as packed:
        packed.extractall(UNPACKED.name)
    return folder


def recorded() -> list[Path]:
    """Return the folders of the traces of CPUs, which are measured."""
    with zipfile.ZipFile(PACKED) as packed:
        names = sorted({Path(file).parts[0] for file in packed.namelist()})
    return [*TRACES.glob("cpu_*/"), *map(folder_of, names)]


def write(folder: Path, job: SyntheticJob) -> None:
    """Write the samples of a job, and the record of its training, in place of what there was."""
    shutil.rmtree(folder, ignore_errors=True)
    chance = random.Random(folder.name)
    seconds = int(LOADING_SECONDS + job.epochs * job.epoch_seconds) + 2
    for node_index in range(job.nodes):
        node = _Node(job, node_index, chance)
        rows = []
        for second in range(seconds):
            time = BEGAN_AT_SECONDS + second * samples.PERIOD_SECONDS
            # A row tells of the second before it.
            moment = _Moment.of(job, since_first_epoch=second - 0.5 - LOADING_SECONDS)
            rows += [{"time": time} | row for row in node.rows(moment)]
        samples.Writer(folder, _node_name(node_index)).add(rows)
    _write_record(folder, job)


class _Moment(NamedTuple):
    """What a job does at a moment."""

    has_context: bool  # of CUDA
    is_training: bool
    is_evaluating: bool
    seconds_in_epoch: float

    @classmethod
    def of(cls, job: SyntheticJob, since_first_epoch: float) -> "_Moment":
        began = since_first_epoch >= 0
        in_epoch = since_first_epoch % job.epoch_seconds
        return cls(
            has_context=since_first_epoch > -CONTEXT_SECONDS,
            is_training=began and in_epoch < job.train_seconds,
            is_evaluating=began and in_epoch >= job.train_seconds,
            seconds_in_epoch=in_epoch,
        )


class _Node:
    """A node of a job, with the counters of energy of its GPUs."""

    def __init__(self, job: SyntheticJob, index: int, chance: random.Random) -> None:
        self._job = job
        self._first_rank = index * job.ranks_per_node
        self._chance = chance
        self._energy_j = [FIRST_ENERGY_J for _ in job.gpus]

    def rows(self, moment: _Moment) -> Iterator[dict[str, object]]:
        """Yield the rows of a moment, and count its energy."""
        gpus_of_ranks = self._job.gpus[: self._job.ranks_per_node]
        yield self._node_row(gpus_of_ranks, moment)
        for number, gpu in enumerate(self._job.gpus):
            yield self._gpu_row(number, gpu, moment)
        for number, gpu in enumerate(gpus_of_ranks):
            yield self._rank_row(number, gpu, moment)

    def _node_row(self, gpus_of_ranks: list[Gpu], moment: _Moment) -> dict[str, object]:
        return {
            "what": samples.NODE,
            "memory_mb": HOST_MEMORY_MB * self._job.host_memory_share,
            "memory_limit_mb": HOST_MEMORY_MB,
            "cores": sum(gpu.cores + gpu.loader_cores for gpu in gpus_of_ranks),
            "core_list": f"0-{CORES_OF_A_RANK * self._job.ranks_per_node - 1}",
            "network_mb_s": self._job.network_mb_s if moment.is_training else 0.1,
        }

    def _gpu_row(self, number: int, gpu: Gpu, moment: _Moment) -> dict[str, object]:
        is_used = gpu.utilisation > 0
        power_w, utilisation = self._load(gpu, moment)
        power_w = min(power_w, gpu.power_limit_w)
        self._energy_j[number] += power_w * samples.PERIOD_SECONDS
        fast_seconds = self._job.train_seconds * (1 - gpu.throttling.share)
        is_slow = moment.is_training and moment.seconds_in_epoch >= fast_seconds
        clock_mhz = IDLE_CLOCK_MHZ
        if is_slow:
            clock_mhz = gpu.clock_mhz
        elif is_used and moment.has_context:
            clock_mhz = CLOCK_MHZ
        ranks = "-"
        if moment.has_context:
            ranks = gpu.ranks or str(self._first_rank + number)
        return {
            "what": samples.GPU,
            "number": number,
            "name": GPU_NAME,
            "memory_mb": MEMORY_MB * gpu.memory_share if moment.has_context else IDLE_MEMORY_MB,
            "memory_limit_mb": MEMORY_MB,
            "ranks": ranks,
            "utilisation": round(utilisation),
            "power_w": round(power_w, 1),
            "power_limit_w": gpu.power_limit_w,
            "energy_j": round(self._energy_j[number]),
            "clock_mhz": clock_mhz,
            "clock_limit_mhz": CLOCK_MHZ,
            "throttled": gpu.throttling.reason if is_slow else "-",
            "temperature_c": gpu.celsius if moment.is_training and is_used else IDLE_CELSIUS,
        }

    def _load(self, gpu: Gpu, moment: _Moment) -> tuple[float, float]:
        """Return the power of a GPU in W, and its utilisation in %."""
        if gpu.utilisation > 0:
            if moment.is_training:
                power_w = self._chance.gauss(gpu.power_w, 3)
                utilisation = self._chance.gauss(gpu.utilisation, 1)
                return power_w, min(utilisation, 100)
            if moment.is_evaluating:
                return EVALUATION_W, 60
            return IDLE_W + CONTEXT_W * moment.has_context, 0
        has_rank = gpu.ranks != "-" and moment.has_context
        return (gpu.power_w if has_rank else IDLE_W), 0

    def _rank_row(self, number: int, gpu: Gpu, moment: _Moment) -> dict[str, object]:
        first_core = CORES_OF_A_RANK * number
        return {
            "what": samples.RANK,
            "number": self._first_rank + number,
            "name": "R",
            "memory_mb": HOST_MEMORY_MB * self._job.host_memory_share / self._job.ranks_per_node,
            "cores": gpu.cores if moment.is_training else 1.0,
            "core_list": f"{first_core}-{first_core + CORES_OF_A_RANK - 1}",
            "waiting": gpu.waiting_share,
            "loaders": gpu.loaders,
            "loader_cores": gpu.loader_cores if moment.is_training else 0.0,
        }


def _write_record(folder: Path, job: SyntheticJob) -> None:
    """Write what the training would have left behind."""
    nodes = [_node_name(index) for index in range(job.nodes)]
    devices = job.nodes * job.ranks_per_node
    facts = FACTS | job.facts
    facts |= {
        "run_id": f"{facts['stage']}-written",
        "device_name": GPU_NAME,
        "node_list": ",".join(nodes),
        "world_size": devices,
        "devices": devices,
        "nodes": job.nodes,
        "batch_per_device": facts["global_batch"] // devices,
        "started_at": _iso(BEGAN_AT_SECONDS),
    }
    writer = records.RecordWriter(folder / "training", facts)
    for epoch in range(1, job.epochs + 1):
        ended_after = LOADING_SECONDS + epoch * job.epoch_seconds
        rank_rows = list(_rank_records(job, epoch))
        row = {
            "epoch": epoch,
            "steps": facts["images"] // facts["global_batch"],
            "train_seconds": job.train_seconds,
            "images_per_s": facts["images"] / job.train_seconds,
            "eval_seconds": EVALUATION_SECONDS,
            "peak_memory_mb": max(rank_row["peak_memory_mb"] for rank_row in rank_rows),
            "elapsed_s": ended_after,
            "recorded_at": _iso(BEGAN_AT_SECONDS + ended_after),
        }
        writer.add(row, rank_rows)


def _rank_records(job: SyntheticJob, epoch: int) -> Iterator[dict[str, object]]:
    """Yield the row of each rank in the record of an epoch."""
    for node_index in range(job.nodes):
        for number, gpu in enumerate(job.gpus[: job.ranks_per_node]):
            yield {
                "epoch": epoch,
                "rank": node_index * job.ranks_per_node + number,
                "host": _node_name(node_index),
                "device": f"cuda:{number}",
                "device_name": GPU_NAME,
                "peak_memory_mb": MEMORY_MB * gpu.memory_share,
                "own_seconds": job.train_seconds * gpu.own_share,
                "data_seconds": job.train_seconds * gpu.data_share,
            }


def _node_name(index: int) -> str:
    return f"n{index + 1}"


def _iso(time: float) -> str:
    moment = datetime.fromtimestamp(time, timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"


if __name__ == "__main__":
    for committed in COMMITTED:
        write(TRACES / committed, SYNTHETIC[committed])
