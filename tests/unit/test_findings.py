"""All findings of a verdict: each is looked for, and has its sentence."""

import math
import pkgutil
from dataclasses import replace
from importlib import import_module

import pytest

from manygpus.monitor import findings
from manygpus.monitor.findings import FINDINGS
from manygpus.monitor.findings.finding import Finding, Grade
from manygpus.monitor.findings.gpu_power import PowerReading
from manygpus.monitor.findings.host_memory import HostMemory
from manygpus.monitor.findings.idle_cpu import IdleCpu
from manygpus.monitor.findings.idle_gpu import IdleGpu
from manygpus.monitor.findings.launch_bound import LaunchBound
from manygpus.monitor.findings.memory_full import MemoryFull
from manygpus.monitor.findings.network_bound import NetworkBound
from manygpus.monitor.findings.never_met import NeverMet
from manygpus.monitor.findings.no_rank import NoRank
from manygpus.monitor.findings.paused_ranks import PauseCause, PausedRanks
from manygpus.monitor.findings.shared_cores import SharedCores
from manygpus.monitor.findings.slow_rank import SlowRank
from manygpus.monitor.findings.throttled import Throttled, ThrottlingCause
from manygpus.monitor.findings.waiting_for_loader import WaitingForLoader
from manygpus.monitor.sample_tables import GpuId, RankId
from manygpus.monitor.samples import STALLED_RANK

# What all findings on the first rank, GPU or node have.
RANK = {"locations": [RankId("n1", 0)], "lost_share": 0.5}
GPU = {"locations": [GpuId("n1", 0)], "lost_share": 0.5}
NODE = {"locations": ["n1"], "lost_share": 0.5}
POWER = PowerReading(power_w=143, limit_w=700, utilisation_percent=24)
WAITING = WaitingForLoader(
    **RANK,
    waiting_share=0.93,
    loader_workers=2,
    cores_per_worker=0.99,
    all_cores_in_use=False,
    is_resident=False,
)
CORES_SHARED = SharedCores(
    **RANK, waiting_share=0.4, ranks=2, loader_workers=0, cores=1, used_by_others=False, exclusive_helps=True
)
HOT = Throttled(
    **GPU,
    cause=ThrottlingCause.HEAT,
    time_share=0.8,
    clock_mhz=840,
    clock_limit_mhz=1_400,
    temperature_c=91,
    power_limit_w=150,
)
GAPS = LaunchBound(
    **GPU,
    load=0.08,
    gap_share=0.32,
    has_gaps=True,
    may_lack_batches=False,
    step_seconds=0.00246,
    is_data_parallel=False,
    is_captured=False,
    power=POWER,
)
# A finding, and words of its sentence: what was seen, and the remedy.
SENTENCES: list[tuple[Finding, tuple[str, ...]]] = [
    (NeverMet(**RANK, ranks=2), ("2 ranks never met", "init_process_group")),
    (NoRank(**GPU, gpus=1, used_gpus=2), ("no rank uses GPU 0 on n1", "ask for 2 GPUs")),
    (NoRank(**GPU, gpus=1, used_gpus=0), ("no rank uses GPU 0 on n1", "ask for no GPU")),
    (
        PausedRanks(**RANK, seconds=45, cause=PauseCause.STOPPED),
        ("SIGSTOP", "rank 0 on n1", "45 s", "kill -CONT"),
    ),
    (
        PausedRanks(**RANK, seconds=45, cause=PauseCause.FILE_SYSTEM),
        ("rank 0 on n1", "45 s", "file system", "stage"),
    ),
    (PausedRanks(**RANK, seconds=45, cause=PauseCause.UNKNOWN), ("rank 0 on n1", "45 s", "--debug")),
    (
        SlowRank(**RANK, times_as_long=2.8, waiting_share=0.4),
        ("rank 0 on n1", "2.8 times", "40 %", "compare"),
    ),
    (WAITING, ("waiting for batches", "93 %", "(2 loader workers, at 99 % of a core)", "(--num-workers)")),
    (WAITING, ("(--loader resident)",)),
    (replace(WAITING, all_cores_in_use=True), ("all cores", "(--cpus-per-task)", "(--loader resident)")),
    (
        replace(WAITING, loader_workers=1, cores_per_worker=0.25),
        ("(1 loader worker, at 25 % of a core)", "files", "(--loader resident)"),
    ),
    (
        replace(WAITING, loader_workers=0, cores_per_worker=math.nan),
        ("(no loader workers)", "--loader workers --num-workers 4", "(--loader resident)"),
    ),
    (
        replace(WAITING, is_resident=True, loader_workers=0, cores_per_worker=math.nan),
        ("(no loader workers)", "--loader workers --num-workers 4", "less work for each batch"),
    ),
    (
        NetworkBound(**NODE, communication_share=0.62, network_mb_s=math.nan),
        ("averaging the gradients takes 62 %", "micro-batches (03_multigpu_ddp/beyond)."),
    ),
    (
        NetworkBound(**NODE, communication_share=0.62, network_mb_s=231),
        ("averaging the gradients takes 62 %", "231 MB/s", "manygpus doctor --job"),
    ),
    (
        CORES_SHARED,
        ("waiting for a core", "40 %", "2 ranks share 1 core", "--cpus-per-task", "OMP_NUM_THREADS"),
    ),
    (replace(CORES_SHARED, loader_workers=4, cores=2), ("2 ranks and 4 loader workers share 2 cores",)),
    (replace(CORES_SHARED, used_by_others=True), ("other programs also use its 1 core", "(--exclusive)")),
    (
        replace(CORES_SHARED, used_by_others=True, exclusive_helps=False),
        ("other programs also use its 1 core", "end them"),
    ),
    (IdleCpu(**RANK, computing_share=0.08), ("rank 0 on n1", "8 %", "--debug")),
    (HOT, ("heat (91 C)", "GPU 0 on n1 for 80 % of the time, to 840 of 1,400 MHz", "your admin")),
    (replace(HOT, temperature_c=math.nan, clock_mhz=math.nan), ("heat slows", "80 % of the time:")),
    (replace(HOT, cause=ThrottlingCause.POWER), ("power cap (150 W)", "80 %", "your admin")),
    (replace(HOT, cause=ThrottlingCause.OTHER), ("application clocks", "80 %", "nvidia-smi -q -d CLOCK")),
    (MemoryFull(**GPU, used_share=0.98), ("98 %", "memory of GPU 0 on n1", "smaller batch per GPU")),
    (HostMemory(**NODE, used_share=0.93), ("93 %", "job's memory on n1", "--mem")),
    (
        IdleGpu(**GPU, gpus=1, others_work=True, power=PowerReading(63, 400, 0)),
        ("no work reaches GPU 0 on n1", "other GPUs work", "(63 of 400 W, utilisation 0 %)", "log"),
    ),
    (
        GAPS,
        (
            "gaps between kernels",
            "8 % of its power above idle (143 of 700 W, utilisation 24 %, 2.46 ms a step)",
            "(--batch-size)",
            "captured.py",
        ),
    ),
    (
        replace(GAPS, has_gaps=False, is_captured=True, power=replace(POWER, utilisation_percent=math.nan)),
        ("short kernels", "(143 of 700 W, 2.46 ms a step)", "(--batch-size)."),
    ),
    (
        replace(GAPS, may_lack_batches=True, is_data_parallel=True, step_seconds=math.nan),
        ("(143 of 700 W, utilisation 24 %)", "loader workers", "DDP (03_multigpu_ddp)"),
    ),
]


def test_every_finding_is_looked_for() -> None:
    for module in pkgutil.iter_modules(findings.__path__):
        import_module(f"{findings.__name__}.{module.name}")
    assert {*Finding.__subclasses__()} == {*FINDINGS}


@pytest.mark.parametrize(("finding", "words"), SENTENCES)
def test_each_finding_has_its_sentence(finding: Finding, words: tuple[str, ...]) -> None:
    sentence = finding.sentence(is_plain=False)
    assert [each for each in words if each not in sentence] == [], sentence
    assert sentence.endswith(".")


def test_a_file_is_called_as_the_kind_of_its_finding() -> None:
    kinds = {finding.__module__.rpartition(".")[2]: finding.kind for finding in FINDINGS}
    assert kinds == {name: name for name in kinds} | dict.fromkeys(
        ("paused_ranks", "slow_rank"), STALLED_RANK
    )


def test_every_kind_of_finding_has_a_sentence() -> None:
    assert {*FINDINGS} == {type(finding) for finding, _ in SENTENCES}


@pytest.mark.parametrize("finding", [finding for finding, _ in SENTENCES])
def test_a_plain_script_has_none_of_our_options(finding: Finding) -> None:
    sentence = finding.sentence(is_plain=True)
    for option in ("--loader", "--num-workers", "--batch-size", "--debug"):
        assert option not in sentence


def test_what_could_be_faster_says_so() -> None:
    sentence = replace(GAPS, grade=Grade.FASTER).sentence(is_plain=False)
    assert sentence.startswith("could be faster: ") and "32 %" in sentence and "8 %" in sentence
    two = replace(GAPS, grade=Grade.FASTER, locations=[GpuId("n1", 0), GpuId("n1", 1)])
    sentence = two.sentence(is_plain=False)
    assert "GPUs 0, 1 on n1 at 8 % of their power above idle" in sentence


def test_loader_workers_of_several_ranks_are_those_of_each() -> None:
    sentence = replace(WAITING, locations=[RankId("n1", 0), RankId("n1", 1)]).sentence(is_plain=False)
    assert "ranks 0, 1 on n1 (2 loader workers each, at 99 % of a core)" in sentence
