"""The verdict on a job's samples: what it wastes of what it asked for, the worst first, each with its remedy.

After that comes what is not waste, but could be faster.

verdict = judge(folder)  # the folder `monitor` of a job
print(*verdict.lines("job 12"), sep="\n")

The utilisation of a GPU decides nothing by itself: it is 100 % while a kernel does nothing but wait.
"""

import json
import math
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd

from trainkit.files import replacing
from trainkit.monitor.sampled_job import CORES, LEAST_MOMENTS, Place, SampledJob
from trainkit.ranges import parse_ranges
from trainkit.record import records
from trainkit.record.columns import DP
from trainkit.record.samples import GPU, NEVER_MET, NODE, RANK

SCHEMA_VERSION = 1
FILE = "verdict.json"
WORTH = 0.1  # a smaller share of the time is not worth a line
# Of the training time. With enough loader workers ahead of it, the training waits for 0 to 5 %. A resident
# loader causes no waiting, but to index and normalise is up to a third of a step that is all launches.
DATA_WAIT, DATA_WORK = 0.2, 0.4
EXCHANGE = 0.4  # of the training time. From 0.5 on two devices are no faster than one
LONG_EPOCH = 1.0  # s: in a shorter one, what comes once in an epoch would be taken for the exchange
CROWDED = 0.2  # of the time, that a rank could run but waits for a core: alone on it, below 0.05
CORES_FULL = 0.85  # of the cores that may be used; below this, other programs fill them
STARVED, LOADERS_FULL = 0.5, 0.8  # cores of a CPU rank that waits for batches, and of each loader worker then
# A GPU's power, 0 when idle and 1 at its limit. Kernels that fill it take 0.4 to 1; short ones with gaps
# between them, or NCCL's that wait for another rank, below 0.25, at up to 100 % utilisation. An H100 that our
# network fills takes 0.6; at 0.35 it had no kernel for a third of the time, which a captured step saved.
IDLE, LOW, HALF = 0.05, 0.3, 0.5
NO_KERNELS, KERNELS = 5, 80  # % utilisation: with low power it shows the reason
GAPS = 0.2  # of the time without a kernel, at less than half of the power: it could be faster
RESTS = 0.7  # of the time without work, for a rank on a CPU that has nothing to wait for
STALL, NO_CORE = 30.0, 0.05  # s; cores of a process that does nothing
HOT = 0.05  # of the time: in a well-cooled server heat never slows a GPU down
# At the limit of its power a GPU has 0.65 to 0.9 of its highest clock, and wastes nothing. Below is a cap.
CAPPED_CLOCK, CAPPED = 0.6, 0.2
# What makes ranks wait leaves their GPUs at low power, too, and is the better explanation.
WAITING = {"waiting_for_loader", "stalled_rank", "network_bound", "shared_cores", "throttled"}
WASTE, DANGER, FASTER = "waste", "danger", "could be faster"
# By the state of its process: the sentence about a rank that does nothing.
PAUSED = {
    "T": "SIGSTOP held {where} for {seconds:.0f} s: find out who sent it, and resume with kill -CONT.",
    "D": "a file system held {where} for {seconds:.0f} s: stage the data to the node's own disk.",
    "": "{where} did nothing for {seconds:.0f} s: --debug shows where each rank waits.",
}
# Why a GPU's clock is low: the least share of the time, and the sentence.
SLOWED = {
    "heat": (HOT, "heat{heat} {how}: report it to your admin, and take another node."),
    "power": (CAPPED, "a cap{power} {how}: ask your admin why."),
    "other": (
        CAPPED,
        "something other than heat or a power cap, such as application clocks, {how}: ask your admin "
        "(nvidia-smi -q -d CLOCK,PERFORMANCE).",
    ),
}
# Memory that is nearly full, by whose it is: the kind, the least share of all, and the sentence. A GPU's is
# there to be filled; on a host the kernel kills as soon as --mem is reached.
FULL = {
    GPU: ("memory_full", 0.95, "the memory", "take a smaller batch per GPU, or bf16"),
    NODE: ("host_memory", 0.9, "the job's memory", "ask for more (--mem), or take fewer loader workers"),
}
Found = AbstractSet[str]  # the kinds that the rules before have found
OPTIONS = re.compile(r" \(--(?:loader|num-workers|batch-size)[^)]*\)")  # that only our scripts have
LAUNCHES = "01_singlegpu/README.md#when-the-gpu-waits-for-the-cpu"


@dataclass(frozen=True)
class Issue:
    """An issue of a job. Its `grade`: a waste, a danger, which is no loss yet, or what could be faster.

    `number` is the main one of its sentence. `share` is the share of the devices' time that is lost, 0 to 1;
    for a danger 0.
    """

    kind: str
    where: str
    number: float
    sentence: str
    share: float
    grade: str = WASTE


@dataclass(frozen=True)
class Verdict:
    """`findings`, the worst first, then what could be faster; `unknown`, if not all could be judged.

    `seconds` were sampled, of `devices` (in words). `energy_kwh` is that of all GPUs of the job, NaN if it
    is unknown. `records` are the CSVs of its trainings.
    `notes` say what could not be seen, and `enough` what less to ask for next time, if anything.
    `still_there` names the ranks of the last samples, and whether they did anything.
    """

    findings: list[Issue]
    unknown: str
    seconds: float
    devices: str
    energy_kwh: float
    records: list[Path]
    notes: list[str]
    enough: str
    still_there: str

    def lines(self, name: str) -> list[str]:
        """Return a line for each finding; the last one says what was watched of the job called `name`."""
        lines = [issue.sentence for issue in self.findings]
        if self.unknown or not lines:
            lines.append(self.unknown or "no waste found")
        if self.notes:
            more = f" ({len(self.notes) - 1} more)" if len(self.notes) > 1 else ""
            lines.append(f"not seen: {self.notes[0]}{more}")
        lines += filter(None, [self.enough])
        watched = f"{name} was watched for {self.seconds:,.0f} s: {self.devices}"
        if math.isfinite(self.energy_kwh):
            watched += f", {self.energy_kwh:.3g} kWh"
        return [*lines, watched]

    def facts(self) -> dict[str, object]:
        """Return the verdict for JSON, with null for NaN."""
        facts = {"schema_version": SCHEMA_VERSION} | asdict(self)
        del facts["records"]
        if math.isnan(self.energy_kwh):
            facts["energy_kwh"] = None
        return facts


def judge(folder: Path) -> Verdict:
    """Judge the job whose samples are in `folder`.

    Raises:
        UserError: if there are none.
    """
    job = SampledJob(folder)
    found: dict[str, Issue] = {}
    for rule in RULES:  # if two find the same kind, the first says more
        for issue in rule(job, found.keys()):
            found.setdefault(issue.kind, issue)
    findings = sorted(
        found.values(), key=lambda issue: (issue.kind != "never_met", issue.grade == FASTER, -issue.share)
    )
    if job.plain:
        sentences = [OPTIONS.sub("", one.sentence).replace("--debug", "py-spy dump") for one in findings]
        findings = [replace(one, sentence=text) for one, text in zip(findings, sentences, strict=True)]
    unknown = ""
    if not job.rows[GPU] and not job.rows[RANK]:
        unknown = "nothing to judge: no process that has loaded PyTorch was seen"
    elif job.moments < LEAST_MOMENTS:
        samples = f"{_count(job.moments, 'sample')} of its training past the warm-up"
        unknown = f"too short to tell: {samples}, and {LEAST_MOMENTS} are needed"
    enough = "" if unknown else _next_request(job, found.keys())
    unseen = job.notes
    if job.judged[GPU] and all(of.power_w.isna().all() for of in job.judged[GPU].values()):
        unseen = [*unseen, "the power of the GPUs, without which gaps between kernels do not show"]
    return Verdict(
        findings=findings,
        unknown=unknown or _not_judged_by_rank(job),
        seconds=job.seconds,
        devices=_devices(job),
        energy_kwh=job.joules() / 3.6e6,
        records=[training.path for training in job.trainings],
        notes=unseen,
        enough=enough,
        still_there=_name_last_ranks(job),
    )


def keep(folder: Path, verdict: Verdict) -> None:
    """Write `verdict.json` to `folder`, and `<run_id>.monitor.json` next to the CSV of each training.

    Raises:
        OSError: if one of them cannot be written.
    """
    facts = verdict.facts()
    for path in (folder / FILE, *map(records.verdict_file, verdict.records)):
        with replacing(path) as file:
            json.dump(facts, file, indent=1)


def _name_last_ranks(job: SampledJob) -> str:
    """Return a clause on the ranks that were there in the last samples, and what they did; "" for none."""
    last = job.ranks_in_the_last_samples()
    idle = [rank for rank in last if not last[rank].cores >= NO_CORE]
    at_work = [rank for rank in last if rank not in idle]
    kinds = {"idle": idle, "at work": at_work}
    return " and ".join(f"{_name_places('rank', kinds[how])} ({how})" for how in kinds if kinds[how])


def _not_judged_by_rank(job: SampledJob) -> str:
    """Return a sentence on the processes that the script has started itself; "" if there are none."""
    others = {rank: job.others(rank) for rank in job.places_at_the_end(RANK)}
    starters = [rank for rank in others if others[rank]]
    if not starters:
        return ""
    number, where = _count(sum(others.values()), "process"), _name_places("rank", starters)
    sentence = f"not judged by rank: {number} that the script started itself, under {where}"
    several = len({node for node, _ in job.launchers}) < len(job.launchers)
    return sentence + ("; such a script needs one task on each node" if several else "")


def _next_request(job: SampledJob, found: Found) -> str:
    """Return a sentence on the sbatch options that would have been enough, if less than those asked for."""
    needs = job.needs()
    # Their remedy takes cores; and nobody knows whether a script's own processes wait for cores.
    if found & {"waiting_for_loader", "shared_cores"} or any(map(job.others, job.rows[RANK])):
        needs = [need for need in needs if need.option != CORES]
    less = [need for need in needs if need.less]
    if not less:
        return ""
    options = " ".join(f"{need.option}={need.enough}{need.unit}" for need in less)
    used = ", ".join(f"{need.used:.1f} of {need.option}={need.asked:g}{need.unit}" for need in less)
    resume = "".join(f", and a resume may take {one.resume:.1f} more" for one in less if one.resume >= 0.05)
    return f"next time {options} would be enough: the job used {used} at the peak{resume}."


def _find_ranks_that_never_met(job: SampledJob, _: Found) -> Iterator[Issue]:
    """Find ranks that each trained by itself. Those of a record have met, or it would have been refused."""
    if job.trainings or not job.ranks_never_met():
        return
    number = len(job.places_at_the_end(RANK))
    sentence = (
        f"the {number} ranks {NEVER_MET}: each trained by itself, and may have overwritten the files of the "
        "others. Ask for one task; or let them train as one, by init_process_group (torchrun's variables are "
        "set) and DistributedDataParallel."
    )
    yield Issue(
        "never_met", _name_places("rank", job.places_at_the_end(RANK)), number, sentence, 1 - 1 / number
    )


def _find_unused_gpus(job: SampledJob, _: Found) -> Iterator[Issue]:
    gpus = job.judged[GPU]
    unused = [gpu for gpu in gpus if job.is_unused(gpu)]
    if not unused:
        return
    where, left = _name_places(GPU, unused), len(gpus) - len(unused)
    remedy = "see why its log names the CPU as its device, or ask for none"
    if left:
        remedy = f"ask for {_count(left, 'GPU')}, or start a rank for each (only DataParallel uses several)"
    yield Issue("no_rank", where, len(unused), f"no rank uses {where}: {remedy}.", len(unused) / len(gpus))


def _find_paused_ranks(job: SampledJob, _: Found) -> Iterator[Issue]:
    """Find ranks that did nothing for a long time: stopped, stuck in a file system, or waiting for one.

    Waiting for batches is another finding.
    """
    ranks = job.rows[RANK].keys() - _waits_for_batches(job).keys()
    paused = {rank: job.longest_pause(rank, NO_CORE, NO_KERNELS) for rank in sorted(ranks)}
    seconds = {rank: rows.seconds[1:].sum() for rank, rows in paused.items()}
    held = [rank for rank in seconds if seconds[rank] >= max(STALL, WORTH * job.seconds)]
    if not held:
        return
    states = {rank: paused[rank]["name"].mode()[0] for rank in held}
    state = next(state for state in PAUSED if state in (*states.values(), ""))
    ranks = [rank for rank in held if states[rank] == state] or held
    where, longest = _name_places("rank", ranks), max(seconds[rank] for rank in ranks)
    sentence = PAUSED[state].format(where=where, seconds=longest)
    yield Issue("stalled_rank", where, longest, sentence, longest / max(job.seconds, longest))


def _find_waiting_for_batches(job: SampledJob, _: Found) -> Iterator[Issue]:
    waits = _waits_for_batches(job)
    if waits:
        yield _waiting_for_batches(job, list(waits), max(waits.values()))


def _waits_for_batches(job: SampledJob) -> dict[Place, float]:
    """Return the ranks that wait for batches, and for which share of the time.

    They have timed this themselves; or it shows from outside, where there is no record.
    """
    shares = dict(job.shares.data[job.shares.data >= (DATA_WAIT if job.has_loaders else DATA_WORK)])
    if shares or (job.shares.own > 0).any():
        return {job.place_of_rank(rank): share for rank, share in shares.items()}
    starved = {}  # as of a captured step, or a split network
    for rank, rows in job.judged[RANK].items():
        load, at_work = job.load_of_rank(rank), rows.loader_cores.mean()
        # Half of the loader workers may be for the test set, and idle.
        loaders_full = at_work >= LOADERS_FULL * rows.loaders.mean() / 2 > 0
        hardly_works = load < (LOW if rank in job.gpus_of_rank else STARVED)
        only_loaders_work = load < NO_CORE <= at_work  # these may have few cores themselves
        if loaders_full and hardly_works or only_loaders_work:
            starved[rank] = 1 - load
    return {rank: share for rank, share in starved.items() if rank not in job.launchers}


def _find_slow_rank(job: SampledJob, _: Found) -> Iterator[Issue]:
    """Find the rank that the others wait for, by the times that each has measured itself."""
    own = _timed_work(job)
    if own.empty:
        return
    slowest = own.idxmax()
    times, lost = own[slowest] / own.drop(slowest).median(), own[slowest] - own.mean()
    place = job.place_of_rank(slowest)
    # Its batches, fewer cores than the others, or a hot GPU: another rule finds that.
    others = max((job.waits_for_core(other) for other in job.judged[RANK] if other != place), default=0)
    explained = job.waits_for_core(place) >= max(CROWDED, WORTH + others)
    explained |= job.shares.data[slowest] >= (DATA_WAIT if job.has_loaders else DATA_WORK)
    gpus = [job.judged[GPU][gpu] for gpu in job.gpus_of_rank.get(place, []) if gpu in job.judged[GPU]]
    explained |= any(rows.throttled.str.contains("heat").mean() > HOT for rows in gpus)
    if times >= records.SLOW_RANK_FACTOR and lost >= WORTH and not explained:
        where = _name_places("rank", [place])
        sentence = (
            f"{where} takes {times:.1f} times as long as the others for its own part of a step, and they "
            f"wait for {_percent(lost)} of the time: compare its cores, its clock and its work with theirs."
        )
        yield Issue("stalled_rank", where, times, sentence, lost)


def _find_slow_exchange(job: SampledJob, _: Found) -> Iterator[Issue]:
    share = 1 - _timed_work(job).max()
    if not share >= EXCHANGE or not job.steady.train_seconds.mean() >= LONG_EPOCH:
        return
    remedy = "take a larger batch per device, or accumulate several micro-batches (03_multigpu_ddp/beyond)"
    nodes = job.places_at_the_end(NODE)
    network = job.mean(NODE, job.judged[NODE], "network_mb_s")
    if len(nodes) > 1 and network >= 0:
        remedy += f"; each node sends and receives {network:.0f} MB/s: can its network do more "
        remedy += "(slurm/doctor.py --job)?"
    sentence = f"the exchange of gradients takes {_percent(share)} of the training time: {remedy}"
    yield Issue("network_bound", _name_places("node", nodes), 100 * share, sentence, share)


def _find_shared_cores(job: SampledJob, _: Found) -> Iterator[Issue]:
    """Find ranks whose threads wait for a core, unless their GPU is busy meanwhile."""
    waiting = {rank: job.waits_for_core(rank) for rank in job.judged[RANK]}
    crowded = [
        rank
        for rank, part in waiting.items()
        if part >= CROWDED and not (rank in job.gpus_of_rank and job.load_of_rank(rank) >= LOW)
    ]
    if not crowded:
        return
    worst = max(crowded, key=waiting.get)
    here = [rows for rank, rows in job.judged[RANK].items() if rank[0] == worst[0]]
    cores = {*parse_ranges(",".join(rows.core_list.iloc[-1] for rows in here))}
    loaders = sum(round(rows.loaders.mean()) for rows in here if rows.loaders.mean() > 0)
    crowd = _count(len(here), "rank") + (f" and {_count(loaders, 'loader worker')}" if loaders else "")
    room = _count(len(cores), "core")
    if job.mean(NODE, [(worst[0], 0)], "cores") < CORES_FULL * len(cores):
        own = "ask for cores of your own (--exclusive)" if job.of_slurm else "end them, or wait for their end"
        remedy = f"other programs also use its {room}: {own}"
    else:
        remedy = (
            f"{crowd} share {room}: ask for more --cpus-per-task, with srun --cpu-bind=cores, or take fewer "
            "threads (OMP_NUM_THREADS) and workers"
        )
    where = _name_places("rank", crowded)
    sentence = f"waiting for a core takes {_percent(waiting[worst])} of the time of {where}, as {remedy}."
    yield Issue("shared_cores", where, 100 * waiting[worst], sentence, waiting[worst])


def _find_throttled_gpus(job: SampledJob, _: Found) -> Iterator[Issue]:
    """Find GPUs with a low clock: whenever heat is the reason, for other reasons only if it is very low."""
    for why, (least, words) in SLOWED.items():
        slowed = {gpu: rows[rows.throttled.str.contains(why)] for gpu, rows in job.judged[GPU].items()}
        for gpu, rows in slowed.items() if why != "heat" else ():
            slowed[gpu] = rows[rows.clock_mhz < CAPPED_CLOCK * rows.clock_limit_mhz]
        parts = {gpu: len(rows) / len(job.judged[GPU][gpu]) for gpu, rows in slowed.items()}
        if gpus := [gpu for gpu, part in parts.items() if part >= least]:
            where, worst = _name_places(GPU, gpus), max(gpus, key=parts.get)
            mean = slowed[worst].mean(numeric_only=True)
            how, lost = f"slows down {where} for {_percent(parts[worst])} of the time", 0.0
            if mean.clock_mhz <= mean.clock_limit_mhz:
                how += f", to {mean.clock_mhz:,.0f} of {mean.clock_limit_mhz:,.0f} MHz"
                lost = parts[worst] * (1 - mean.clock_mhz / mean.clock_limit_mhz)
            heat = f" ({mean.temperature_c:.0f} C)" if mean.temperature_c > 0 else ""
            power = f" (power limit {mean.power_limit_w:.0f} W)" if mean.power_limit_w > 0 else ""
            sentence = words.format(how=how, heat=heat, power=power)
            yield Issue("throttled", where, 100 * parts[worst], sentence, lost)
            return


def _find_full_memory(job: SampledJob, _: Found) -> Iterator[Issue]:
    """Find GPUs, and nodes, whose memory was nearly full at any moment."""
    for what, (kind, least, memory, remedy) in FULL.items():
        rows_of = job.rows[what].items()
        parts = {place: (rows.memory_mb / rows.memory_limit_mb).max() for place, rows in rows_of}
        if full := [place for place in parts if least <= parts[place] < math.inf]:
            most, where = 100 * max(parts[place] for place in full), _name_places(what, full)
            sentence = f"{most:.0f} % of {memory} on {where} was in use; at 100 % the job ends: {remedy}."
            yield Issue(kind, where, most, sentence, 0.0, DANGER)


def _find_low_power(job: SampledJob, found: Found) -> Iterator[Issue]:
    """Find GPUs without work, and those that wait for their next kernel."""
    gpus = job.judged[GPU]
    busy = {gpu: job.load(gpu) for gpu in gpus if not job.is_unused(gpu) and job.load(gpu) > -math.inf}
    idle = [gpu for gpu in busy if busy[gpu] < IDLE and job.mean(GPU, [gpu], "utilisation") < NO_KERNELS]
    explained = bool(found & WAITING)
    if idle and (not explained or max(busy.values()) >= LOW):
        where, others = _name_places(GPU, idle), ", while others work" if len(idle) < len(busy) else ""
        sentence = (
            f"no work reaches {where}{others} ({_power(job, idle)}): see in the log which device its rank "
            "computes on."
        )
        yield Issue("idle_gpu", where, len(idle), sentence, len(idle) / len(gpus))
    low = [gpu for gpu in busy if busy[gpu] < LOW and gpu not in idle]
    with_gaps = [gpu for gpu in busy if LOW <= busy[gpu] < HALF and _gaps(job, gpu) >= GAPS]
    if (low or with_gaps) and not explained:
        yield _launch_bound(job, low or with_gaps, WASTE if low else FASTER)


def _find_idle_cpus(job: SampledJob, found: Found) -> Iterator[Issue]:
    """Find ranks on a CPU that hardly compute, if nothing that is known explains it."""
    if job.judged[GPU] or found & WAITING:
        return
    rests = {rank: 1 - job.load_of_rank(rank) for rank in job.judged[RANK].keys() - job.launchers}
    idle = sorted(rank for rank, part in rests.items() if part >= RESTS)
    if idle:
        where, least = _name_places("rank", idle), min(rests[rank] for rank in idle)
        sentence = (
            f"{where} computed for {_percent(1 - least)} of the time at most, and waited for something that "
            "cannot be seen from outside: --debug shows what."
        )
        share = sum(rests[rank] for rank in idle) / len(job.judged[RANK])
        yield Issue("idle_cpu", where, 100 * least, sentence, share)


def _launch_bound(job: SampledJob, gpus: list[Place], grade: str) -> Issue:
    where, few = _name_places(GPU, gpus), not job.mean(GPU, gpus, "utilisation") >= KERNELS
    busy = sum(map(job.load, gpus)) / len(gpus)
    number, lost = busy, 1 - busy
    words = f"{'gaps between' if few else 'short'} kernels leave {where}"
    if grade == FASTER:
        number = lost = sum(_gaps(job, gpu) for gpu in gpus) / len(gpus)
        words = f"{FASTER}: for {_percent(lost)} of the time no kernel runs on {where},"
    remedy = "a larger batch per GPU (--batch-size)"
    if few and job.shares.empty:  # which may also be for want of batches
        remedy += ", loader workers if there are none"
    stages = job.steady.stage.astype(str)
    if stages.str.startswith(DP).any():  # whose step cannot be captured
        remedy += ", or DDP (03_multigpu_ddp)"
    elif not stages.str.contains("captured").any():
        remedy += f", or a captured step (03_multigpu_ddp/beyond/captured.py; {LAUNCHES})"
    seconds, steps = job.steady[["train_seconds", "steps"]].sum()
    step = f", {1000 * seconds / steps:.3g} ms a step" if steps else ""
    how = f"at {_percent(busy)} of its power above idle ({_power(job, gpus)}{step})"
    share = lost * len(gpus) / len(job.judged[GPU])
    return Issue("launch_bound", where, 100 * number, f"{words} {how}: {remedy}.", share, grade)


def _gaps(job: SampledJob, gpu: Place) -> float:
    """Return the share of the time that no kernel runs, though there is a batch to train on, or NaN.

    It excludes waiting for loader workers, and the time between epochs too short to be judged alone.
    """
    trained = job.steady.train_seconds.sum()
    judged = sum(ended - began for began, ended in job.windows)
    between = max(0.0, 1 - trained / judged) if trained else 0.0
    waits = job.shares.data.max() if job.has_loaders and len(job.shares) else 0.0
    return 1 - job.mean(GPU, [gpu], "utilisation") / 100 - between - waits


def _waiting_for_batches(job: SampledJob, ranks: list[Place], share: float) -> Issue:
    # Of those that are seen, some are for the test set, and idle.
    seen = job.mean(RANK, ranks, "loaders")
    loaders = job.steady.workers_per_loader.max() if len(job.steady) else seen
    each = job.mean(RANK, ranks, "loader_cores") / loaders if loaders else math.nan
    workers = "no loader workers"
    remedy = "take some (--loader workers --num-workers 4, with --cpus-per-task for them)"
    if loaders > 0:
        workers = _count(round(loaders), "loader worker") + (" each" if len(ranks) > 1 else "")
        workers += f", at {_percent(each)} of a core" if each >= 0 else ""
        remedy = "take more (--num-workers)"
        node = ranks[0][0], 0
        lists = job.judged[NODE].get(node, job.table[:0]).core_list.unique()
        room = len({*parse_ranges(",".join(lists))}) or math.inf
        if job.mean(NODE, [node], "cores") >= CORES_FULL * room:
            remedy = "all cores are in use, ask for more (--cpus-per-task)"
        elif each < LOADERS_FULL:
            remedy = "the workers also wait, for files (stage them on the node) or for cores"
    resident = set(job.steady.loader) == {"resident"}
    remedy += (
        ", or prepare less for each batch" if resident else ", or keep the data in memory (--loader resident)"
    )
    where = _name_places("rank", ranks)
    sentence = (
        f"waiting for batches takes {_percent(share)} of the training time of {where} ({workers}): {remedy}."
    )
    return Issue("waiting_for_loader", where, 100 * share, sentence, share)


def _timed_work(job: SampledJob) -> pd.Series:
    """Return the share of the training time that each rank works itself; none if alone, or if unknown."""
    own = job.shares.own
    return own if len(own) > 1 and (own > 0).all() else own[:0]


def _power(job: SampledJob, gpus: list[Place]) -> str:
    power, limit, used = (job.mean(GPU, gpus, name) for name in ("power_w", "power_limit_w", "utilisation"))
    return f"{power:.0f} of {limit:.0f} W" + (f", utilisation {used:.0f} %" if used >= 0 else "")


def _devices(job: SampledJob) -> str:
    gpus, ranks, nodes = (job.places_at_the_end(what) for what in (GPU, RANK, NODE))
    workers = sum(job.others(rank) + (rank not in job.launchers) for rank in ranks)
    devices = _count(len(gpus), "GPU") if gpus else _count(workers, "CPU worker")
    names = {job.rows[GPU][gpu]["name"].iloc[-1] for gpu in gpus}
    if len(names) == 1 and names != {""}:
        devices = f"{len(gpus)} x {names.pop()}"
    return devices + (f" on {len(nodes)} nodes" if len(nodes) > 1 else "")


def _name_places(what: str, places: list[Place]) -> str:
    """Name places in words, such as "GPUs 0, 1 on n1"; for many only how many."""
    what = what.replace(GPU, "GPU")
    nodes = sorted({node for node, _ in places})
    if len(nodes) > 2 or len(places) > 8:
        return _count(len(places), what) + ("" if what == NODE else f" on {_count(len(nodes), 'node')}")
    if what == NODE:
        return " and ".join(nodes)
    by_node = {node: sorted(number for name, number in places if name == node) for node in nodes}
    return " and ".join(
        f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} on {node}"
        for node, numbers in by_node.items()
    )


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{plural * (number != 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


RULES = (_find_ranks_that_never_met, _find_unused_gpus, _find_paused_ranks, _find_waiting_for_batches)
RULES += (_find_slow_exchange, _find_shared_cores, _find_throttled_gpus, _find_slow_rank)
RULES += (_find_full_memory, _find_low_power, _find_idle_cpus)
