"""Compares the answers with the lines of the starter, and runs the learner's script in three processes."""

import os
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from manygpus.launchers import free_port
from manygpus.workshop.ranks import in_ranks, meet
from manygpus.workshop.work import Answers, Workspace, Wrong

ANSWERS = """\
# Before you start the script: how many of the three ranks will stand still?
prediction = 3
# While it hangs: the innermost line of train.py in the stack of each rank
line_of_rank_0 = 46
line_of_rank_1 = 46
line_of_rank_2 = 32
# The rank that is not in the collective of the others, and the line whose condition let it skip that one
left = 2
left_by = 65
# What is wrong according to the watchdog's lines in the README: network, slow or mismatch?
watchdog = mismatch
"""
HINTS = """\
## 1

py-spy shows one stack for each process, with the innermost call first. The first lines are in PyTorch. Which
line of train.py comes next? `--locals` shows the `rank` of each process.

## 2

Two ranks are in one line, and the third is in a different one: it never reached theirs. From their line, go
outwards, call by call, to a condition that only they have passed. What did each rank compare? The
`--locals` of `main` also show that.

## 3

A condition that decides about a collective has to be the same on all ranks. Here, each rank compares the
error of its own station. Before the `if`, turn it into the mean of all stations (`dist.all_reduce` of a
tensor).
"""
SOLUTION = {
    "train.py": """\
@@
-        error = validate(model, *this_year)
+        mean = torch.tensor(validate(model, *this_year))
+        dist.all_reduce(mean)  # all ranks compare the same number, so all of them save, or none
+        error = mean.item() / dist.get_world_size()
""",
}
STARTS_WITH = "`prediction`"
SCRIPT = "train.py"
SUM = "        dist.all_reduce(mean)  # all ranks compare the same number, so all of them save, or none\n"
WORST = "        dist.all_reduce(mean, op=dist.ReduceOp.MAX)\n        mean *= dist.get_world_size()\n"
OF_RANK_0 = "        dist.broadcast(mean, src=0)\n        mean *= dist.get_world_size()\n"
IF = "        if error < best:\n            best = error\n            saved.append(epoch)\n"
SAVE = "            save(model)\n"
ALWAYS = "        save(model)\n"
WRONG = [
    ("answers.txt", "rank_2 = 32", "rank_2 = 46", "`line_of_rank_2`: rank 2 is in a different line"),
    ("answers.txt", "rank_0 = 46", "rank_0 = 68", "only calls"),
    ("answers.txt", "rank_1 = 46", "rank_1 = 6371", "a line of PyTorch"),
    ("answers.txt", "left = 2", "left = 0", "Rank 0 is in the same line as a second rank"),
    ("answers.txt", "left_by = 65", "left_by = 44", "the condition"),
    ("answers.txt", "= mismatch", "= slow", "the same number"),
    ("answers.txt", "= mismatch", "= network", "the same number"),
    (SCRIPT, SUM, "", "wait for each other in vain"),
    (SCRIPT, IF, IF.replace("error", "rank == 0 and error", 1), "wait for each other in vain"),
    (SCRIPT, SUM, OF_RANK_0, "the mean error does not decide"),
    (SCRIPT, SUM, WORST, "such as the worst"),
    (SCRIPT, IF + SAVE, "        error *= 1 + epoch * rank\n" + IF + ALWAYS, "each rank still decides"),
]  # fmt: skip
LINES = (Path(__file__).parent / "starter" / SCRIPT).read_text().splitlines()
WHERE = {line.strip(): number for number, line in enumerate(LINES, start=1)}
STANDS = [WHERE["dist.barrier()"], WHERE["dist.barrier()"], WHERE["dist.all_reduce(weights.grad)"]]
CALLS = WHERE["save(model)"], WHERE["average_gradients(model)"]
LOWEST = [0, 1, 2, 3, 4]  # epochs


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.number("prediction")
    check_answers(answers)
    check_saved(run(workspace))
    return (
        f"The script runs to the end, and all ranks save together. You predicted that {prediction:.0f} ranks "
        "would stand still: all three did. The error of rank 2 was worse than before, so rank 2 skipped the "
        "barrier, and waited in the next collective, which no other rank called. After half an hour, gloo's "
        "default timeout, an error would have named the lines that wait, not the line that is wrong. With "
        "NCCL, PyTorch's watchdog ends a job after ten minutes, and also names only the collective that "
        "waits."
    )


def check_answers(answers: Answers) -> None:
    for rank, true in enumerate(STANDS):
        name = f"line_of_rank_{rank}"
        answer = answers.number(f"line_of_rank_{rank}")
        if answer > len(LINES):
            raise Wrong(f"`{name}`: train.py has {len(LINES)} lines, so {answer:.0f} is a line of PyTorch.")
        if answer in CALLS:
            raise Wrong(f"`{name}`: line {answer:.0f} only calls the function in which the rank waits.")
        if answer != true:
            raise Wrong(
                f"`{name}`: rank {rank} is in a different line. Its process is the one with `rank: {rank}`."
            )
    if answers.number("left") != 2:
        raise Wrong(f"Rank {answers['left']} is in the same line as a second rank. Which rank is alone?")
    if answers.number("left_by") != WHERE["if error < best:"]:
        raise Wrong(
            "`left_by`: look for the condition that let ranks 0 and 1 reach the barrier, but not rank 2."
        )
    if answers.word("watchdog", "network", "slow", "mismatch") != "mismatch":
        raise Wrong(
            "`watchdog`: both ranks wait in the collective with the same number. Compare its OpType and "
            "NumelIn on the two ranks: a slow rank or network would leave all of them in the same collective."
        )


def run(workspace: Workspace) -> list[list[int]]:
    """Return the epochs in which each rank saved."""
    program = workspace.module(SCRIPT)
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with patch.dict(os.environ, place), patch.object(dist, "init_process_group", meet):
        return in_ranks(lambda rank, size: program.main(), size=3, group=False)


def check_saved(saved: list[list[int]]) -> None:
    if not saved[0] == saved[1] == saved[2]:
        raise Wrong(
            f"No rank hangs any more, but each rank still decides by itself in which epochs to save: {saved}."
        )
    if saved[0] != LOWEST:
        raise Wrong(
            f"All ranks save in the epochs {saved[0]}, but the mean error does not decide: by that, the "
            f"epochs would be {LOWEST}. Does one station decide for all, such as the worst?"
        )
