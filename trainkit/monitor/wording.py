"""The verdict in words: a sentence for each issue, with its remedy, and the lines of a job's log."""

import math
from functools import singledispatch

from trainkit.monitor.issues import (
    Evidence,
    FullGpuMemory,
    FullHostMemory,
    Grade,
    IdleCpus,
    IdleGpus,
    Issue,
    LaunchBound,
    Location,
    PauseCause,
    PausedRanks,
    PowerReading,
    RanksNeverMet,
    SharedCores,
    SlowCommunication,
    SlowRank,
    ThrottledGpus,
    ThrottlingCause,
    UnusedGpus,
    WaitingForBatches,
)
from trainkit.monitor.rank_rules import BUSY_LOADER_CORES
from trainkit.monitor.requests import Request
from trainkit.monitor.sample_tables import GpuId, RankId
from trainkit.monitor.sampled_job import LEAST_SAMPLES
from trainkit.monitor.verdict import Devices, NothingSeen, StartedByScripts, TooShort, Verdict

LAUNCHES_PAGE = "01_singlegpu/README.md#when-the-gpu-waits-for-the-cpu"
GPU_POWER_IS_UNKNOWN = "the power of the GPUs, without which gaps between kernels cannot be seen"
# A resume that takes less is not worth a word.
LEAST_RESUME = 0.05
# Of more, only their number is named.
MOST_NODES_TO_NAME = 2
MOST_LOCATIONS_TO_NAME = 8


# --- the verdict ------------------------------------------------------------------------------------


def verdict_lines(verdict: Verdict, job_name: str) -> list[str]:
    """Return a line for each finding; the last one says what was watched of the job of this name."""
    lines = sentences(verdict)
    if verdict.not_judged:
        lines.append(not_judged_sentence(verdict))
    elif not lines:
        lines.append("no waste found")
    notes = all_notes(verdict)
    if notes:
        more = f" ({len(notes) - 1} more)" if len(notes) > 1 else ""
        lines.append(f"not seen: {notes[0]}{more}")
    if verdict.too_much:
        lines.append(next_request_sentence(verdict.too_much))
    watched = f"{job_name} was watched for {verdict.seconds:,.0f} s: {devices_words(verdict.devices)}"
    if math.isfinite(verdict.energy_kwh):
        watched += f", {verdict.energy_kwh:.3g} kWh"
    lines.append(watched)
    return lines


def sentences(verdict: Verdict) -> list[str]:
    """Return a sentence for each finding."""
    return [issue_sentence(issue, verdict.is_plain) for issue in verdict.findings]


def issue_sentence(issue: Issue, is_plain: bool = False) -> str:
    """Return a sentence on an issue, with its remedy; for a plain script without the options of the kit."""
    return _sentence(issue.evidence, issue, is_plain)


def not_judged_sentence(verdict: Verdict) -> str:
    """Return a sentence on what could not be judged; "" if all could."""
    reason = verdict.not_judged
    if isinstance(reason, NothingSeen):
        return "nothing to judge: no process that has loaded PyTorch was seen"
    if isinstance(reason, TooShort):
        seen = f"{_count(reason.samples, 'sample')} of its training after the warm-up"
        return f"too short to tell: {seen}, but {LEAST_SAMPLES} are needed"
    if isinstance(reason, StartedByScripts):
        processes = _count(reason.processes, "process")
        ranks = name_locations(reason.ranks)
        sentence = f"not judged by rank: the script started {processes} itself, under {ranks}"
        if reason.share_a_node:
            sentence += "; such a script needs one task per node"
        return sentence
    return ""


def all_notes(verdict: Verdict) -> list[str]:
    """Return what could not be seen, in sentences."""
    if verdict.is_gpu_power_unknown:
        return [*verdict.notes, GPU_POWER_IS_UNKNOWN]
    return verdict.notes


def next_request_sentence(too_much: list[Request]) -> str:
    """Return a sentence on the sbatch options that would have been enough; "" for none."""
    if not too_much:
        return ""
    options = []
    used = []
    resumes = []
    for request in too_much:
        options.append(f"{request.option}={request.enough}{request.unit}")
        used.append(f"{request.used:.1f} of {request.option}={request.asked:g}{request.unit}")
        if request.resume >= LEAST_RESUME:
            resumes.append(f"; a resume may take {request.resume:.1f} more")
    return (
        f"next time {' '.join(options)} would be enough: at its peak, the job used {' and '.join(used)}"
        f"{''.join(resumes)}."
    )


def last_ranks_words(verdict: Verdict) -> str:
    """Return words on the ranks that were there in the last samples, and what they did; "" for none."""
    texts = []
    if verdict.last_ranks.idle:
        texts.append(f"{name_locations(verdict.last_ranks.idle)} (idle)")
    if verdict.last_ranks.at_work:
        texts.append(f"{name_locations(verdict.last_ranks.at_work)} (at work)")
    return " and ".join(texts)


def devices_words(devices: Devices) -> str:
    """Return words such as "2 x NVIDIA H100 on 2 nodes"."""
    if devices.gpus and devices.gpu_name:
        text = f"{devices.gpus} x {devices.gpu_name}"
    elif devices.gpus:
        text = _count(devices.gpus, "GPU")
    else:
        text = _count(devices.cpu_workers, "CPU worker")
    if devices.nodes > 1:
        text += f" on {devices.nodes} nodes"
    return text


def name_locations(locations: list[Location]) -> str:
    """Name locations in words, such as "GPUs 0, 1 on n1"; for many only how many."""
    if isinstance(locations[0], str):
        if len(locations) > MOST_NODES_TO_NAME:
            return _count(len(locations), "node")
        return " and ".join(locations)
    noun = "GPU" if isinstance(locations[0], GpuId) else "rank"
    nodes = sorted({location.node for location in locations})
    if len(nodes) > MOST_NODES_TO_NAME or len(locations) > MOST_LOCATIONS_TO_NAME:
        return f"{_count(len(locations), noun)} on {_count(len(nodes), 'node')}"
    texts = []
    for node in nodes:
        numbers = sorted(_number(location) for location in locations if location.node == node)
        plural = "s" if len(numbers) > 1 else ""
        texts.append(f"{noun}{plural} {', '.join(map(str, numbers))} on {node}")
    return " and ".join(texts)


# --- the issues -------------------------------------------------------------------------------------


@singledispatch
def _sentence(evidence: Evidence, issue: Issue, is_plain: bool) -> str:
    """Return the sentence for evidence of one kind."""
    raise NotImplementedError(f"{type(evidence).__name__} has no words")


@_sentence.register
def _ranks_never_met(evidence: RanksNeverMet, issue: Issue, is_plain: bool) -> str:
    return (
        f"the {evidence.ranks} ranks never met: each trained on its own, and may have overwritten the files "
        "of the others. Ask for a single task, or make them one training with init_process_group (torchrun's "
        "variables are set) and DistributedDataParallel."
    )


@_sentence.register
def _unused_gpus(evidence: UnusedGpus, issue: Issue, is_plain: bool) -> str:
    if evidence.used_gpus:
        fewer = _count(evidence.used_gpus, "GPU")
        remedy = f"ask for {fewer}, or start one rank per GPU (only with DataParallel does one use several)"
    else:
        remedy = "find out why the training runs on the CPU (its log names the device), or ask for no GPU"
    return f"no rank uses {name_locations(issue.locations)}: {remedy}."


@_sentence.register
def _paused_ranks(evidence: PausedRanks, issue: Issue, is_plain: bool) -> str:
    ranks = name_locations(issue.locations)
    time = f"{evidence.seconds:.0f} s"
    if evidence.cause is PauseCause.STOPPED:
        return f"SIGSTOP paused {ranks} for {time}: find out who sent it, and resume with kill -CONT."
    if evidence.cause is PauseCause.FILE_SYSTEM:
        return f"{ranks} waited {time} for a file system: stage the data on the node's own disk."
    return f"{ranks} did nothing for {time}: {_debugger(is_plain)} shows where each rank waits."


@_sentence.register
def _slow_rank(evidence: SlowRank, issue: Issue, is_plain: bool) -> str:
    return (
        f"{name_locations(issue.locations)} takes {evidence.times_as_long:.1f} times as long as the others "
        f"for its own part of a step, so they wait for {_percent(evidence.waiting_share)} of the time: "
        "compare its cores, its clock and its work with theirs."
    )


@_sentence.register
def _waiting_for_batches(evidence: WaitingForBatches, issue: Issue, is_plain: bool) -> str:
    if evidence.loader_workers > 0:
        workers = _count(round(evidence.loader_workers), "loader worker")
        if len(issue.locations) > 1:
            workers += " each"
        if evidence.cores_per_worker >= 0:
            workers += f", at {_percent(evidence.cores_per_worker)} of a core"
    else:
        workers = "no loader workers"
    if evidence.is_resident:
        other_remedy = "do less work for each batch"
    else:
        other_remedy = "keep the data in memory" + _option("--loader resident", is_plain)
    return (
        f"waiting for batches takes {_percent(evidence.waiting_share)} of the training time of "
        f"{name_locations(issue.locations)} ({workers}): {_remedy_for_workers(evidence, is_plain)}, "
        f"or {other_remedy}."
    )


def _remedy_for_workers(evidence: WaitingForBatches, is_plain: bool) -> str:
    if not evidence.loader_workers > 0:
        options = "--loader workers --num-workers 4, and --cpus-per-task for them"
        return "use some" + _option(options, is_plain)
    if evidence.all_cores_in_use:
        return "all cores are busy, so ask for more (--cpus-per-task)"
    if evidence.cores_per_worker < BUSY_LOADER_CORES:
        return "the workers wait as well, for files (stage these on the node) or for cores"
    return "use more" + _option("--num-workers", is_plain)


@_sentence.register
def _slow_communication(evidence: SlowCommunication, issue: Issue, is_plain: bool) -> str:
    remedy = "use a larger batch per device, or accumulate several micro-batches (03_multigpu_ddp/beyond)"
    if evidence.network_mb_s >= 0:
        remedy += (
            f"; each node sends and receives {evidence.network_mb_s:.0f} MB/s: check with slurm/doctor.py "
            "--job whether its network can do more"
        )
    share = _percent(evidence.communication_share)
    return f"averaging the gradients takes {share} of the training time: {remedy}."


@_sentence.register
def _shared_cores(evidence: SharedCores, issue: Issue, is_plain: bool) -> str:
    cores = _count(evidence.cores, "core")
    if evidence.used_by_others:
        remedy = "end them, or wait until they end"
        if evidence.exclusive_helps:
            remedy = "ask for whole nodes (--exclusive)"
        reason = f"other programs also use its {cores}: {remedy}"
    else:
        sharing = _count(evidence.ranks, "rank")
        if evidence.loader_workers:
            sharing += f" and {_count(evidence.loader_workers, 'loader worker')}"
        reason = (
            f"{sharing} share {cores}: ask for more cores (--cpus-per-task, with srun --cpu-bind=cores), or "
            "use fewer threads (OMP_NUM_THREADS) and workers"
        )
    return (
        f"waiting for a core takes {_percent(evidence.waiting_share)} of the time of "
        f"{name_locations(issue.locations)}, because {reason}."
    )


@_sentence.register
def _idle_cpus(evidence: IdleCpus, issue: Issue, is_plain: bool) -> str:
    return (
        f"{name_locations(issue.locations)} computed for at most {_percent(evidence.computing_share)} of the "
        f"time, and waited for something that cannot be seen from outside: {_debugger(is_plain)} shows what."
    )


@_sentence.register
def _throttled_gpus(evidence: ThrottledGpus, issue: Issue, is_plain: bool) -> str:
    slows_down = (
        f"slows down {name_locations(issue.locations)} for {_percent(evidence.time_share)} of the time"
    )
    if evidence.clock_mhz <= evidence.clock_limit_mhz:
        slows_down += f", to {evidence.clock_mhz:,.0f} of {evidence.clock_limit_mhz:,.0f} MHz"
    if evidence.cause is ThrottlingCause.HEAT:
        celsius = f" ({evidence.temperature_c:.0f} C)" if evidence.temperature_c > 0 else ""
        return f"heat{celsius} {slows_down}: report it to your admin, and use a different node."
    if evidence.cause is ThrottlingCause.POWER:
        limit = f" ({evidence.power_limit_w:.0f} W)" if evidence.power_limit_w > 0 else ""
        return f"a power cap{limit} {slows_down}: ask your admin why."
    return (
        f"something other than heat or a power cap, such as application clocks, {slows_down}: ask your admin "
        "(nvidia-smi -q -d CLOCK,PERFORMANCE)."
    )


@_sentence.register
def _full_gpu_memory(evidence: FullGpuMemory, issue: Issue, is_plain: bool) -> str:
    remedy = "use a smaller batch per GPU, or bf16"
    return _full_memory("the memory of", issue, evidence.used_share, remedy)


@_sentence.register
def _full_host_memory(evidence: FullHostMemory, issue: Issue, is_plain: bool) -> str:
    remedy = "ask for more (--mem), or use fewer loader workers"
    return _full_memory("the job's memory on", issue, evidence.used_share, remedy)


def _full_memory(memory: str, issue: Issue, used_share: float, remedy: str) -> str:
    where = name_locations(issue.locations)
    return f"{_percent(used_share)} of {memory} {where} was in use, and at 100 % the job fails: {remedy}."


@_sentence.register
def _idle_gpus(evidence: IdleGpus, issue: Issue, is_plain: bool) -> str:
    others = ", while other GPUs work" if evidence.others_work else ""
    return (
        f"no work reaches {name_locations(issue.locations)}{others} ({_power_words(evidence.power)}): check "
        "in the log which device its rank computes on."
    )


@_sentence.register
def _launch_bound(evidence: LaunchBound, issue: Issue, is_plain: bool) -> str:
    gpus = name_locations(issue.locations)
    if issue.grade is Grade.FASTER:
        problem = (
            f"{Grade.FASTER.value}: no kernel runs for {_percent(evidence.gap_share)} of the time, which "
            f"leaves {gpus}"
        )
    elif evidence.has_gaps:
        problem = f"gaps between kernels leave {gpus}"
    else:
        problem = f"short kernels leave {gpus}"
    seen = _power_words(evidence.power)
    if evidence.step_seconds >= 0:
        seen += f", {1000 * evidence.step_seconds:.3g} ms a step"
    remedy = "use a larger batch per GPU" + _option("--batch-size", is_plain)
    if evidence.may_lack_batches:
        remedy += ", loader workers if there are none"
    if evidence.is_data_parallel:
        remedy += ", or DDP (03_multigpu_ddp)"
    elif not evidence.is_captured:
        remedy += f", or a captured step (03_multigpu_ddp/beyond/by_feature/captured.py; {LAUNCHES_PAGE})"
    whose = "its" if len(issue.locations) == 1 else "their"
    return f"{problem} at {_percent(evidence.load)} of {whose} power above idle ({seen}): {remedy}."


# --- parts of sentences -----------------------------------------------------------------------------


def _option(options: str, is_plain: bool) -> str:
    """Return options of the kit in brackets; "" for a script that does not have them."""
    return "" if is_plain else f" ({options})"


def _debugger(is_plain: bool) -> str:
    return "py-spy dump" if is_plain else "--debug"


def _power_words(power: PowerReading) -> str:
    text = f"{power.power_w:.0f} of {power.limit_w:.0f} W"
    if power.utilisation_percent >= 0:
        text += f", utilisation {power.utilisation_percent:.0f} %"
    return text


def _number(location: GpuId | RankId) -> int:
    return location.index if isinstance(location, GpuId) else location.rank


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
