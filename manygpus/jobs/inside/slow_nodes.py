"""Which nodes of a job are sick, by what jobs/doctor/node_check.py has measured on each of them.

It is asked before the ranks start (`check_nodes` in jobs/scripts/job_env.sh). It needs no packages.
"""

import json
import os
import re
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from manygpus import log_words
from manygpus.jobs import slurm

# A node is slow if it reaches less than this share of the median of the others. DLRover, too, calls slow what
# takes twice the median (rdzv_manager.py). NVIDIA's resiliency extension has 0.7, over minutes of a training;
# what is measured in a second varies more.
SLOW_SHARE = 0.5
# The prefix of every line that a node prints.
MARK = "node-check "
# The last line of the step: what the others print later counts no more.
ENDED = "ended"
# Fields of a job's record, and the options of sbatch that ask for the same.
OPTION_OF_FIELD = {
    "Account": "account",
    "Features": "constraint",
    "MemPerTres": "mem-per-gpu",
    "MinMemoryCPU": "mem-per-cpu",
    "MinMemoryNode": "mem",
    "Partition": "partition",
    "QOS": "qos",
    "ReqNodeList": "nodelist",
    "Reservation": "reservation",
    "TimeLimit": "time",
    "TresPerJob": "gpus",
    "TresPerNode": "gres",
    "TresPerTask": "gpus-per-task",
}
# Where the value of the option is only a part of that of the field. TresPerNode=gres/gpu:2, or gres:gpu:2
# (22.05), is --gres=gpu:2. TresPerTask=gres/gpu=1 comes from --gpus-per-task=1, gres/gpu:1 from the same as
# --tres-per-task, and either may be behind cpu=2.
PART_OF_FIELD = {
    "MemPerTres": "gres[/:]gpu[:=](.*)",
    "TresPerJob": "gres[/:]gpu[:=](.*)",
    "TresPerNode": "gres[/:](.*)",
    "TresPerTask": "gres[/:]gpu[:=]([^,]*)",
}


class Pair(NamedTuple):
    """An all-reduce between two nodes.

    Attributes:
        nodes: their names.
        gb_s: its bus bandwidth; 0 if it has failed.
    """

    nodes: tuple[str, str]
    gb_s: float


@dataclass
class Measurements:
    """What the nodes of a job have measured.

    Attributes:
        gflop_s: the rate of each device of a node, such as {"n1": {"CPU core": 98.1, "GPU 0": 45000.0}}.
        pairs: the all-reduces.
        errors: what went wrong, on each node.
    """

    gflop_s: dict[str, dict[str, float]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, printed: str) -> "Measurements":
        """Read them from the lines that the nodes have printed."""
        measurements = cls()
        for text in re.findall(MARK + "(.*)", printed):
            with suppress(ValueError):  # cut short
                measurements._add(**json.loads(text))
        return measurements

    def _add(
        self,
        node: str = "",
        gflop_s: dict[str, float] | None = None,
        error: str = "",
        pair: Sequence[str] = (),
        gb_s: float = 0,
        **_: object,
    ) -> None:
        if gflop_s:
            self.gflop_s[node] = gflop_s
        if pair:
            first, second = pair
            self.pairs.append(Pair((first, second), gb_s))
        if error:
            self.errors.setdefault(node, error)


@dataclass(frozen=True)
class Findings:
    """What is to be said of the nodes.

    Attributes:
        slow: a clause on each sick node, by its name.
        summary: what was measured in all.
    """

    slow: dict[str, str]
    summary: str

    @property
    def log_lines(self) -> list[str]:
        """Return the lines of the log."""
        return [log_words.line(log_words.CHECK, text) for text in (self.summary, *self.slow.values())]


def trains_with_them(obstacle: str) -> str:
    """Return the line of the log of a job that cannot do without its slow nodes."""
    return log_words.line(log_words.CHECK, f"it trains with them: {obstacle}")


def send(**facts: object) -> None:
    """Print a line for `Measurements.parse`, in one write."""
    os.write(sys.stdout.fileno(), f"{MARK}{json.dumps(facts)}\n".encode())


def judge(nodes: Sequence[str], measurements: Measurements, seconds: int) -> Findings:
    """Return which nodes are sick.

    Args:
        nodes: the names of all that were to measure.
        measurements: what they have measured.
        seconds: how long that took.
    """
    answered = [node for node in nodes if node in measurements.gflop_s]
    if 2 * len(answered) < len(nodes) or not answered:
        error = next(iter(measurements.errors.values()), "no answer")
        return Findings({}, f"the nodes could not be checked in {seconds} s ({error})")
    slow = {}
    for node in nodes:
        if node not in answered:
            error = measurements.errors.get(node)
            slow[node] = f"{node} cannot compute: {error}" if error else f"{node} did not answer"
    for node, clause in [*_slow_devices(measurements), *_slow_links(measurements)]:
        slow.setdefault(node, clause)
    slow = {node: slow[node] for node in nodes if node in slow}
    return Findings(slow, f"{len(nodes)} nodes in {seconds} s: {_summary(measurements)}")


@dataclass(frozen=True)
class Avoidance:
    """How a job goes back to the queue without its slow nodes.

    Attributes:
        excluded: all nodes that Slurm is to leave out, in its words.
        trial: options of sbatch, by which it says whether the job would start without them.
        reason: why it goes back.
    """

    excluded: str
    trial: list[str]
    reason: str

    def as_shell(self) -> str:
        """Return the variables of `avoid_nodes` in jobs/scripts/job_env.sh."""
        words = {"excluded": shlex.quote(self.excluded), "avoids": shlex.quote(self.reason)}
        return "\n".join(
            [*(f"{name}={word}" for name, word in words.items()), f"trial=({shlex.join(self.trial)})"]
        )


def avoid(findings: Findings, record: Mapping[str, str]) -> Avoidance:
    """Return how a job goes back to the queue without its slow nodes.

    Args:
        findings: which nodes these are.
        record: the fields of what `scontrol show job` says of it.
    """
    known = {name: value for name, value in record.items() if value != "(null)"}
    before = [known["ExcNodeList"]] if "ExcNodeList" in known else []
    excluded = ",".join([*before, *findings.slow])
    nodes = slurm.number_of_nodes(record) or 1
    # As many tasks as GPUs may be counted by.
    tasks = max(int(known.get("NumTasks", nodes)) // nodes, 1)
    cpus = max(int(record["NumCPUs"]) // (nodes * tasks), 1)
    trial = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cpus}"]
    for name, option in OPTION_OF_FIELD.items():
        value = re.search(PART_OF_FIELD.get(name, "(.*)"), known.get(name, ""))
        if value and value[1]:
            # Newer releases write gpu:a100=1.
            asked = value[1].replace("=", ":") if name in PART_OF_FIELD else value[1]
            trial.append(f"--{option}={asked}")
    trial.append(f"--exclude={excluded}")
    reason = f"back to the queue, without {', '.join(findings.slow)}: {'; '.join(findings.slow.values())}"
    return Avoidance(excluded=excluded, trial=trial, reason=reason)


def _slow_devices(measurements: Measurements) -> list[tuple[str, str]]:
    """Return the nodes that compute slowly, each with a clause."""
    by_kind: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for node, rates in measurements.gflop_s.items():
        for device, rate in rates.items():
            by_kind[_kind(device)][node][device] = rate
    slow = []
    for rates_by_node in by_kind.values():
        slowest = {
            node: min(rates.items(), key=lambda item: item[1]) for node, rates in rates_by_node.items()
        }
        for node, (device, rate) in slowest.items():
            usual = _median_of_others(node, {other: rate for other, (_, rate) in slowest.items()})
            if usual and rate < SLOW_SHARE * usual:
                clause = f"{node} is slow: {rate:.0f} GFLOP/s ({device}), and the others {usual:.0f}"
                slow.append((node, clause))
    return slow


def _slow_links(measurements: Measurements) -> list[tuple[str, str]]:
    """Return the nodes whose network is slow, each with a clause.

    Of the nodes of a slow pair, it is the one that has no fast pair.
    """
    best: dict[str, float] = defaultdict(float)
    for pair in measurements.pairs:
        for node in pair.nodes:
            best[node] = max(best[node], pair.gb_s)
    slow = []
    if len(best) > 2:
        for node, rate in best.items():
            usual = _median_of_others(node, best)
            if rate < SLOW_SHARE * usual:
                rate_in_words = f"{rate:.2g} GB/s" if rate else "no all-reduce"
                clause = f"{node} is slow: {rate_in_words} to other nodes, and the others {usual:.2g}"
                slow.append((node, clause))
    return slow


def _median_of_others(node: str, rates: Mapping[str, float]) -> float:
    others = [rate for other, rate in rates.items() if other != node]
    return statistics.median(others) if others else 0


def _kind(device: str) -> str:
    """Return the kind of a device, such as GPU for GPU 3."""
    return re.sub(r" \d+$", "", device)


def _summary(measurements: Measurements) -> str:
    kinds: dict[str, list[float]] = defaultdict(list)
    for rates in measurements.gflop_s.values():
        for device, rate in rates.items():
            kinds[_kind(device)].append(rate)
    parts = [f"{min(rates):.0f} to {max(rates):.0f} GFLOP/s ({kind})" for kind, rates in kinds.items()]
    measured = [pair.gb_s for pair in measurements.pairs if pair.gb_s]
    if measured:
        parts.append(f"all-reduce {min(measured):.2g} to {max(measured):.2g} GB/s")
    failed = sorted({" and ".join(pair.nodes) for pair in measurements.pairs if not pair.gb_s})
    if failed:
        parts.append(f"no all-reduce between {', '.join(failed)}")
    return ", ".join(parts)
