"""Which nodes are called sick, by what was measured on each, and by all-reduces of pairs."""

import json
from itertools import combinations

import pytest

from manygpus.jobs import slurm
from manygpus.jobs.doctor.node_check import rounds
from manygpus.jobs.inside.slow_nodes import MARK, Findings, Measurements, avoid, judge

NODES = ["n1", "n2", "n3", "n4"]


def computed(node: str, **gflop_s: float) -> dict:
    return {"node": node, "gflop_s": {"CPU core": 100.0} | gflop_s}


def pairs(slow: set[str], gb_s: float) -> list[dict]:
    """All pairs; those with all nodes of `slow` have this rate."""
    return [
        {"node": pair[0], "pair": pair, "gb_s": gb_s if slow <= {*pair} else 1.0}
        for pair in combinations(NODES, 2)
    ]


ALL = [computed(node) for node in NODES]
# What the nodes print -> those that are sick.
PRINTED = {
    "none is": (ALL, []),
    "one computes slowly": ([*ALL[:3], computed("n4", **{"CPU core": 40.0})], ["n4"]),
    "one of its GPUs is slow": (
        [computed(node, **{"GPU 0": 9e4, "GPU 1": 2e4 if node == "n2" else 8e4}) for node in NODES],
        ["n2"],
    ),
    "one prints nothing, and one an error": (
        [*ALL[:2], {"node": "n4", "gflop_s": None, "error": "no GPU"}],
        ["n3", "n4"],
    ),
    "most print nothing": (ALL[:1], []),
    "one is slow to all others": ([*ALL, *pairs(slow={"n2"}, gb_s=0.1)], ["n2"]),
    "one has no all-reduce": ([*ALL, *pairs(slow={"n4"}, gb_s=0)], ["n4"]),
    "only one pair is slow": ([*ALL, *pairs(slow={"n1", "n2"}, gb_s=0.1)], []),
}


@pytest.mark.parametrize("case", PRINTED)
def test_who_is_sick(case: str) -> None:
    facts, sick = PRINTED[case]
    printed = "".join(f"a container begins\n{MARK}{json.dumps(line)}\n" for line in facts)
    findings = judge(NODES, Measurements.parse(printed), seconds=9)
    assert sorted(findings.slow) == sick
    assert len(findings.log_lines) == 1 + len(sick)


def test_of_two_nodes_with_a_slow_link_none_is_named() -> None:
    lines = [*ALL[:2], {"node": "n1", "pair": ["n1", "n2"], "gb_s": 0, "error": "timed out"}]
    printed = "".join(f"{MARK}{json.dumps(line)}\n" for line in lines)
    findings = judge(["n1", "n2"], Measurements.parse(printed), seconds=9)
    assert not findings.slow and "n1 and n2" in findings.summary


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_the_pairs_of_a_node_are_different_ones(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    all_rounds = rounds(nodes)
    assert len(all_rounds) <= 3
    for pairs in all_rounds:
        in_round = [node for pair in pairs for node in pair]
        assert len(set(in_round)) == len(in_round) >= count - 1
    pairs = [frozenset(pair) for pairs in all_rounds for pair in pairs]
    assert len(set(pairs)) == len(pairs)
    assert all(sum(node in pair for pair in pairs) >= min(2, count - 1) for node in nodes)


# What Slurm 24.11 records of a job of two tasks on each of two nodes, and the options that ask for the same.
RECORDED = {
    "MinMemoryNode=2G TresPerNode=gres/gpu:2": {"--mem=2G", "--gres=gpu:2"},
    "TresPerJob=gres/gpu:a100:4": {"--gpus=a100:4"},
    "MinMemoryTRES=1G MemPerTres=gres/gpu:1024 TresPerTask=gres/gpu=1": {
        "--mem-per-gpu=1024",
        "--gpus-per-task=1",
    },
    "TresPerTask=gres/gpu:a100:1": {"--gpus-per-task=a100:1"},
    "TresPerTask=cpu=2,gres/gpu:a100=1": {"--gpus-per-task=a100:1"},
    "TresPerTask=cpu=2": set(),
}


@pytest.mark.parametrize("recorded", RECORDED)
def test_without_its_slow_nodes_a_job_asks_for_the_same(recorded: str) -> None:
    record = f"JobId=7 Account=(null) NumNodes=2 NumCPUs=8 NumTasks=4 CPUs/Task=2 {recorded}"
    trial = avoid(Findings({"n2": "n2 is slow"}, ""), slurm.fields(record)).trial
    sizes = {"--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2"}
    assert {*trial} == sizes | RECORDED[recorded] | {"--exclude=n2"}
