"""Write slurm/site.sh, or what it could be: `doctor.py --write-site`; needs only the standard library."""

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from manygpus import project
from manygpus.files import explained, replacing
from manygpus.jobs import local_job, slurm
from manygpus.jobs.doctor import site_proposal
from manygpus.jobs.doctor.cluster import Cluster, NodeGroup, Partition, read_cluster
from manygpus.jobs.doctor.findings import FAULT, OK, WARNING, Finding
from manygpus.jobs.doctor.site_proposal import Accepted, Proposal
from manygpus.jobs.site import SCRIPTS, read_site
from manygpus.jobs.stages import Resources

CHECK = "proposal"
# The proposal where there is a site file.
NEW = ".new"


def write_site(shape: Resources) -> list[Finding]:
    """Propose the site file for jobs of this shape: write it if there is none, else beside it.

    Raises:
        UserError: if it cannot be written.
    """
    site = read_site(local_job.without_sbatch_variables())
    cluster = read_cluster()
    proposal = site_proposal.propose(site, cluster, shape)
    findings = [*_of_accounts(cluster), *_of_proposal(proposal, cluster, shape)]
    if proposal.ways:
        findings.append(_write(site_proposal.settings_of(site, proposal.ways[0].way)))
    return findings


def with_settings(text: str, settings: Mapping[str, str]) -> str:
    """Return the text of a site file with these settings; "" for an SBATCH_* variable takes it out.

    A setting takes the place of the line that sets it, if that is a plain one, or of the line of the example
    that shows it. Else it comes last. All other lines are kept.
    """
    for name, value in settings.items():
        export = "export " if name.startswith("SBATCH_") else ""
        own_line = rf"^(?:export +)?{name}=[\w@%+:,./=-]*"
        of_the_example = rf"^#{export}{name}=\S*"
        if export and not value:
            line = f"unset {name}"
            patterns = [own_line]
        else:
            line = f"{export}{name}={shlex.quote(value) if value else ''}"
            patterns = [own_line, of_the_example]
        for pattern in patterns:
            places = [*re.finditer(rf"{pattern}(?P<space> *)(?=#|$)", text, re.MULTILINE)]
            if places:
                # The last one counts. The comment behind it stays where it is.
                place = places[-1]
                before, behind = text[: place.start()], text[place.end() :]
                space = " " * max(len(place[0]) - len(line), 1) if place["space"] else ""
                text = f"{before}{line}{space}{behind}"
                break
        else:
            text = f"{text.rstrip()}\n{line}\n"
    return text


def _write(settings: Mapping[str, str]) -> Finding:
    """Write the site file with these settings, or the proposal beside it, and show the difference."""
    file, name = project.site_file(), project.site_name()
    has_one = file.exists()
    if has_one and not settings:
        return Finding(CHECK, OK, f"{name} needs no change")
    before = file if has_one else SCRIPTS / "site.example.sh"
    text = before.read_text()
    proposed = with_settings(text, settings)
    target = file.with_name(file.name + NEW) if has_one else file
    fix = "free the space, or fix the permissions"
    with explained(f"{target} cannot be written", fix):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as new:
            new.write(proposed)
    difference = _difference(before, text, target, proposed)
    if not has_one:
        return Finding(CHECK, OK, f"{name} is written, from site.example.sh{difference}")
    message = f"{name} is as it was; with the proposal it would be {name}{NEW}{difference}"
    return Finding(CHECK, WARNING, message, f"to take it: mv {name}{NEW} {name}")


def _difference(before: Path, text: str, after: Path, proposed: str) -> str:
    """Return the difference of two files as further lines of a message; "" if there is none."""
    names = (before.name, after.name)
    lines = difflib.unified_diff(text.splitlines(), proposed.splitlines(), *names, n=0, lineterm="")
    return "".join(f"\n{line}" for line in lines)


def _of_accounts(cluster: Cluster) -> Iterator[Finding]:
    if cluster.why_no_accounts:
        message = f"your accounts and QOS are not known: {cluster.why_no_accounts}"
        yield Finding(CHECK, OK, message)
    elif not cluster.associations:
        message = "accounting knows no account of yours"
        yield Finding(CHECK, WARNING, message, "if Slurm refuses jobs, ask your admin for an account")
    else:
        accounts = dict.fromkeys(
            f"{one.account} (default)" if one.is_default else one.account for one in cluster.associations
        )
        yield Finding(CHECK, OK, f"accounts of yours: {', '.join(accounts)}")


def _of_proposal(proposal: Proposal, cluster: Cluster, shape: Resources) -> Iterator[Finding]:
    """Yield which partition starts the job first, which others take it, and why the others do not."""
    if not cluster.has_gpus:
        yield _no_gpus(cluster)
    if proposal.ways:
        best, *others = proposal.ways
        yield Finding(CHECK, OK, f"proposed: {_described(best.way.partition)}; {shape} {_start(best)}")
        starts = ", ".join(f"{way.way.partition.name} ({_start(way)})" for way in others)
        if starts:
            yield Finding(CHECK, OK, f"partitions that take it, too: {starts}")
    for name, refusal in proposal.refusals.items():
        message = f"partition {name} refuses {shape}: {refusal}"
        if proposal.ways:
            yield Finding(CHECK, OK, message)
        else:
            yield Finding(CHECK, FAULT, message, slurm.advice(refusal))
    if not proposal.ways and not proposal.refusals:
        most = max(cluster.partitions, key=lambda partition: partition.most_gpus)
        message = f"no partition has {shape.nodes} node(s) with {shape.gpus_per_node} GPU(s) each"
        fix = f"ask for less with --gpus and --nodes; the most GPUs are on nodes of {_described(most)}"
        yield Finding(CHECK, FAULT, message, fix)
    for other, refusal in proposal.refused_shapes.items():
        yield Finding(CHECK, WARNING, f"Slurm refuses {other}: {refusal}", slurm.advice(refusal))
    message = f"nothing was submitted: Slurm was asked {proposal.trials} times whether it would take a job"
    yield Finding(CHECK, OK, message)


def _no_gpus(cluster: Cluster) -> Finding:
    groups = [group for partition in cluster.partitions for group in partition.groups]
    features = sorted({feature for group in groups for feature in group.features})
    fix = "if some nodes have GPUs, have SBATCH_PARTITION or SBATCH_CONSTRAINT select them"
    if features:
        fix += f"; the features of nodes are {', '.join(features)}"
    return Finding(CHECK, WARNING, "Slurm counts no GPUs on this cluster", fix)


def _described(partition: Partition) -> str:
    """Return a partition with its nodes and its limit, as "partition gpu with 12 node(s) of a100:4, ..."."""
    nodes = [f"{group.nodes} node(s) of {_gpus(group)}" for group in partition.groups]
    limit = partition.fields.get("MaxTime", "UNLIMITED")
    whole = ", whole nodes" if partition.has_whole_nodes else ""
    return f"partition {partition.name} with {', '.join(nodes)}, time limit {limit}{whole}"


def _gpus(group: NodeGroup) -> str:
    """Return the GPUs of a node, as "a100:4"."""
    kinds = (f"{kind}:{count}" if kind else f"{count} GPU(s)" for kind, count in group.gpus.items())
    return " and ".join(kinds) or "no GPU"


def _start(accepted: Accepted) -> str:
    start = f"would start at {accepted.trial.start:%Y-%m-%d %H:%M}"
    return f"{start}, in the place of other jobs" if accepted.trial.preempts else start
