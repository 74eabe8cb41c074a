"""The verdict on a job's samples: what it wastes of what it asked for, and what could be faster.

    verdict = judge(folder)  # the folder `monitor` of a job
    print(*wording.verdict_lines(verdict, "job 12"), sep="\\n")

Each finding (findings) is looked for by itself. They are ordered here: the worst first, and after what is
wasted what is not waste, but could be faster.
"""

from dataclasses import dataclass
from pathlib import Path

from manygpus.monitor.findings import FINDINGS
from manygpus.monitor.findings.finding import Finding, Grade
from manygpus.monitor.findings.never_met import NeverMet
from manygpus.monitor.resource_use import CORES, ResourceUse, measure_resource_use
from manygpus.monitor.sample_tables import RankId
from manygpus.monitor.sampled_job import IDLE_PROCESS_CORES, LEAST_SAMPLES, SampledJob

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class NothingSeen:
    """Nothing could be judged: no process that has loaded PyTorch was seen."""


@dataclass(frozen=True)
class TooShort:
    """Little could be judged: there are so few samples of the training past the warm-up."""

    samples: int


@dataclass(frozen=True)
class StartedByScripts:
    """So many processes, which the scripts of these ranks have started themselves, were not judged by rank.

    If several such ranks share a node, the script needs one task on each.
    """

    processes: int
    ranks: list[RankId]
    share_a_node: bool


@dataclass(frozen=True)
class Devices:
    """What a job ran on at its end: GPUs, of one name or "", or so many processes on CPUs."""

    gpus: int
    gpu_name: str
    cpu_workers: int
    nodes: int


@dataclass(frozen=True)
class LastRanks:
    """The ranks of the last samples, by whether they did anything."""

    idle: list[RankId]
    at_work: list[RankId]


@dataclass(frozen=True)
class Verdict:
    """What a job wastes, and what could be faster.

    Attributes:
        findings: what is wasted, the worst first, and then what could be faster.
        not_judged: what could not be judged, and why; None if all could.
        seconds: how long the job was sampled.
        devices: what it ran on.
        energy_kwh: the energy of all GPUs of the job; NaN if it is unknown.
        records: the CSVs of its trainings.
        notes: what the monitor could not see, in its sentences.
        is_gpu_power_unknown: whether the power of the GPUs is unknown, so that gaps between kernels do not
            show.
        too_much: the resources of which less would have been enough.
        last_ranks: the ranks of the last samples.
        is_plain: whether the script of the job does not use the kit, and has none of its options.
    """

    findings: list[Finding]
    not_judged: NothingSeen | TooShort | StartedByScripts | None
    seconds: float
    devices: Devices
    energy_kwh: float
    records: list[Path]
    notes: list[str]
    is_gpu_power_unknown: bool
    too_much: list[ResourceUse]
    last_ranks: LastRanks
    is_plain: bool


def judge(folder: Path) -> Verdict:
    """Judge the job whose samples are in `folder`.

    Raises:
        UserError: if there are none.
    """
    job = SampledJob.read(folder)
    findings = _find(job)
    not_judged = _not_judged(job)
    is_seen_well = not isinstance(not_judged, NothingSeen | TooShort)
    gpus = job.judged.gpus.values()
    return Verdict(
        findings=findings,
        not_judged=not_judged,
        seconds=job.seconds,
        devices=_devices(job),
        energy_kwh=job.energy_joules() / JOULES_PER_KWH,
        records=[training.path for training in job.trainings],
        notes=job.notes,
        is_gpu_power_unknown=len(gpus) > 0 and all(rows.power_w.isna().all() for rows in gpus),
        too_much=_too_much(job, findings) if is_seen_well else [],
        last_ranks=_last_ranks(job),
        is_plain=job.is_plain,
    )


def _find(job: SampledJob) -> list[Finding]:
    """Look for all findings, and order those that there are."""
    findings: dict[str, Finding] = {}
    for finding_class in FINDINGS:
        finding = finding_class.find(job)
        if finding:
            findings.setdefault(finding.kind, finding)
    ranks_wait = any(finding.makes_ranks_wait for finding in findings.values())
    unexplained = [
        finding for finding in findings.values() if not (ranks_wait and finding.explained_by_waiting)
    ]
    return sorted(unexplained, key=_order)


def _order(finding: Finding) -> tuple[bool, bool, float]:
    """Return the order of a finding: ranks that never met first, as they waste all but one of them."""
    return finding.kind != NeverMet.kind, finding.grade is Grade.FASTER, -finding.lost_share


def _not_judged(job: SampledJob) -> NothingSeen | TooShort | StartedByScripts | None:
    if not job.sampled.gpus and not job.sampled.ranks:
        return NothingSeen()
    if job.judged_moments < LEAST_SAMPLES:
        return TooShort(samples=job.judged_moments)
    processes = {rank: job.started_processes(rank) for rank in job.last_ranks}
    ranks = [rank for rank, number in processes.items() if number]
    if not ranks:
        return None
    nodes = {rank.node for rank in job.launchers}
    return StartedByScripts(
        processes=sum(processes.values()), ranks=ranks, share_a_node=len(nodes) < len(job.launchers)
    )


def _too_much(job: SampledJob, findings: list[Finding]) -> list[ResourceUse]:
    """Return the resources of which less would have been enough, without those that a remedy needs."""
    resources = [resource for resource in measure_resource_use(job) if resource.is_too_much]
    # Nobody knows whether processes that a script has started itself wait for cores.
    have_started_processes = any(job.started_processes(rank) for rank in job.sampled.ranks)
    need_cores = any(finding.remedy_takes_cores for finding in findings)
    if need_cores or have_started_processes:
        resources = [resource for resource in resources if resource.option != CORES]
    return resources


def _devices(job: SampledJob) -> Devices:
    gpu_names = {job.sampled.gpus[gpu]["name"].iloc[-1] for gpu in job.last_gpus}
    # A rank that only waits for the processes that its script has started is no worker.
    workers = sum(job.started_processes(rank) for rank in job.last_ranks)
    workers += sum(rank not in job.launchers for rank in job.last_ranks)
    return Devices(
        gpus=len(job.last_gpus),
        gpu_name=gpu_names.pop() if len(gpu_names) == 1 else "",
        cpu_workers=0 if job.last_gpus else workers,
        nodes=len(job.last_nodes),
    )


def _last_ranks(job: SampledJob) -> LastRanks:
    rows = job.ranks_in_the_last_samples()
    at_work = [rank for rank, row in rows.items() if row.cores >= IDLE_PROCESS_CORES]
    return LastRanks(idle=[rank for rank in rows if rank not in at_work], at_work=at_work)
