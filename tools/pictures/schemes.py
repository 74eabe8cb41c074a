"""The pictures of what happens, and where: boxes and arrows."""

from pictures.svg import NORMAL, Picture


def cluster() -> Picture:
    """What runs where on a cluster."""
    picture = Picture(
        "A Slurm cluster: the login node, the queue, the compute nodes, and the disk that all share", 384
    )
    picture.rect(8, 8, 214, 246, None, "ink")
    picture.text(115, 34, "login node", NORMAL, "middle", bold=True)
    picture.lines(115, 70, ["you edit files, and", "send and watch jobs"], anchor="middle", colour="muted")
    for number, command in enumerate(["make data", "sbatch, submit.py", "squeue, scancel"]):
        picture.box(24, 98 + 38 * number, 182, 30, command, code=True)
    picture.text(115, 238, "no training here", anchor="middle")
    picture.rect(292, 8, 150, 246, None, "ink")
    picture.text(367, 34, "Slurm", NORMAL, "middle", bold=True)
    picture.lines(367, 70, ["keeps the queue,", "picks the nodes"], anchor="middle", colour="muted")
    for number, job in enumerate(["job 12: runs", "job 13: waits", "job 14: waits"]):
        fill, stroke = ("compute-tint", "compute") if number == 0 else ("waiting-tint", "waiting")
        picture.box(306, 98 + 38 * number, 122, 30, job, fill=fill, stroke=stroke)
    picture.arrow((208, 151), (304, 151))
    picture.text(256, 142, "a job", anchor="middle")
    picture.text(652, 28, "compute nodes: job 12 has both", NORMAL, "middle", bold=True)
    for number in range(2):
        left = 512 + 144 * number
        picture.rect(left, 40, 136, 214, None, "ink")
        picture.text(left + 68, 62, f"n{number + 1}", NORMAL, "middle", bold=True)
        picture.box(
            left + 10,
            72,
            116,
            30,
            "job script" if number == 0 else "",
            stroke="ink" if number == 0 else "paper",
        )
        for gpu in range(2):
            top = 110 + 68 * gpu
            picture.box(left + 10, top, 116, 28, f"rank {2 * number + gpu}, on CPU", fill="neutral")
            picture.box(left + 10, top + 28, 116, 30, f"GPU {gpu}", fill="compute-tint", stroke="compute")
    picture.arrow((430, 113), (510, 113))
    picture.text(470, 104, "starts", anchor="middle")
    picture.box(
        8,
        308,
        784,
        58,
        "the shared disk: this checkout, the Python environment, the data, logs, checkpoints and results",
        "the login node and all compute nodes see the same files",
        fill="memory-tint",
        stroke="memory",
    )
    for middle in (115, 580, 724):
        picture.arrow((middle, 256), (middle, 306), colour="memory", both=True)
    return picture


def stop() -> Picture:
    """The time line of a job that meets its time limit and comes back."""
    picture = Picture(
        "A job near its time limit: it is signalled, saves, waits in the queue, and resumes", 238
    )
    picture.legend(
        20,
        24,
        [("compute", "trains"), ("memory", "saves or loads"), ("waiting", "waits in the queue")],
        150,
    )
    spans = [
        (20, 262, "compute"),
        (262, 312, "memory"),
        (312, 562, "waiting"),
        (562, 612, "memory"),
        (612, 780, "compute"),
    ]
    for left, right, colour in spans:
        picture.rect(left, 84, right - left, 44, colour, radius=0)
    picture.line([(352, 62), (352, 134)], "ink", 2, "4 4")
    picture.text(358, 72, "time limit: never reached")
    picture.arrow((262, 56), (262, 82))
    picture.text(254, 72, "USR2, 60 s before the limit", anchor="end")
    notes = [
        (20, ["the first start", "of the job"]),
        (230, ["all ranks save", "at the same step,", "and end"]),
        (366, ["back to the queue:", "the same job number,", "about two minutes"]),
        (540, ["loads the", "checkpoint"]),
        (644, ["resumes at the next", "step, in the same log"]),
    ]
    for left, texts in notes:
        for row, words in enumerate(texts):
            picture.text(left, 154 + 17 * row, words)
    picture.arrow((20, 218), (780, 218), colour="muted", thick=1.5)
    picture.text(780, 210, "time, not to scale", anchor="end", colour="muted")
    return picture


def processes() -> Picture:
    """The processes of a job on two nodes, started by srun alone and by torchrun."""
    picture = Picture(
        "The processes of a job on two nodes with two GPUs each: srun alone, and srun with torchrun", 432
    )
    for number, torchrun in enumerate((False, True)):
        left = 8 + 402 * number
        title = "srun starts torchrun, and torchrun the ranks" if torchrun else "srun starts the ranks"
        script = "slurm_submit_torchrun.sh" if torchrun else "slurm_submit.sh"
        picture.text(left + 191, 24, title, NORMAL, "middle", bold=True)
        picture.box(left + 56, 40, 270, 34, f"sbatch {script}", code=True)
        picture.arrow((left + 191, 76), (left + 191, 98))
        picture.box(left + 71, 100, 240, 34, "the job script, on the first node")
        picture.arrow((left + 191, 136), (left + 191, 158))
        picture.box(left + 71, 160, 240, 34, "srun", code=True)
        middles = [left + 50, left + 140, left + 242, left + 332]
        targets = [left + 95, left + 287] if torchrun else middles
        end = 256 if torchrun else 316
        picture.line([(left + 191, 196), (left + 191, 214)], "ink")
        picture.line([(targets[0], 214), (targets[-1], 214)], "ink")
        for node in range(2):
            picture.rect(left + 194 * node, 228, 188, 140, None, "muted", dashed=True)
            picture.text(left + 194 * node + 180, 246, f"n{node + 1}", NORMAL, "end", bold=True)
        for target in targets:
            picture.arrow((target, 214), (target, end))
        if torchrun:
            for node in range(2):
                middle = targets[node]
                picture.box(middle - 54, 258, 108, 30, "torchrun", code=True)
                for rank in middles[2 * node : 2 * node + 2]:
                    picture.line([(middle, 290), (middle, 302)], "ink")
                    picture.line([(middle, 302), (rank, 302)], "ink")
                    picture.arrow((rank, 302), (rank, 316))
        for rank, middle in enumerate(middles):
            picture.box(middle - 38, 318, 76, 38, f"rank {rank}", fill="compute-tint", stroke="compute")
        words = (
            ["torchrun tells each rank its number:", "RANK, LOCAL_RANK, WORLD_SIZE"]
            if torchrun
            else ["Slurm tells each rank its number:", "SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS"]
        )
        picture.lines(left + 191, 398, words, anchor="middle")
    return picture


def hang() -> Picture:
    """Two stacks of ranks that hang: each waits in a collective that the other does not reach."""
    picture = Picture(
        "A hang: rank 0 waits in a barrier, rank 1 in an all-reduce, and neither call has a partner", 328
    )
    stacks = [
        ("rank 0 (and rank 2)", "barrier", ["save, line 44", "main, line 66"]),
        ("rank 1", "all_reduce", ["average_gradients, line 30", "main, line 60"]),
    ]
    for number, (rank, collective, calls) in enumerate(stacks):
        left = 40 + 470 * number
        picture.text(left + 125, 28, rank, NORMAL, "middle", bold=True)
        picture.box(
            left, 232, 250, 38, "all_reduce", code=True, fill="communication-tint", stroke="communication"
        )
        for row, call in enumerate(calls):
            picture.box(left, 92 + 40 * row, 250, 40, call, code=True)
        picture.box(
            left,
            46,
            250,
            46,
            f"{collective}: waits",
            code=True,
            bold=True,
            fill="waiting-tint",
            stroke="waiting",
            thick=3,
        )
    picture.arrow((292, 251), (508, 251), colour="communication", thick=3, both=True)
    picture.text(400, 240, "the one before: all met", anchor="middle")
    picture.lines(400, 128, ["the stacks now,", "innermost call on top"], anchor="middle", colour="muted")
    for start, end in (((292, 69), (352, 69)), ((508, 69), (448, 69))):
        picture.arrow(start, end, colour="waiting", thick=3, dashes="5 5")
    picture.text(400, 76, "?", 22, "middle", bold=True)
    picture.text(165, 194, "until rank 1 comes to the barrier: never", anchor="middle")
    picture.text(635, 194, "until rank 0 comes to the all_reduce: never", anchor="middle")
    picture.text(
        400,
        308,
        "Look for the condition that only some ranks have passed: here the one that leads to save().",
        anchor="middle",
    )
    return picture


def sample() -> Picture:
    """The way of a sample from the archive to the GPU, and what makes each part of it fast."""
    picture = Picture("The way of a sample: archive, node disk, loader worker, pinned memory, GPU", 258)
    parts = [
        (["archive on the", "shared disk"], "memory", ["few large files:", "tar, HDF5, shards"]),
        (["the node's disk", "or /dev/shm"], "memory", ["copied once,", "by sbcast or tar"]),
        (["loader worker", "(a CPU core)"], None, ["num_workers=4", "--cpus-per-task"]),
        (["pinned memory", "of the node"], "memory", ["pin_memory=True", ""]),
        (["GPU", ""], "compute", ["to(device,", "non_blocking=True)"]),
    ]
    hops = ["once a job", "reads", "a batch", "while it trains"]
    for number, (name, kind, remedy) in enumerate(parts):
        left = 8 + 162 * number
        fill, stroke = (f"{kind}-tint", kind) if kind else ("neutral", "ink")
        picture.box(left, 62, 136, 70, *filter(None, name), fill=fill, stroke=stroke, size=14)
        picture.line([(left + 68, 140), (left + 68, 160)], "muted", 1, "2 3")
        for row, words in enumerate(remedy):
            picture.text(left + 68, 178 + 18 * row, words, 12, "middle", code=number > 1)
        if number < len(hops):
            picture.arrow((left + 137, 97), (left + 161, 97))
            picture.text(left + 149, 46, hops[number], anchor="middle", colour="muted")
            picture.line([(left + 149, 52), (left + 149, 88)], "grid", 1)
    picture.text(
        400,
        240,
        "The slowest part sets the pace. If it is slower than the GPU, the GPU waits.",
        NORMAL,
        "middle",
    )
    return picture


def dp_and_ddp() -> Picture:
    """One step of DataParallel beside one step of DistributedDataParallel, on two GPUs."""
    picture = Picture(
        "A training step of DataParallel and of DistributedDataParallel on two GPUs, side by side", 432
    )
    colours = {
        "weights": ("memory-tint", "memory"),
        "data": ("neutral", "ink"),
        "compute": ("compute-tint", "compute"),
        "sum": ("communication-tint", "communication"),
        "waits": ("waiting-tint", "waiting"),
    }
    # For each GPU what it does, and its kind; then the way of what travels: to the right, the left, or both.
    parallel = [
        ("all weights", "weights", "a copy", "weights", "right"),
        ("half the batch", "data", "half the batch", "data", "right"),
        ("forward", "compute", "forward", "compute", ""),
        ("all outputs, loss", "data", "waits", "waits", "left"),
        ("backward", "compute", "backward", "compute", "right"),
        ("sum of gradients", "sum", "waits", "waits", "left"),
        ("optimizer", "weights", "waits", "waits", ""),
    ]
    distributed = [
        ("its own images", "data", "its own images", "data", ""),
        ("forward", "compute", "forward", "compute", ""),
        ("backward", "compute", "backward", "compute", ""),
        ("mean of gradients", "sum", "mean of gradients", "sum", "both"),
        ("optimizer", "weights", "optimizer", "weights", ""),
    ]
    panels = [
        ("DataParallel: one process", parallel, "GPU 0 sends and sums for all, and the others wait."),
        ("DistributedDataParallel: two processes", distributed, "All do the same, and send only gradients."),
    ]
    for number, (title, rows, message) in enumerate(panels):
        left = 8 + 406 * number
        picture.text(left + 189, 24, title, NORMAL, "middle", bold=True)
        for gpu in range(2):
            picture.text(left + 70 + 238 * gpu, 50, f"GPU {gpu}", anchor="middle", bold=True)
        for row, (first, kind, second, other_kind, way) in enumerate(rows):
            top = 62 + 46 * row
            for x, words, of_kind in ((left, first, kind), (left + 238, second, other_kind)):
                fill, stroke = colours[of_kind]
                picture.box(x, top, 140, 34, words, fill=fill, stroke=stroke)
            start, end = (left + 236, left + 142) if way == "left" else (left + 142, left + 236)
            if way:
                picture.arrow((start, top + 17), (end, top + 17), colour="communication", both=way == "both")
        picture.text(left + 189, 412, message, anchor="middle")
    picture.line([(400, 12), (400, 420)], "grid", 1)
    picture.text(603, 316, "the next step", anchor="middle", colour="muted")
    picture.arrow((603, 326), (603, 372), colour="muted", thick=1.5)
    return picture


def what_fits() -> Picture:
    """Which way of training a model asks for, by what fits on one GPU."""
    questions = [
        (
            ["Does one GPU train your model,", "with the batch that you want?"],
            ["One GPU.", "Too slow? Then DDP, stage 03"],
        ),
        (["Does it with fewer images at a time?"], ["Accumulate gradients.", "Too slow? With DDP"]),
        (
            ["Does it with bf16, activation checkpointing", "or an optimizer that keeps less?"],
            ["Do that.", "Too slow? With DDP"],
        ),
        (
            ["Does one GPU hold the largest layer,", "with its activations?"],
            ["Sharded data parallel (FSDP).", "Connection too slow? Pipeline"],
        ),
    ]
    step, tall, middle = 84, 54, 218
    picture = Picture(
        "What to do when a model does not fit: four questions, and what follows from each yes",
        step * len(questions) + tall + 22,
    )
    for number, (question, answer) in enumerate(questions):
        top = 10 + number * step
        picture.box(48, top, 340, tall, *question, fill="neutral")
        picture.arrow((390, top + tall / 2), (486, top + tall / 2))
        picture.text(436, top + tall / 2 - 9, "yes", anchor="middle")
        picture.box(488, top, 264, tall, *answer, fill="compute-tint", stroke="compute")
        picture.arrow((middle, top + tall + 2), (middle, top + step - 2))
        picture.text(middle + 10, top + step - 11, "no")
    picture.box(
        48,
        10 + step * len(questions),
        340,
        tall,
        "Tensor parallel inside a node,",
        "the others between nodes",
        fill="compute-tint",
        stroke="compute",
    )
    return picture


def request() -> Picture:
    """What eight lines of a job script ask for."""
    picture = Picture("What eight #SBATCH lines ask for: nodes, tasks, GPUs, cores, memory, time, a log", 328)
    lines = [
        ("--partition=gpu", "waiting-tint", "waiting"),
        ("--nodes=2", "paper", "ink"),
        ("--ntasks-per-node=4", "neutral", "ink"),
        ("--gpus-per-node=4", "compute-tint", "compute"),
        ("--cpus-per-task=4", "second", "second"),
        ("--mem=32G", "memory-tint", "memory"),
        ("--time=00:30:00", "paper", "paper"),
        ("--output=first-%j.log", "paper", "paper"),
    ]
    for number, (line, fill, stroke) in enumerate(lines):
        top = 12 + 41 * number
        picture.rect(8, top + 4, 16, 16, fill, stroke, radius=2)
        picture.text(34, top + 17, f"#SBATCH {line}", code=True)
    picture.rect(268, 8, 524, 244, None, "waiting", dashed=True)
    picture.text(280, 28, "partition gpu: the nodes from which Slurm may choose")
    for node in range(2):
        left = 280 + 254 * node
        picture.rect(left, 40, 246, 200, None, "ink")
        picture.text(left + 123, 60, f"node {node + 1}", NORMAL, "middle", bold=True)
        for task in range(4):
            x = left + 8 + 58 * task
            picture.rect(x, 70, 54, 120, "neutral", "ink")
            picture.text(x + 27, 88, f"task {4 * node + task}", anchor="middle")
            picture.box(x + 5, 98, 44, 30, "GPU", fill="compute-tint", stroke="compute")
            for core in range(4):
                picture.rect(x + 8 + 21 * (core % 2), 138 + 23 * (core // 2), 17, 17, "second", radius=2)
        picture.box(
            left + 8, 198, 228, 30, "32 GB of memory, for all tasks", fill="memory-tint", stroke="memory"
        )
    picture.arrow((268, 274), (792, 274), both=True)
    picture.text(530, 292, "for 30 minutes at most: then Slurm ends the job", anchor="middle")
    picture.text(530, 318, "what it prints goes to first-12.log, if its number is 12", anchor="middle")
    return picture
