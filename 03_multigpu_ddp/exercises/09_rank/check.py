"""Gives the learner's functions the environments of processes that are known."""

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
    ("who.py", "int(environment[name])", "environment[name]", "whole numbers"),
]  # fmt: skip
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
    who = workspace.module("who.py")
    for launcher, local_ranks in ((torchrun, BLOCK), (srun, BLOCK), (srun, CYCLIC)):
        check_names(who.who_am_i, launcher, local_ranks)
    if who.who_am_i({}) != (0, 0, 1):
        raise Wrong("Without a launcher there is one process: rank 0, local rank 0, world size 1.")
    batch = {name: value for name, value in srun(0, 0).items() if name != "SLURM_STEP_NUM_TASKS"}
    if who.who_am_i(batch) != (0, 0, 1):
        raise Wrong(
            "In the batch script, without srun, `who_am_i` believes SLURM_PROCID and SLURM_NTASKS, and would "
            "wait for processes that never started. SLURM_STEP_NUM_TASKS shows whether this is a step of "
            "srun."
        )
    check_gpus(who.gpu)
    guess = "as you predicted" if prediction == 2 else f"you predicted {answers['prediction']}"
    return (
        f"Two of the four have local rank 0, one on each node: {guess}. The rank decides which shard of the "
        "data a process gets, and which process prints and saves. The local rank only chooses the GPU. Read "
        "both from the launcher, as manygpus/launchers.py does, since the launcher decides how "
        "ranks are placed on nodes."
    )


def check_names(who_am_i: Callable, launcher: Callable, local_ranks: list[int]) -> None:
    name = launcher.__name__
    try:
        places = [who_am_i(launcher(rank, local_rank)) for rank, local_rank in enumerate(local_ranks)]
        ranks, locals_, sizes = zip(*places, strict=True)
    except KeyError as error:
        reason = "there is a gap" if error.args == ("?",) else f"{name} sets no variable {error}"
        raise Wrong(f"mine/who.py, started by {name}: {reason}.") from None
    except (TypeError, ValueError) as error:
        raise Wrong(
            f"mine/who.py, started by {name}: `who_am_i` has to return three whole numbers ({error})."
        ) from None
    if not all(isinstance(number, int) for place in places for number in place):
        raise Wrong(
            f"mine/who.py, started by {name}: `who_am_i` has to return three whole numbers, not {places[0]}."
        )
    if ranks.count(0) == 2:
        raise Wrong(
            f"With {name} on two nodes, two processes say that they are rank 0. Both would print, save, and "
            "train on the same images. The rank counts over all nodes."
        )
    if list(ranks) != [0, 1, 2, 3]:
        raise Wrong(
            f"With {name}, your function returns the ranks {', '.join(map(str, ranks))} for four processes."
        )
    if list(locals_) != local_ranks:
        raise Wrong(
            f"With {name}, your function returns the local ranks {', '.join(map(str, locals_))} on two "
            "nodes. Local ranks begin at 0 on every node; the rank counts over all nodes."
        )
    if set(sizes) != {4}:
        raise Wrong(
            f"With {name}, your function returns the world size {sizes[0]} for four processes on two nodes."
        )


def check_gpus(gpu: Callable) -> None:
    first = [(rank, local_rank, "n2" if rank > 1 else "n1") for rank, local_rank in enumerate(BLOCK)]
    second = [(rank, local_rank, "n2" if rank % 2 else "n1") for rank, local_rank in enumerate(CYCLIC)]
    check_job("second", second, gpu)
    check_job("first", first, gpu)


def check_job(which: str, places: list[tuple[int, int, str]], gpu: Callable) -> None:
    taken = {}
    for rank, local_rank, node in places:
        number = gpu(rank, local_rank, 4)
        if number == "?":
            raise Wrong("mine/who.py: `gpu` still has a gap.")
        if not isinstance(number, int):
            raise Wrong(f"`gpu` has to return a number, the N of cuda:N. Yours returns {number!r}.")
        if number not in (0, 1):
            raise Wrong(
                f"`gpu` sends rank {rank} to cuda:{number}, but a node with two GPUs has no cuda:{number}."
            )
        if taken.setdefault((node, number), rank) != rank:
            raise Wrong(
                f"`gpu`: in the {which} job of ranks.txt, two processes take cuda:{number} of {node}: ranks "
                f"{taken[node, number]} and {rank}."
            )
