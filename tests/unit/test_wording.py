"""The words of the verdict: a sentence for each kind of finding, and the last lines of a job's log."""

import math
from dataclasses import replace

import pytest

from trainkit.monitor import wording
from trainkit.monitor.findings import FINDINGS
from trainkit.monitor.findings.finding import Finding, Grade, Location
from trainkit.monitor.findings.full_memory import FullGpuMemory, FullHostMemory
from trainkit.monitor.findings.gpu_power import PowerReading
from trainkit.monitor.findings.idle_cpus import IdleCpus
from trainkit.monitor.findings.idle_gpus import IdleGpus
from trainkit.monitor.findings.launch_bound_gpus import LaunchBoundGpus
from trainkit.monitor.findings.paused_ranks import PauseCause, PausedRanks
from trainkit.monitor.findings.ranks_never_met import RanksNeverMet
from trainkit.monitor.findings.shared_cores import SharedCores
from trainkit.monitor.findings.slow_communication import SlowCommunication
from trainkit.monitor.findings.slow_rank import SlowRank
from trainkit.monitor.findings.throttled_gpus import ThrottledGpus, ThrottlingCause
from trainkit.monitor.findings.unused_gpus import UnusedGpus
from trainkit.monitor.findings.waiting_for_batches import WaitingForBatches
from trainkit.monitor.findings.words import name_locations
from trainkit.monitor.resource_use import CORES, MEMORY, ResourceUse
from trainkit.monitor.sample_tables import GpuId, RankId
from trainkit.monitor.verdict import Devices, LastRanks, NothingSeen, StartedByScripts, TooShort, Verdict

# What all findings on the first rank, GPU or node have.
RANK = {"locations": [RankId("n1", 0)], "lost_share": 0.5}
GPU = {"locations": [GpuId("n1", 0)], "lost_share": 0.5}
NODE = {"locations": ["n1"], "lost_share": 0.5}
POWER = PowerReading(power_w=143, limit_w=700, utilisation_percent=24)
WAITING = WaitingForBatches(
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
HOT = ThrottledGpus(
    **GPU,
    cause=ThrottlingCause.HEAT,
    time_share=0.8,
    clock_mhz=840,
    clock_limit_mhz=1_400,
    temperature_c=91,
    power_limit_w=150,
)
GAPS = LaunchBoundGpus(
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
    (RanksNeverMet(**RANK, ranks=2), ("2 ranks never met", "init_process_group")),
    (UnusedGpus(**GPU, gpus=1, used_gpus=2), ("no rank uses GPU 0 on n1", "ask for 2 GPUs")),
    (UnusedGpus(**GPU, gpus=1, used_gpus=0), ("no rank uses GPU 0 on n1", "ask for no GPU")),
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
        ("1 loader worker, at 25 %", "files", "--loader resident"),
    ),
    (
        replace(WAITING, loader_workers=0, cores_per_worker=math.nan),
        ("--loader workers --num-workers 4", "--loader resident"),
    ),
    (
        replace(WAITING, is_resident=True, loader_workers=0, cores_per_worker=math.nan),
        ("--loader workers --num-workers 4",),
    ),
    (
        SlowCommunication(**NODE, communication_share=0.62, network_mb_s=math.nan),
        ("averaging the gradients takes 62 %", "micro-batches (03_multigpu_ddp/beyond)."),
    ),
    (
        SlowCommunication(**NODE, communication_share=0.62, network_mb_s=231),
        ("averaging the gradients takes 62 %", "231 MB/s", "slurm/doctor.py --job"),
    ),
    (
        CORES_SHARED,
        ("40 %", "2 ranks share 1 core", "--cpus-per-task", "OMP_NUM_THREADS"),
    ),
    (replace(CORES_SHARED, loader_workers=4, cores=2), ("2 ranks and 4 loader workers share 2 cores",)),
    (replace(CORES_SHARED, used_by_others=True), ("other programs", "--exclusive")),
    (
        replace(CORES_SHARED, used_by_others=True, exclusive_helps=False),
        ("other programs",),
    ),
    (IdleCpus(**RANK, computing_share=0.08), ("rank 0 on n1", "8 %", "--debug")),
    (HOT, ("heat (91 C)", "GPU 0 on n1 for 80 % of the time, to 840 of 1,400 MHz", "your admin")),
    (replace(HOT, temperature_c=math.nan, clock_mhz=math.nan), ("heat slows", "80 % of the time:")),
    (replace(HOT, cause=ThrottlingCause.POWER), ("power cap (150 W)", "80 %", "your admin")),
    (replace(HOT, cause=ThrottlingCause.OTHER), ("application clocks", "80 %", "nvidia-smi -q -d CLOCK")),
    (FullGpuMemory(**GPU, used_share=0.98), ("98 %", "memory of GPU 0 on n1", "smaller batch per GPU")),
    (FullHostMemory(**NODE, used_share=0.93), ("93 %", "job's memory on n1", "--mem")),
    (
        IdleGpus(**GPU, gpus=1, others_work=True, power=PowerReading(63, 400, 0)),
        ("no work reaches GPU 0 on n1", "other GPUs work", "(63 of 400 W, utilisation 0 %)", "log"),
    ),
    (
        GAPS,
        (
            "gaps",
            "8 % of its power",
            "143 of 700 W, utilisation 24 %, 2.46 ms",
            "--batch-size",
            "captured.py",
        ),
    ),
    (
        replace(GAPS, has_gaps=False, is_captured=True, power=replace(POWER, utilisation_percent=math.nan)),
        ("short kernels", "143 of 700 W, 2.46 ms", "--batch-size"),
    ),
    (
        replace(GAPS, may_lack_batches=True, is_data_parallel=True, step_seconds=math.nan),
        ("143 of 700 W, utilisation 24 %", "loader workers", "03_multigpu_ddp"),
    ),
]
VERDICT = Verdict(
    findings=[],
    not_judged=None,
    seconds=1234,
    devices=Devices(gpus=2, gpu_name="NVIDIA H100", cpu_workers=0, nodes=1),
    energy_kwh=0.012345,
    records=[],
    notes=[],
    is_gpu_power_unknown=False,
    too_much=[],
    last_ranks=LastRanks(idle=[], at_work=[]),
    is_plain=False,
)


@pytest.mark.parametrize(("finding", "words"), SENTENCES)
def test_each_finding_has_its_sentence(finding: Finding, words: tuple[str, ...]) -> None:
    sentence = finding.sentence(is_plain=False)
    assert [each for each in words if each not in sentence] == [], sentence


def test_every_kind_of_finding_has_a_sentence() -> None:
    assert {*FINDINGS} == {type(finding) for finding, _ in SENTENCES}


def test_what_could_be_faster_says_so() -> None:
    sentence = replace(GAPS, grade=Grade.FASTER).sentence(is_plain=False)
    assert sentence.startswith("could be faster: ") and "32 %" in sentence and "8 %" in sentence
    two = replace(GAPS, grade=Grade.FASTER, locations=[GpuId("n1", 0), GpuId("n1", 1)])
    sentence = two.sentence(is_plain=False)
    assert "GPUs 0, 1 on n1 at 8 % of their power above idle" in sentence


@pytest.mark.parametrize("finding", [finding for finding, _ in SENTENCES])
def test_a_plain_script_has_none_of_our_options(finding: Finding) -> None:
    sentence = finding.sentence(is_plain=True)
    for option in ("--loader", "--num-workers", "--batch-size", "--debug"):
        assert option not in sentence


def test_loader_workers_of_several_ranks_are_those_of_each() -> None:
    sentence = replace(WAITING, locations=[RankId("n1", 0), RankId("n1", 1)]).sentence(is_plain=False)
    assert "ranks 0, 1 on n1 (2 loader workers each, at 99 % of a core)" in sentence


@pytest.mark.parametrize(
    ("locations", "name"),
    [
        (["n1"], "n1"),
        (["n1", "n2"], "n1 and n2"),
        (["n1", "n2", "n3"], "3 nodes"),
        ([GpuId("n1", 1), GpuId("n1", 0)], "GPUs 0, 1 on n1"),
        ([GpuId("n1", 1), GpuId("n2", 1)], "GPU 1 on n1 and GPU 1 on n2"),
        ([RankId("n1", rank) for rank in range(9)], "9 ranks on 1 node"),
        ([GpuId(f"n{node}", 0) for node in range(3)], "3 GPUs on 3 nodes"),
    ],
)
def test_locations_are_named_or_counted(locations: list[Location], name: str) -> None:
    assert name_locations(locations) == name


def test_the_lines_of_a_log() -> None:
    watched = "job 12 was watched for 1,234 s: 2 x NVIDIA H100, 0.0123 kWh"
    assert wording.verdict_lines(VERDICT, "job 12") == ["no waste found", watched]
    verdict = replace(
        VERDICT,
        findings=[GAPS, FullGpuMemory(**GPU, used_share=0.98, grade=Grade.DANGER)],
        notes=["n1: the name", "n1: memory"],
        is_gpu_power_unknown=True,
        too_much=[
            ResourceUse(MEMORY, "G", asked=60, used=7.7, is_peak_known=True, resume=3.7),
            ResourceUse(CORES, "", asked=8, used=2.98, is_peak_known=True),
        ],
    )
    *findings, unseen, next_request, last = wording.verdict_lines(verdict, "job 12")
    assert findings == wording.sentences(verdict) and last == watched
    assert unseen == "not seen: n1: the name (2 more)"
    assert next_request.startswith("next time --mem=13G --cpus-per-task=4 would be enough")
    for used in ("7.7 of --mem=60G", "3.0 of --cpus-per-task=8", "3.7 more"):
        assert used in next_request
    unknown = replace(VERDICT, energy_kwh=math.nan, devices=Devices(0, "", cpu_workers=3, nodes=2))
    assert wording.verdict_lines(unknown, "j")[-1] == "j was watched for 1,234 s: 3 CPU workers on 2 nodes"
    several = replace(VERDICT, devices=Devices(gpus=2, gpu_name="", cpu_workers=0, nodes=1))
    assert ": 2 GPUs, " in wording.verdict_lines(several, "j")[-1]


@pytest.mark.parametrize(
    ("not_judged", "words"),
    [
        (NothingSeen(), ("PyTorch",)),
        (TooShort(samples=1), ("1 sample ", "4 ")),
        (
            StartedByScripts(processes=2, ranks=[RankId("n1", 0)], share_a_node=False),
            ("2 processes", "rank 0 on n1"),
        ),
        (
            StartedByScripts(processes=4, ranks=[RankId("n1", 0), RankId("n1", 1)], share_a_node=True),
            ("4 processes", "ranks 0, 1 on n1"),
        ),
    ],
)
def test_what_could_not_be_judged(
    not_judged: NothingSeen | TooShort | StartedByScripts, words: tuple[str, ...]
) -> None:
    sentence = wording.verdict_lines(replace(VERDICT, not_judged=not_judged), "job 12")[0]
    assert [each for each in words if each not in sentence] == [], sentence


def test_the_ranks_of_the_last_samples() -> None:
    last_ranks = LastRanks(idle=[RankId("n1", 0)], at_work=[RankId("n2", 1)])
    words = wording.last_ranks_words(replace(VERDICT, last_ranks=last_ranks))
    assert words == "rank 0 on n1 (idle) and rank 1 on n2 (at work)"
    assert wording.last_ranks_words(VERDICT) == ""
