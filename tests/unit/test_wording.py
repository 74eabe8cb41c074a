"""The verdict in words: the lines of a job's log."""

import math
from dataclasses import replace

import pytest

from manygpus.monitor import wording
from manygpus.monitor.findings.finding import Grade
from manygpus.monitor.findings.memory_full import MemoryFull
from manygpus.monitor.findings.no_rank import NoRank
from manygpus.monitor.resource_use import CORES, MEMORY, ResourceUse
from manygpus.monitor.sample_tables import GpuId, RankId
from manygpus.monitor.verdict import Devices, LastRanks, NothingSeen, StartedByScripts, TooShort, Verdict

FULL_MEMORY = MemoryFull(locations=[GpuId("n1", 0)], lost_share=0.0, grade=Grade.DANGER, used_share=0.98)
UNUSED = NoRank(locations=[GpuId("n1", 1)], lost_share=0.5, gpus=1, used_gpus=1)
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


def test_the_lines_of_a_log() -> None:
    watched = "job 12 was watched for 1,234 s: 2 x NVIDIA H100, 0.0123 kWh"
    assert wording.verdict_lines(VERDICT, "job 12") == ["no waste found", watched]
    verdict = replace(
        VERDICT,
        findings=[FULL_MEMORY, UNUSED],
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
