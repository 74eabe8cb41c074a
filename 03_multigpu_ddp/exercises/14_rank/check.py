"""Starts the learner's program with the variables of processes that are known, and reads what it prints."""

import re
from collections.abc import Callable

from manygpus.workshop.work import Workspace, Wrong

ANSWERS = """\
prediction = 2       # before you open ranks.txt: how many of the 4 processes have local rank 0?

# FIRST job of ranks.txt
world_size = 4
gpu_of_rank_3 = 1    # the N of its cuda:N
ranks_on_n2 = 2 3    # which ranks are on node n2? Such as: 0 3

# SECOND job
gpu_of_rank_2 = 1    # the N of its cuda:N

# If the batch script itself contains `python who.py`, without srun: how many processes run it?
without_srun = 1
"""
HINTS = """\
## 1

In each line of the log, the number before the first colon is the rank, and the node follows. Sort
the four lines by node, on paper.

## 2

The world size counts the processes of all nodes. GPUs are numbered on each node: both nodes have
a `cuda:0` and a `cuda:1`, and neither has a `cuda:3`. Which number of a process begins at 0 on
every node?

## 3

Use the first three rows of the table in the README, not the fourth. `gpu` returns `local_rank`. The log of
the second job shows why you cannot calculate it: `rank % 2` would give ranks 0 and 2 the same GPU.
"""
SOLUTION = {
    "who.py": '''\
@@
-"""Who is this process? Fill in the gaps."""
+"""Who is this process?"""
@@
-TORCHRUN = "?", "?", "?"
-SRUN = "?", "?", "?"
+TORCHRUN = "RANK", "LOCAL_RANK", "WORLD_SIZE"
+SRUN = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"
@@
-    elif "?" in environment:  # a step of srun
+    elif "SLURM_STEP_NUM_TASKS" in environment:  # a step of srun
@@
-    return "?"
+    return local_rank
''',
}
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "world_size = 4", "world_size = 2", "not only those of one node"),
    ("answers.txt", "gpu_of_rank_3 = 1", "gpu_of_rank_3 = 3", "no cuda:3"),
    ("answers.txt", "ranks_on_n2 = 2 3", "ranks_on_n2 = 1 3", "with `n2` after the rank"),
    ("answers.txt", "gpu_of_rank_2 = 1", "gpu_of_rank_2 = 0", "No formula"),
    ("who.py", '"RANK", "LOCAL_RANK"', '"LOCAL_RANK", "LOCAL_RANK"', "two processes say"),
    ("who.py", '"SLURM_PROCID", "SLURM_LOCALID"', '"SLURM_PROCID", "SLURM_PROCID"', "counts over all nodes"),
    ("who.py", '"SLURM_NTASKS"', '"SLURM_NTASKS_PER_NODE"', "the world size 2 for four"),
    ("who.py", '"SLURM_NTASKS"', '"?"', "a gap"),
    ("answers.txt", "without_srun = 1", "without_srun = 4", "the batch script is one process"),
    ("who.py", '"SLURM_STEP_NUM_TASKS" in', '"SLURM_PROCID" in', "wait for processes"),
    ("who.py", "return local_rank", "return rank % world_size", "has no cuda:2"),
    ("who.py", "return local_rank", "return rank % 2", "in the second job"),
    ("who.py", "return local_rank", "return rank // 2", "in the first job"),
    ("who.py", "rank {rank} of {world_size}", "rank {rank}", "as the starter does"),
]  # fmt: skip
# The line that who.py prints.
PRINTED = re.compile(r"rank (?P<rank>\d+) of (?P<size>\d+), local rank (?P<local_rank>\d+): cuda:(?P<gpu>.+)")
GAP = "KeyError: '?'"
# The local rank of each rank, in the two jobs of ranks.txt.
BLOCK = [0, 1, 0, 1]
CYCLIC = [0, 0, 1, 1]


def torchrun(rank: int, local_rank: int) -> dict[str, str]:
    """Return what torchrun sets in a Slurm job, where it is the one task of each node."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "SLURM_PROCID": str(rank // 2), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "2",
    }  # fmt: skip


def srun(rank: int, local_rank: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank), "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "4",
    }  # fmt: skip


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    if answers.number("world_size") != 4:
        raise Wrong("`world_size` counts all processes of the job, not only those of one node: SLURM_NTASKS.")
    if answers.number("gpu_of_rank_3") != 1:
        raise Wrong(
            "`gpu_of_rank_3`: a node counts its GPUs from 0, so with two GPUs there is no cuda:3 on n2. "
            "Which of the two belongs to the process with that SLURM_LOCALID?"
        )
    if sorted(re.findall(r"\d", answers["ranks_on_n2"])) != ["2", "3"]:
        raise Wrong("`ranks_on_n2`: in the first job, look for the lines with `n2` after the rank.")
    if answers.number("gpu_of_rank_2") != 1:
        raise Wrong(
            "`gpu_of_rank_2`: in the second job, rank 2 is on n1, with rank 0. No formula returns the local "
            "rank, since it depends on how the tasks were placed. Read its SLURM_LOCALID."
        )
    if answers.number("without_srun") != 1:
        raise Wrong("`without_srun`: the batch script is one process. Only srun starts the others.")
    for launcher, local_ranks in ((torchrun, BLOCK), (srun, BLOCK), (srun, CYCLIC)):
        check_names(workspace, launcher, local_ranks)
    if place(workspace, "without a launcher", {})[:3] != (0, 0, 1):
        raise Wrong("Without a launcher there is one process: rank 0, local rank 0, world size 1.")
    batch = {name: value for name, value in srun(0, 0).items() if name != "SLURM_STEP_NUM_TASKS"}
    if place(workspace, "in the batch script", batch)[:3] != (0, 0, 1):
        raise Wrong(
            "In the batch script, without srun, `who_am_i` believes SLURM_PROCID and SLURM_NTASKS, and would "
            "wait for processes that never started. SLURM_STEP_NUM_TASKS shows whether this is a step of "
            "srun."
        )
    check_gpus(workspace, "second", CYCLIC)
    check_gpus(workspace, "first", BLOCK)
    guess = "as you predicted" if prediction == 2 else f"you predicted {answers['prediction']}"
    return (
        f"Two of the four have local rank 0, one on each node: {guess}. The rank decides which shard of the "
        "data a process gets, and which process prints and saves. The local rank only chooses the GPU. Read "
        "both from the launcher, as manygpus/launchers.py does, since the launcher decides how "
        "ranks are placed on nodes."
    )


def place(workspace: Workspace, where: str, variables: dict[str, str]) -> tuple[int, int, int, str]:
    """Return rank, local rank, world size and GPU that who.py prints in a process with these variables."""
    done = workspace.run("who.py", variables)
    if done.returncode:
        last_line = done.stderr.strip().splitlines()[-1]
        reason = last_line.replace("KeyError:", f"{where} has no variable")
        raise Wrong(f"mine/who.py, {where}: {'there is a gap' if last_line == GAP else reason}.")
    printed = PRINTED.fullmatch(done.stdout.strip())
    if not printed:
        raise Wrong(
            f"mine/who.py, {where}, prints {done.stdout.strip()!r}, and not three whole numbers and a GPU as "
            "the starter does, which `reset` restores."
        )
    return int(printed["rank"]), int(printed["local_rank"]), int(printed["size"]), printed["gpu"]


def check_names(workspace: Workspace, launcher: Callable, local_ranks: list[int]) -> None:
    name = launcher.__name__
    places = [
        place(workspace, f"started by {name}", launcher(rank, local_rank))
        for rank, local_rank in enumerate(local_ranks)
    ]
    ranks, locals_, sizes, _ = zip(*places, strict=True)
    if ranks.count(0) == 2:
        raise Wrong(
            f"With {name} on two nodes, two processes say that they are rank 0. Both would print, save, and "
            "train on the same images. The rank counts over all nodes."
        )
    if list(ranks) != [0, 1, 2, 3]:
        raise Wrong(f"With {name}, who.py prints the ranks {', '.join(map(str, ranks))} for four processes.")
    if list(locals_) != local_ranks:
        raise Wrong(
            f"With {name}, who.py prints the local ranks {', '.join(map(str, locals_))} on two nodes. Local "
            "ranks begin at 0 on every node; the rank counts over all nodes."
        )
    if set(sizes) != {4}:
        raise Wrong(f"With {name}, who.py prints the world size {sizes[0]} for four processes on two nodes.")


def check_gpus(workspace: Workspace, which: str, local_ranks: list[int]) -> None:
    """Check the GPUs in the job of ranks.txt whose ranks have these local ranks, two on each node."""
    taken = {}
    for rank, local_rank in enumerate(local_ranks):
        node = "n2" if local_ranks[:rank].count(local_rank) else "n1"
        *_, gpu = place(workspace, f"in the {which} job", srun(rank, local_rank))
        if gpu == "?":
            raise Wrong("mine/who.py: `gpu` still has a gap.")
        if gpu not in ("0", "1"):
            raise Wrong(f"`gpu` sends rank {rank} to cuda:{gpu}, but a node with two GPUs has no cuda:{gpu}.")
        if taken.setdefault((node, gpu), rank) != rank:
            raise Wrong(
                f"`gpu`: in the {which} job of ranks.txt, two processes take cuda:{gpu} of {node}: ranks "
                f"{taken[node, gpu]} and {rank}."
            )
