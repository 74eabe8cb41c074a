"""Reads the runs on one node and on two, where their ranks were, and the log of the second."""

import re
import statistics

from manygpus.record import records
from manygpus.workshop.work import Workspace, Wrong, check_alike, is_close

ANSWERS = """\
# Are two GPUs on two nodes faster than two on one, the same or slower?
prediction = slower
# Of the run on two nodes
global_batch = 64
batch_per_device = 32
interface = eth0
megabytes = 4.8     # that each rank sends in a step
ratio = 1.24        # images/s on two nodes / images/s on one
"""
HINTS = """\
## 1

The first line of a run's output has the global batch; the second has the nodes, the ranks and the
batch of each device. With --debug, there is a line `rank 1 on ...` before them.

## 2

The line `rank 1 on n2: ...` ends with `interface ... towards rank 0`. Each of two ranks sends 2 (2 -
1) / 2 = 1 times the gradients in each step: how many megabytes are 1,199,882 numbers of 4 bytes?

## 3

`megabytes` is 4.8. For `ratio`, use the column `images_per_s` of the epochs with warmup 0, or the lines of
epochs 2 and 3 in the logs. Divide their mean on two nodes by their mean on one.
"""
STARTS_WITH = "`prediction`"
RECORDED = {"results/sample/cpu-xeon-2-cores/exercises/two_nodes": []}
WRONG = [
    ("runs/*.csv", ",2,2,2,CPU", ",4,2,4,CPU", "no run on 2 node(s) with two ranks"),
    ("runs/*.tsv", "\tn2\t", "\tn1\t", "one GPU on each of two nodes"),
    ("answers.txt", "global_batch = 64", "global_batch = 128", "the batch of all ranks together"),
    ("answers.txt", "batch_per_device = 32", "batch_per_device = 64", "split evenly"),
    ("answers.txt", "interface = eth0", "interface = lo", "within one machine"),
    ("answers.txt", "megabytes = 4.8", "megabytes = 9.6", "twice as much"),
    ("answers.txt", "megabytes = 4.8", "megabytes = 1.2", "4 bytes"),
    ("answers.txt", "ratio = 1.24", "ratio = 0.81", "upside down"),
]  # fmt: skip
MEGABYTES = 1_199_882 * 4 / 1e6  # two ranks send the gradients 2 (2 - 1) / 2 = 1 times


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", "faster", "same", "slower")
    on_one_node = run_on(1, workspace)
    on_two_nodes = run_on(2, workspace)
    check_alike(on_one_node, on_two_nodes)
    if answers.number("global_batch") != on_two_nodes["global_batch"]:
        raise Wrong(
            "`global_batch`: --batch-size is the batch of all ranks together, on any number of nodes."
        )
    if answers.number("batch_per_device") != on_two_nodes["batch_per_device"]:
        raise Wrong("`batch_per_device`: the global batch is split evenly over the ranks.")
    check_interface(answers["interface"], workspace)
    megabytes = answers.number("megabytes")
    if is_close(megabytes, 2 * MEGABYTES, 0.03):
        raise Wrong("`megabytes`: that is twice as much as each rank sends. With N = 2, 2 (N - 1) / N is 1.")
    if not is_close(megabytes, MEGABYTES, 0.03):
        raise Wrong(
            "`megabytes`: 1,199,882 gradients of 4 bytes each, times 2 (N - 1) / N, in millions of bytes."
        )
    ratio = answers.number("ratio")
    true = on_two_nodes["speed"] / on_one_node["speed"]
    if not is_close(ratio, true, 0.03):
        if is_close(ratio, 1 / true, 0.03):
            raise Wrong("`ratio` is upside down: divide two nodes by one.")
        raise Wrong(
            f"`ratio` is not {ratio:g}: divide images/s on two nodes by images/s on one, with warmup 0."
        )
    speeds = (
        f"{on_two_nodes['speed']:,.0f} images/s on two nodes, {on_one_node['speed']:,.0f} on one (you said "
        f"{prediction})."
    )
    if on_two_nodes["device_name"].startswith("CPU"):
        speeds += (
            " These are CPU workers. If both nodes are the same machine, as on the practice cluster, the "
            "speeds only show what else the machine did."
        )
    return (
        "With the same two ranks and the same batches, the train loss of the first epoch is "
        f"{on_one_node['train_loss']:.4f} and {on_two_nodes['train_loss']:.4f}. What differs is the path "
        f"that {MEGABYTES:.1f} MB travel in every step. Between nodes it is usually slower, and with a "
        f"larger batch an epoch has fewer steps. {speeds}"
    )


def run_on(nodes: int, workspace: Workspace) -> dict[str, object]:
    """Return the first epoch of the newest run of two ranks on `nodes`, and the others' mean `speed`."""
    runs = []
    for path in (workspace.folder / "runs").glob("*.csv"):
        try:
            rows = records.read(path)
            rank_rows = records.read_ranks(path)
        except records.RecordError as error:
            raise Wrong(str(error)) from None
        speeds = [row["images_per_s"] for row in rows if not row["warmup"]]
        if (rows[0]["nodes"], rows[0]["world_size"]) == (nodes, 2) and speeds:
            runs.append((rows[0] | {"speed": statistics.fmean(speeds)}, rank_rows))
    if not runs:
        raise Wrong(
            f"mine/runs has no run on {nodes} node(s) with two ranks and two epochs or more. Run the "
            "commands of the README, or use our runs with `recorded`."
        )
    row, rank_rows = max(runs, key=lambda run: run[0]["started_at"])
    places = {(rank["rank"], rank["host"]) for rank in rank_rows}
    if len({host for _, host in places}) != nodes:
        raise Wrong(
            f"The ranks of the run on {nodes} node(s) were on "
            f"{', '.join(sorted({host for _, host in places}))}: it needs one GPU on each of two nodes, "
            "--ntasks-per-node=1 --gpus-per-node=1."
        )
    return row


def check_interface(answer: str, workspace: Workspace) -> None:
    """Compare an answer with the lines that --debug writes into the log of the run on two nodes."""
    logs = [name for name in ("runs/two.txt", "two.txt") if (workspace.folder / name).exists()]
    if not logs:
        raise Wrong("There is no log mine/two.txt. Run the commands of the README, or use `recorded`.")
    log = workspace.text(logs[0])
    interfaces = re.findall(r"interface (\S+) towards rank 0", log)
    if not interfaces:
        raise Wrong("The log two.txt does not name the interface: run the job with --debug.")
    if answer not in interfaces:
        within = " `lo` only serves traffic within one machine." if answer == "lo" else ""
        raise Wrong(
            f"`interface` is not {answer}.{within} The lines of two.txt that begin with `rank 1 on` name it."
        )
