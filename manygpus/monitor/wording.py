"""The verdict in words: the lines of a job's log."""

import math

from manygpus.monitor.findings.words import count, name_locations
from manygpus.monitor.resource_use import ResourceUse
from manygpus.monitor.sampled_job import LEAST_SAMPLES
from manygpus.monitor.verdict import Devices, NothingSeen, StartedByScripts, TooShort, Verdict

GPU_POWER_IS_UNKNOWN = "the power of the GPUs, without which gaps between kernels cannot be seen"
# A resume that takes less is not worth a word.
LEAST_RESUME = 0.05


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
    return [finding.sentence(verdict.is_plain) for finding in verdict.findings]


def not_judged_sentence(verdict: Verdict) -> str:
    """Return a sentence on what could not be judged; "" if all could."""
    reason = verdict.not_judged
    if isinstance(reason, NothingSeen):
        return "nothing to judge: no process that has loaded PyTorch was seen"
    if isinstance(reason, TooShort):
        seen = f"{count(reason.samples, 'sample')} of its training after the warm-up"
        return f"too short to tell: {seen}, but {LEAST_SAMPLES} are needed"
    if isinstance(reason, StartedByScripts):
        processes = count(reason.processes, "process")
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


def next_request_sentence(too_much: list[ResourceUse]) -> str:
    """Return a sentence on the sbatch options that would have been enough; "" for none."""
    if not too_much:
        return ""
    options = []
    used = []
    resumes = []
    for resource in too_much:
        options.append(f"{resource.option}={resource.enough}{resource.unit}")
        used.append(f"{resource.used:.1f} of {resource.option}={resource.asked:g}{resource.unit}")
        if resource.resume >= LEAST_RESUME:
            resumes.append(f"; a resume may take {resource.resume:.1f} more")
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
        text = count(devices.gpus, "GPU")
    else:
        text = count(devices.cpu_workers, "CPU worker")
    if devices.nodes > 1:
        text += f" on {devices.nodes} nodes"
    return text
