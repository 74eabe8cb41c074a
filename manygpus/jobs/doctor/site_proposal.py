"""How this cluster wants jobs to be requested: what `doctor.py --write-site` proposes for slurm/site.sh.

What cannot be read from Slurm, as what a plugin of the site refuses, is tried: `sbatch --test-only` says
whether Slurm would take a job that is requested in one way or another. Nothing is submitted. What the site
file already says and Slurm takes is kept.

It needs only the standard library.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product

from manygpus.jobs import local_job, slurm
from manygpus.jobs.doctor.cluster import Association, Cluster, Partition
from manygpus.jobs.site import DEFAULT_MINUTES, Site
from manygpus.jobs.stages import STAGES, Resources, resources
from manygpus.jobs.submit.partition_limits import excess_in
from manygpus.jobs.submit.slurm_options import trial_options
from manygpus.record.columns import DDP

# How a job may ask for GPUs, and how far that is from the usual; {kind} is for a kind of GPU and its colon.
GPU_FORMS = {
    "--gpus-per-node={kind}%d": 0,
    "--gres=gpu:{kind}%d": 1,
    "--gpus={kind}%d": 2,
    "--tres-per-task=gres/gpu:{kind}%d": 3,
    "--gpus-per-task={kind}%d": 3,
}
# The same of cores and memory. An amount is better than what the site gives where none is named.
CPU_AND_MEMORY_FORMS = {
    ("--cpus-per-task=%d", "--mem=%dG"): 0,
    ("--cpus-per-task=%d", "--mem-per-gpu=%dG"): 1,
    ("--cpus-per-gpu=%d", "--mem=%dG"): 1,
    ("--cpus-per-gpu=%d", "--mem-per-gpu=%dG"): 1.5,
    ("--cpus-per-task=%d", "--mem-per-cpu=%dG"): 2,
    ("--cpus-per-task=%d", ""): 2,
    ("", "--mem=%dG"): 2,
    ("", ""): 2,
    ("--cpus-per-gpu=%d", ""): 3,
    ("", "--mem-per-gpu=%dG"): 3,
}
# So many times Slurm is asked about a way to request a job, if it refuses all before.
MOST_TRIALS = 60
# Starts that are no further apart are as good.
SAME_START = timedelta(minutes=1)
# A refusal because of the account or the QOS of a job, and not of the way it asks for GPUs, cores and memory.
OF_PAYER = re.compile("account|qos|association", re.IGNORECASE)


@dataclass(frozen=True)
class Names:
    """What a job names besides its size; "" stands for what Slurm takes by itself."""

    partition: str = ""
    account: str = ""
    qos: str = ""


@dataclass(frozen=True)
class Way:
    """A way to request jobs, which run in a partition whether they name it or not."""

    partition: Partition
    names: Names
    templates: Mapping[str, str]
    minutes: int


@dataclass(frozen=True)
class Accepted:
    """A way that Slurm takes a job in, and when and how it would start."""

    way: Way
    trial: slurm.Trial


@dataclass(frozen=True)
class Proposal:
    """What is proposed.

    Attributes:
        ways: those in which Slurm takes the job, at most one for each partition, the proposed one first.
        refusals: of the other partitions that were tried, why Slurm does not take the job there.
        refused_shapes: of the other shapes of jobs that the partition has nodes for, why Slurm refuses them.
        trials: how often Slurm was asked about a job.
    """

    ways: list[Accepted]
    refusals: dict[str, str]
    refused_shapes: dict[Resources, str]
    trials: int


def propose(site: Site, cluster: Cluster, shape: Resources) -> Proposal:
    """Find the way to request a job of this shape that starts first, and whether others are taken in it."""
    search = _Search(site, cluster, shape)
    ways = search.ways()
    refused_shapes = {}
    if ways:
        way = ways[0].way
        for nodes, gpus in ((1, 1), (1, 2), (2, 4)):
            other = resources(STAGES[DDP], gpus, nodes)
            if other != shape and way.partition.nodes_for(other) >= nodes:
                refusal = search.trial(way, other).refusal
                if refusal:
                    refused_shapes[other] = refusal
    taking = {accepted.way.partition.name for accepted in ways}
    refusals = {name: refusal for name, refusal in search.refusals.items() if name not in taking}
    return Proposal(ways, refusals, refused_shapes, search.trials)


def settings_of(site: Site, way: Way) -> dict[str, str]:
    """Return what slurm/site.sh has to set for a way, besides what it sets: "" for what it must not set."""
    wanted = {
        "SBATCH_PARTITION": way.names.partition,
        "SBATCH_ACCOUNT": way.names.account,
        "SBATCH_QOS": way.names.qos,
    }
    settings = {name: value for name, value in wanted.items() if value != site.sbatch.get(name, "")}
    if way.minutes < (site.minutes or DEFAULT_MINUTES):
        settings["SBATCH_TIMELIMIT"] = str(way.minutes)
    for name, template in way.templates.items():
        if template != site.option_templates[name]:
            settings[name] = template
    return settings


class _Search:
    """The search for ways in which Slurm takes a job; it counts how often it has asked."""

    def __init__(self, site: Site, cluster: Cluster, shape: Resources) -> None:
        self.site = site
        self.cluster = cluster
        self.shape = shape
        self.trials = 0
        self.refusals: dict[str, str] = {}
        self.names_of_site = Names(
            site.sbatch.get("SBATCH_PARTITION", ""),
            site.sbatch.get("SBATCH_ACCOUNT", ""),
            site.sbatch.get("SBATCH_QOS", ""),
        )
        searched = ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_TIMELIMIT")
        others = {name: value for name, value in site.sbatch.items() if name not in searched}
        self.environment = local_job.without_sbatch_variables() | others

    def ways(self) -> list[Accepted]:
        """Return the ways in which partitions take the job, in the form of the site, or else in another."""
        partitions = self._partitions()
        ways = [self._first_accepted(partition, self.site.option_templates) for partition in partitions]
        if not any(ways):
            # A plugin may want all to be named, and say so in any words.
            ways = [self._accepted_if_all_is_named(partition) for partition in partitions]
        if not any(ways):
            ways = self._in_another_form(partitions)
        return self._by_start([way for way in ways if way])

    def _partitions(self) -> list[Partition]:
        """Return the partitions that the job fits in: that of the site file first, then the default one."""
        partitions = [
            partition
            for partition in self.cluster.partitions
            if not self.cluster.has_gpus or partition.nodes_for(self.shape) >= self.shape.nodes
        ]
        long_enough = [partition for partition in partitions if partition.allows(self._minutes)]
        chosen = self.names_of_site.partition
        return sorted(long_enough or partitions, key=lambda partition: partition.name != chosen)

    @property
    def _minutes(self) -> int:
        """Return the time limit of the site's jobs."""
        return self.site.minutes or DEFAULT_MINUTES

    def _by_start(self, ways: list[Accepted]) -> list[Accepted]:
        """Return the ways with the one to propose first: that of the site file, else the first to start.

        One that would take the place of other people's jobs comes last.
        """
        if not ways or ways[0].way.partition.name == self.names_of_site.partition:
            return ways
        first_start = min(way.trial.start for way in ways)
        return sorted(
            ways,
            key=lambda way: (way.trial.preempts, max(way.trial.start - first_start, SAME_START)),
        )

    def _first_accepted(self, partition: Partition, templates: Mapping[str, str]) -> Accepted | None:
        """Return the first way in which a partition takes the job in a form.

        If Slurm refuses it because of the account or the QOS, others are tried.
        """
        for names in self._names(partition):
            way = self._way(partition, names, templates)
            trial = self.trial(way, self.shape)
            if not trial.refusal:
                return Accepted(way, trial)
            self.refusals.setdefault(partition.name, trial.refusal)
            if not OF_PAYER.search(trial.refusal):
                return None
        self.refusals.setdefault(partition.name, "it admits none of your accounts and QOS")
        return None

    def _accepted_if_all_is_named(self, partition: Partition) -> Accepted | None:
        """Return the way in which a partition takes the job if it is named, and an account and a QOS are."""
        names = [replace(names, partition=partition.name) for names in self._names(partition)]
        for all_names in [choice for choice in names if choice.account and choice.qos][:1] or names[:1]:
            way = self._way(partition, all_names, self.site.option_templates)
            trial = self.trial(way, self.shape)
            if not trial.refusal:
                return Accepted(way, trial)
        return None

    def _in_another_form(self, partitions: Sequence[Partition]) -> list[Accepted | None]:
        """Return the ways in which partitions take the job, in the first form that one of them takes."""
        for partition in partitions:
            for templates in self._forms(partition):
                accepted = self._first_accepted(partition, templates)
                if accepted:
                    others = [other for other in partitions if other is not partition]
                    return [accepted, *(self._first_accepted(other, templates) for other in others)]
        return []

    def trial(self, way: Way, shape: Resources) -> slurm.Trial:
        """Ask whether Slurm would take a job of a shape in a way, and when it would start it."""
        site = self.site._replace(option_templates=dict(way.templates))
        asked = trial_options(site, shape, way.minutes)
        if not way.partition.is_up:
            # Slurm takes the job, and says a start (seen: 24.11).
            return slurm.Trial(refusal=f"it is {way.partition.fields['State']}")
        beyond = excess_in(way.partition.fields, asked)
        if beyond:
            return slurm.Trial(refusal=f"{beyond.reason}: {beyond.limit}")
        if self.trials == MOST_TRIALS:
            return slurm.Trial(refusal="Slurm was not asked, as it has refused too many ways before")
        self.trials += 1
        asked |= {option: name for option, name in vars(way.names).items() if name}
        return slurm.test_only([f"--{option}={value}" for option, value in asked.items()], self.environment)

    def _way(self, partition: Partition, names: Names, templates: Mapping[str, str]) -> Way:
        """Return the way, with the time limit that jobs of this site may have in it."""
        association = self._association(names)
        qos = names.qos or (association.usual_qos if association else "")
        limits = (
            partition.most_minutes,
            self.cluster.most_minutes.get(qos),
            self.cluster.most_minutes.get(partition.fields.get("QoS", "")),
        )
        minutes = min([self._minutes, *(limit for limit in limits if limit is not None)])
        return Way(partition, names, templates, minutes)

    def _forms(self, partition: Partition) -> list[dict[str, str]]:
        """Return the ways to ask for GPUs, cores and memory, those nearer to that of the site first."""
        templates = self.site.option_templates
        gpu_forms = {templates["SITE_GPUS"]: 0}
        if self.cluster.has_gpus:
            kinds = [f"{kind}:" for kind in partition.kinds_for(self.shape)[:1]]
            for form, kind in product(GPU_FORMS, ["", *kinds]):
                gpu_forms.setdefault(form.format(kind=kind), GPU_FORMS[form] + (1 if kind else 0))
        else:
            gpu_forms = {"": 0}
        own_pair = (templates["SITE_CPUS"], templates["SITE_MEM"])
        others = {pair: distance for pair, distance in CPU_AND_MEMORY_FORMS.items() if pair != own_pair}
        pairs = {own_pair: 0, **others}
        combined = product(gpu_forms, pairs)
        nearest_first = sorted(combined, key=lambda form: gpu_forms[form[0]] + pairs[form[1]])
        return [
            {"SITE_GPUS": gpus, "SITE_CPUS": cpus, "SITE_MEM": memory}
            for gpus, (cpus, memory) in nearest_first
        ]

    def _names(self, partition: Partition) -> list[Names]:
        """Return what a job in a partition may name: first what the site file does, then little."""
        of_site = self.names_of_site
        name = "" if partition.is_default and not of_site.partition else partition.name
        names = [replace(of_site, partition=name), Names(name)]
        for association in self.cluster.associations:
            names.append(Names(name, association.account))
            names += [Names(name, association.account, qos) for qos in association.qos]
        return [choice for choice in dict.fromkeys(names) if self._is_admitted(choice, partition)]

    def _is_admitted(self, names: Names, partition: Partition) -> bool:
        """Return whether a partition admits the account and the QOS: Slurm itself may say so too late."""
        association = self._association(names)
        if not association:
            return True
        return (
            association.partition in ("", partition.name)
            and partition.admits("Accounts", association.account)
            and partition.admits("Qos", names.qos or association.usual_qos)
        )

    def _association(self, names: Names) -> Association | None:
        """Return the association of a job that names this."""
        for association in self.cluster.associations:
            if names.account == association.account or (not names.account and association.is_default):
                return association
        return None
