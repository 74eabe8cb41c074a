"""The facts that a job's ranks told, judged: facts in, findings out, and nothing else is looked at.

Only the standard library is needed.
"""

from collections import Counter
from collections.abc import Iterable
from functools import reduce
from operator import or_

from trainkit.jobs.finding import FAULT, OK, WARNING, Finding, Ranks, fault_of

GB = 1e9
# What a stage takes at its default settings: 0.95 GB at the peak (mem. MB in the comparison of the
# main README), and about as much for four loader workers, which share most of theirs. CUDA and NCCL
# are reported to take 2 to 4 GB of the host's memory.
RANK_GB, GPU_RANK_GB, LOADER_WORKER_GB = 1.0, 4.0, 0.25
SHM_GB = 1.0
CLOCK_SECONDS = 3.0
SLOW_IMPORT_SECONDS = 30
SLOW_NETWORK_GB_S = 0.1  # what gigabit Ethernet carries


def judge(ranks: Ranks, hosts: list[str], num_workers: int) -> list[Finding]:
    """All findings about a job's ranks, at least one of them heard.

    Args:
        ranks: from `finding.read_facts`.
        hosts: the job's nodes in Slurm's order, if Slurm could tell.
        num_workers: loader processes that each rank is going to have.
    """
    hosts = hosts or list(_by_node(ranks))
    return [
        *_judge_ranks(ranks, hosts),
        *_judge_gpus(ranks),
        *_judge_cores(ranks, num_workers),
        *_judge_memory(ranks, num_workers),
        *_judge_shm(ranks, num_workers),
        *_judge_names(ranks, hosts),
        *_judge_meeting(ranks),
        *_judge_clocks(ranks),
        *_judge_folders(ranks),
        *_judge_data(ranks),
        *_judge_software(ranks),
        *_judge_all_reduce(ranks),
    ]


def bandwidths(ranks: Ranks) -> list[dict[str, object]]:
    """One row per message size: bytes, seconds, algorithm_gb_s and bus_gb_s (GB/s, 1 GB = 1e9 bytes).

    For n ranks algorithm bandwidth is size / time, and bus bandwidth that times 2 (n - 1) / n: the rate
    of the slowest link, to be compared with the hardware's. Source: nccl-tests, doc/PERFORMANCE.md.
    Each row tells, too, what was measured: ranks, nodes, backend, device_name and job.
    """
    n = _size(ranks)
    told = next(iter(_finished("all-reduce", ranks).values()), {"all-reduce": {}})
    sums = told["all-reduce"]
    if "seconds" not in sums or n == 1:
        return []
    facts = {name: told["place"][name] for name in ("nodes", "job")}
    facts |= {"ranks": n, "backend": told["group"]["backend"], "device_name": sums["device_name"]}
    return [
        facts
        | {
            "bytes": size,
            "seconds": seconds,
            "algorithm_gb_s": size / seconds / GB,
            "bus_gb_s": size / seconds / GB * 2 * (n - 1) / n,
        }
        for size, seconds in zip(sums["bytes"], sums["seconds"], strict=True)
    ]


def in_words(size: int) -> str:
    """A number of bytes, such as 4 MB."""
    return f"{size // 2**10} KB" if size < 2**20 else f"{size // 2**20} MB"


def _size(ranks: Ranks) -> int:
    return max(told["place"]["size"] for told in ranks.values())


def _by_node(ranks: Ranks) -> dict[str, Ranks]:
    nodes: dict[str, Ranks] = {}
    for rank, told in ranks.items():
        nodes.setdefault(told["place"]["node"], {})[rank] = told
    return nodes


def _finished(topic: str, ranks: Ranks) -> Ranks:
    """The ranks that came to the end of the step `topic`."""
    return {
        rank: told
        for rank, told in ranks.items()
        if topic in told and not told[topic].keys() & {"begun", "error"}
    }


def _of_each_node(topic: str, ranks: Ranks) -> dict[str, dict]:
    """Node -> its facts about `topic`, which are those of its first rank."""
    nodes = _by_node(_finished(topic, ranks))
    return {node: next(iter(here.values()))[topic] for node, here in nodes.items()}


def _failed(check: str, topic: str, ranks: Ranks, fix: str) -> list[Finding]:
    """A fault for every rank whose step `topic` failed; `fix` is for errors that bring none along."""
    return [
        fault_of(check, told[topic]["error"], fix, told["place"]["node"], rank)
        for rank, told in ranks.items()
        if "error" in told.get(topic, {})
    ]


def _judge_ranks(ranks: Ranks, hosts: list[str]) -> list[Finding]:
    size = _size(ranks)
    found = []
    for rank in range(size):
        told = ranks.get(rank)
        if told is None:
            # Slurm fills one node after the other.
            node = hosts[min(rank * len(hosts) // size, len(hosts) - 1)]
            message = "never reported: its Python did not start"
            fix = f"see the job's log; to go on without the node: sbatch --exclude={node}"
            found.append(Finding("ranks", FAULT, message, fix, node, rank))
        elif "end" not in told and (steps := [topic for topic in told if "begun" in told[topic]]):
            message = f"ended without a word in its check of {steps[-1]}: killed, crashed or stuck"
            fix = "see the job's log; more memory: sbatch --mem=32G"
            found.append(Finding("ranks", FAULT, message, fix, told["place"]["node"], rank))
    return found or [Finding("ranks", OK, f"{size} on {len(_by_node(ranks))} node(s), all of them reported")]


def _judge_gpus(ranks: Ranks) -> list[Finding]:
    found = _failed("gpus", "gpu", ranks, "see `nvidia-smi` there, and tell your admin")
    for node, here in _by_node(ranks).items():
        found += _judge_allocation(node, here)
        found += _judge_devices(node, here)
    return found


def _judge_allocation(node: str, here: Ranks) -> list[Finding]:
    """Whether the GPUs that Slurm gives on a node are those that its tasks need and see."""
    place = next(iter(here.values()))["place"]
    gpus = place["gpus_on_node"]
    tasks = max(len(here), place["size"] // place["nodes"])  # some may not have reported
    seen = [told["torch"]["devices"] for told in _finished("torch", here).values()]
    if not gpus and not any(seen):
        message, fix = "the job has no GPU: it will train on the CPU", "sbatch --gpus-per-node=2"
        return [Finding("gpus", WARNING, message, fix, node)]
    found = []
    if gpus and gpus != tasks:
        message = f"{tasks} task(s) for {gpus} GPU(s): it has to be one task per GPU"
        fix = f"sbatch --ntasks-per-node={gpus} --gpus-per-node={gpus}"
        found.append(Finding("gpus", FAULT, message, fix, node))
    if gpus and place["cluster"] == "practice" and not any(seen):
        message = f"{gpus} virtual GPU(s) of the practice cluster: the ranks train on the CPU"
        found.append(Finding("gpus", OK, message, "", node))
    # Slices of cards (MIG) never copy to each other directly.
    elif any(0 < count < gpus for count in seen) and not any(_is_slice(gpu) for gpu in _gpus(here).values()):
        message = (
            f"a task sees {min(seen)} of {gpus} GPUs, which stops them from copying to each other directly"
        )
        found.append(Finding("gpus", WARNING, message, _how_to_see_all(place), node))
    if gpus and place["visible"] is None:
        message = "CUDA_VISIBLE_DEVICES is not set: tasks may see GPUs of other jobs"
        found.append(Finding("gpus", WARNING, message, "leave out --gpu-bind=none", node))
    return found


def _how_to_see_all(place: dict) -> str:
    """What to do where tasks do not see all GPUs of their node."""
    bind = place["gpu_bind"].removeprefix("gpu:")
    if bind.startswith("per_task"):
        return "ask with --gpus-per-node in place of --gpus-per-task"
    if bind:
        return f"leave out --gpu-bind={bind}, which hides GPUs from tasks"
    return "leave CUDA_VISIBLE_DEVICES to Slurm, without --gpu-bind=closest, which hides GPUs from tasks"


def _gpus(here: Ranks) -> dict[int, dict]:
    """Rank -> facts about its GPU, of those that compute on one."""
    tried = _finished("gpu", here).items()
    return {rank: told["gpu"] for rank, told in tried if told["gpu"]["name"]}


def _is_slice(gpu: dict) -> bool:
    """Whether it is a slice (MIG) of a card, which has that in its name: "NVIDIA H200 MIG 1g.18gb"."""
    return " MIG " in gpu["name"]


def _judge_devices(node: str, here: Ranks) -> list[Finding]:
    """Whether every rank of a node has a card to itself; and which cards they are."""
    found = []
    place = next(iter(here.values()))["place"]
    owners: dict[str | int, int] = {}
    for rank, gpu in _gpus(here).items():
        owner = owners.setdefault(gpu["card"] or rank, rank)  # an old PyTorch may not know the card
        if owner != rank and _is_slice(gpu):
            message = f"has a slice (MIG) of the card of rank {owner}: NCCL refuses two slices of one card"
            fix = "ask for whole GPUs, which `sinfo -o '%N %G'` lists; or train with one task per card"
            found.append(Finding("gpus", FAULT, message, fix, node, rank))
        elif owner != rank:
            fix = "one task per GPU: --ntasks-per-node equal to --gpus-per-node"
            if place["gpus_on_node"] >= len(here):
                fix = _how_to_see_all(place)
            found.append(Finding("gpus", FAULT, f"has the same GPU as rank {owner}", fix, node, rank))
        if gpu["free"] < 0.8:
            message = f"{1 - gpu['free']:.0%} of its GPU's memory is taken before the training starts"
            fix = f"something else computes there; without the node: sbatch --exclude={node}"
            found.append(Finding("gpus", WARNING, message, fix, node, rank))
    software = _of_each_node("torch", here).get(node)
    if owners and software:
        cards = cards_in_words(_gpus(here)[rank] for rank in owners.values())
        told = [cards, software["driver"], software["build"], software["nccl"]]
        found.append(Finding("gpus", OK, ", ".join(filter(None, told)), "", node))
    return found


def cards_in_words(gpus: Iterable[dict]) -> str:
    """GPUs by their kind, such as "2 x NVIDIA H200, 140 GiB"."""
    kinds = Counter(f"{gpu['name']}, {gpu['gib']:.0f} GiB" for gpu in gpus)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _judge_cores(ranks: Ranks, num_workers: int) -> list[Finding]:
    found = _failed("cores", "cores", ranks, "tell your admin")
    least = []
    for node, here in _by_node(_finished("cores", ranks)).items():
        masks = [told["cores"]["mask"] for told in here.values()]
        wanted = [told["cores"]["per_task"] for told in here.values()]
        cores = reduce(or_, masks).bit_count()
        usable = min(min(mask.bit_count(), per_task) for mask, per_task in zip(masks, wanted, strict=True))
        least.append(usable)
        if cores < len(here):
            message = f"{len(here)} ranks share {cores} core(s)"
            fix = "give --cpus-per-task to srun, too (Slurm 22.05 and later), and no --cpu-bind that pins all"
            found.append(Finding("cores", FAULT, message, fix, node))
        elif cores < sum(wanted):
            message = f"{len(here)} ranks asked for {sum(wanted)} cores and run on {cores}"
            fix = (
                "srun --cpus-per-task as on the sbatch line; else the node has fewer cores than Slurm is told"
            )
            found.append(Finding("cores", WARNING, message, fix, node))
        if usable < num_workers:
            level = FAULT if usable == 1 else WARNING
            message = f"{usable} CPU(s) per task for the training and {num_workers} loader workers"
            fix = f"sbatch --cpus-per-task={num_workers + 1}, or fewer --num-workers"
            found.append(Finding("cores", level, message, fix, node))
    if found or not least:
        return found
    return [Finding("cores", OK, f"{min(least)} per rank")]


def _judge_memory(ranks: Ranks, num_workers: int) -> list[Finding]:
    found = _failed("memory", "memory", ranks, "tell your admin")
    rooms = []
    for node, memory in _of_each_node("memory", ranks).items():
        here = _finished("memory", _by_node(ranks)[node])
        tasks, gpus = len(here), len(_gpus(here))
        room = min(memory["available_gb"], memory["limit_gb"])
        rooms.append(room)
        least = gpus * GPU_RANK_GB + (tasks - gpus) * RANK_GB
        need = least + tasks * num_workers * LOADER_WORKER_GB
        if room < need:
            level = FAULT if room < least else WARNING
            message = f"{room:.1f} GB for {tasks} rank(s), which take about {need:.1f} GB"
            if num_workers:
                message += f" with {num_workers} loader workers each"
            found.append(Finding("memory", level, message, f"sbatch --mem={int(need) + 1}G", node))
    if found or not rooms:
        return found
    return [Finding("memory", OK, f"{min(rooms):.1f} GB or more on each node")]


def _judge_shm(ranks: Ranks, num_workers: int) -> list[Finding]:
    fix = "a larger /dev/shm (of a container: apptainer --bind, docker --shm-size), or fewer --num-workers"
    found = _failed("shm", "shm", ranks, fix)
    nodes = _of_each_node("shm", ranks)
    for node, shm in nodes.items():
        if num_workers and shm["free_gb"] < SHM_GB:
            message = (
                f"{shm['free_gb']:.2f} of {shm['size_gb']:.2f} GB free in /dev/shm, for loaders' batches"
            )
            found.append(Finding("shm", WARNING, message, fix, node))
    if found or not nodes:
        return found
    free = min(shm["free_gb"] for shm in nodes.values())
    return [Finding("shm", OK, f"a tensor fits into /dev/shm, {free:.1f} GB or more free")]


def _judge_names(ranks: Ranks, hosts: list[str]) -> list[Finding]:
    nodes = _of_each_node("names", ranks)
    # Several nodes of a practice cluster may be one machine.
    several_machines = len({names["own"] for names in nodes.values()}) > 1
    # Gloo mostly finds a way without its own name, so that is named only as a reason.
    alone = several_machines and not _finished("all-reduce", ranks)
    found = _failed("names", "names", ranks, "tell your admin")
    for node, names in nodes.items():
        found += _judge_master(node, names, node == hosts[0], several_machines)
        found += _judge_network(node, names, alone)
    if found or not nodes:
        return found
    master = nodes[min(nodes)]["master"]
    if master != hosts[0]:
        message = (
            f"the name {hosts[0]} is not known there, so the ranks meet at its address in Slurm, {master}"
        )
        return [Finding("names", WARNING, message, "an admin should add it (DNS or /etc/hosts)", hosts[0])]
    return [Finding("names", OK, f"every node resolves the master, {master}")]


def _judge_master(node: str, names: dict, is_master: bool, several_machines: bool) -> list[Finding]:
    """Whether a node knows the way to the master."""
    master, addresses = names["master"], names["addresses"]
    if not addresses:
        message = f"the master's name {master} cannot be resolved here"
        fix = f"an admin has to give {node} an address for {master} (DNS or /etc/hosts)"
    elif several_machines and not is_master and all(map(_is_loopback, addresses)):
        message = f"the master's name {master} is {addresses[0]} here, which is this node itself"
        fix = f"an admin has to give {node} the address of {master} in the network (DNS or /etc/hosts)"
    elif is_master and not names["master_is_here"] and not any(map(_is_loopback, addresses)):
        message = f"rank 0 runs here, but {master} is {addresses[0]}, an address of another machine"
        fix = f"an admin has to mend the address of {master} (DNS or /etc/hosts)"
    else:
        return []
    return [Finding("names", FAULT, message, fix, node)]


def _judge_network(node: str, names: dict, alone: bool) -> list[Finding]:
    """Whether a node has the interface that was asked for, or knows its own; `alone`: ranks did not meet."""
    wanted = names["wanted"].split(",") if names["wanted"] else []
    found = []
    for unknown in set(wanted) - set(names["interfaces"]):
        message = f"there is no network interface {unknown}, only {', '.join(names['interfaces'])}"
        fix = "correct SITE_NETWORK_INTERFACE in slurm/site.sh"
        found.append(Finding("names", FAULT, message, fix, node))
    own = names["own_addresses"]
    if alone and not wanted and all(map(_is_loopback, own)):
        address = own[0] if own else "not known"
        message = f"its own name {names['own']}, by which gloo finds its network, is {address} here"
        fix = "set SITE_NETWORK_INTERFACE in slurm/site.sh to the interface between the nodes"
        found.append(Finding("names", FAULT, message, fix, node))
    return found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _judge_meeting(ranks: Ranks) -> list[Finding]:
    fix = "a firewall between the nodes, or the wrong network: try SITE_NETWORK_INTERFACE, ask your admin"
    found = _failed("meeting", "meeting", ranks, fix)
    done = _finished("meeting", ranks)
    for rank in done.get(0, {}).get("meeting", {}).get("absent", []):
        if "error" not in ranks.get(rank, {}).get("meeting", {"error": "silent"}):
            node = ranks[rank]["place"]["node"]
            message = "came too late to rank 0"
            found.append(Finding("meeting", FAULT, message, "run the doctor again", node, rank))
    if found or not done:
        return found
    master_node = ranks[0]["place"]["node"] if 0 in ranks else None
    ways = {told["meeting"]["interface"] for told in done.values() if told["place"]["node"] != master_node}
    way = f" over {', '.join(sorted(ways))}" if ways else ""
    return [Finding("meeting", OK, f"the port is free, and every rank reaches rank 0{way}")]


def _judge_clocks(ranks: Ranks) -> list[Finding]:
    visitors = {rank: told for rank, told in ranks.items() if "offset_s" in told.get("meeting", {})}
    nodes = _of_each_node("meeting", visitors)
    fix = "an admin has to mend the clock (NTP); times in logs and on files mislead until then"
    found = []
    for node, meeting in nodes.items():
        offset = meeting["offset_s"]
        if abs(offset) > CLOCK_SECONDS:
            message = f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} rank 0's node"
            found.append(Finding("clocks", WARNING, message, fix, node))
    if found or not nodes:
        return found
    furthest = max(abs(meeting["offset_s"]) for meeting in nodes.values())
    return [Finding("clocks", OK, f"within {furthest:.3f} s of each other")]


def _judge_folders(ranks: Ranks) -> list[Finding]:
    fix = "set SITE_RESULTS_DIR and SITE_SCRATCH_DIR in slurm/site.sh to folders on a shared file system"
    found = _failed("folders", "folders", ranks, fix) + _failed("folders", "common-folders", ranks, fix)
    nodes = _of_each_node("common-folders", ranks)
    for node, folders in nodes.items():
        for name, unseen in folders.items():
            if unseen:
                writers = ", ".join(unseen)
                message = f"a file that {writers} wrote in the {name} folder is not seen here: not shared"
                found.append(Finding("folders", FAULT, message, fix, node))
    if found or not nodes:
        return found
    message = "every node writes the results and job folders, and sees the others' files"
    return [Finding("folders", OK, message)]


def _judge_data(ranks: Ranks) -> list[Finding]:
    found = _failed("data", "data", ranks, "python -m trainkit.data, and a folder that every node sees")
    done = _finished("data", ranks)
    return found or ([Finding("data", OK, f"MNIST is read on {len(done)} node(s)")] if done else [])


def _judge_software(ranks: Ranks) -> list[Finding]:
    fix = "mend activate_environment in slurm/site.sh: one environment, on a file system that every node sees"
    found = _failed("software", "torch", ranks, fix)
    nodes = _of_each_node("torch", ranks)
    for what, name in {"version": "torch", "commit": "commits of this checkout"}.items():
        known = {node: told[what] for node, told in nodes.items() if told[what]}
        if len(set(known.values())) > 1:
            listed = ", ".join(f"{node} {value}" for node, value in known.items())
            found.append(Finding("software", FAULT, f"different {name} on the nodes: {listed}", fix))
    for node, told in nodes.items():
        if told["import_s"] > SLOW_IMPORT_SECONDS:
            message = f"import torch took {told['import_s']:.0f} s"
            fix_slow = "put the environment on a faster file system, or into a container"
            found.append(Finding("software", WARNING, message, fix_slow, node))
    if found or not nodes:
        return found
    told = next(iter(nodes.values()))
    commit = told["commit"] or "unknown (no git there)"
    return [Finding("software", OK, f"torch {told['version']}, commit {commit}, the same on every node")]


def _judge_all_reduce(ranks: Ranks) -> list[Finding]:
    fix = "mend what is said above about ranks, names and the network; with GPUs, NCCL_DEBUG=INFO tells more"
    found = _failed("all-reduce", "group", ranks, fix) + _failed("all-reduce", "all-reduce", ranks, fix)
    done = _finished("all-reduce", ranks)
    for rank, told in done.items():
        sums = told["all-reduce"]
        if sums.get("wrong"):
            message = (
                f"{sums['wrong']} of {sums['of']} sums over all ranks are wrong, at {sums['at_bytes']} bytes"
            )
            fix = "do not train there, tell your admin; try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1"
            found.append(Finding("all-reduce", FAULT, message, fix, told["place"]["node"], rank))
    if found:
        return found
    if not done:
        message = "not tried, since not all ranks met, or not all of them can compute"
        return [Finding("all-reduce", FAULT, message, "mend the faults above")]
    group = next(iter(done.values()))["group"]
    way = group["backend"] + (f" over {group['network']}" if group["network"] else "")
    rows = bandwidths(ranks)
    if not rows:
        return [Finding("all-reduce", OK, f"one rank only, by {way}: nothing to exchange")]
    rate = rows[-1]["bus_gb_s"]
    message = f"correct, by {way}; bus bandwidth {rate:.2f} GB/s at {in_words(rows[-1]['bytes'])}"
    if rate < SLOW_NETWORK_GB_S and len(_by_node(ranks)) > 1:
        fix = "see that it is the fast network: SITE_NETWORK_INTERFACE in slurm/site.sh"
        return [Finding("all-reduce", WARNING, f"{message}: slower than gigabit Ethernet", fix)]
    return [Finding("all-reduce", OK, message)]
