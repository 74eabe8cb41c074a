"""Compares the answers with what the log in starter/ says."""

import re
from pathlib import Path

from trainkit.workshop.work import Workspace, Wrong

ANSWERS = """\
# Before you open the log: how many of the four ranks wrote a traceback?
prediction = 1
# What the log says
tracebacks = 3
rank = 2
node = n2
how = killed    # exception, killed, network, time_limit or hung
line = 40        # the number of a line of job.txt
"""
HINTS = """\
## 1

A rank that is killed cannot write any more. So a rank that writes a traceback lived on, at least for
a moment. Which rank wrote none?

## 2

"Connection closed by peer" is what the others see when a rank dies. Only the launcher sees how each
task ends: look for the lines that begin with `srun: error`. Here, srun's task N is rank N.

## 3

There are four such lines. The last three come after `Terminating`: those tasks were ended, or
ended themselves, because another had died. The first line has the node, the rank and the word for
how it ended.
"""
STARTS_WITH = "`prediction`"
WRONG = [
    ("answers.txt", "rank = 2", "rank = 3", "Rank 3 wrote a traceback, so it lived on"),
    ("answers.txt", "node = n2", "node = n1", "is in the line of srun"),
    ("answers.txt", "how = killed", "how = network", "what the others see"),
    ("answers.txt", "how = killed", "how = exception", "would have written a traceback"),
    ("answers.txt", "tracebacks = 3", "tracebacks = 4", "[rank0]: Traceback"),
    ("answers.txt", "line = 40", "line = 16", "a rank that complains"),
]  # fmt: skip
LOG = (Path(__file__).parent / "starter" / "job.txt").read_text()
HOW = {
    "network": "`Connection closed by peer` is what the others see when a process is gone, wherever it was. "
    "Did the launcher lose the node, too?",
    "exception": "A rank that ends with an exception would have written a traceback. Did this rank?",
    "time_limit": "At its time limit, the whole job is ended, and the log says DUE TO TIME LIMIT. One word "
    "in the launcher's line says what happened to this one task.",
    "hung": "A rank that hangs is still there: the others wait for it, until --timeout, and no rank closes a "
    "connection.",
}


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    predicted = answers.number("prediction")
    killed = re.search(r"srun: error: (\w+): task (\d+): Killed", LOG)
    node = killed[1]
    rank = int(killed[2])
    line = 1 + LOG[: killed.start()].count("\n")
    complained = sorted(set(map(int, re.findall(r"\[rank(\d)\]: Traceback", LOG))))
    if answers.number("tracebacks") != len(complained):
        raise Wrong("Count the lines of the form `[rank0]: Traceback`: how many ranks have one?")
    answer = answers.number("rank")
    if answer in complained:
        raise Wrong(
            f"Rank {answer:.0f} wrote a traceback, so it lived on: it complains that another rank is gone. "
            "Which rank complains first is chance. Look for the rank that wrote nothing, and for what the "
            "launcher says."
        )
    if answer != rank:
        raise Wrong(f"There is no rank {answers['rank']} in this job: its four ranks are 0 to 3.")
    if answers["node"] != node:
        raise Wrong(f"The node of rank {rank} is in the line of srun that says how the rank ended.")
    how = answers.word("how", "killed", *HOW)
    if how != "killed":
        raise Wrong(HOW[how])
    if answers.number("line") != line:
        raise Wrong(
            f"It is not line {answers['line']}: the first lines with an error are from a rank that "
            f"complains. Which line is the first to name rank {rank}?"
        )
    return (
        f"Rank {rank} on {node} was killed, and wrote nothing; the three others wrote {LOG.count('[rank')} "
        f"lines about it, and rank {complained[-1]} was only the first to notice. You predicted "
        f"{predicted:g} traceback(s). We ended it with `kill -9`, as the kernel ends a process when the "
        "memory is full: this log does not show which of the two it was. `sacct` may (MaxRSS close to "
        "ReqMem, or the state OUT_OF_MEMORY). The tasks that were `Terminated`, and the exit code 143 at the "
        "end, are only consequences."
    )
