"""The pictures of the lessons, as SVG in grey on white. Run this file (`make lessons`) to write them all.

The timelines are drawn by the commands that slurm/MONITORING.md gives for them.
"""

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
WIDTH = 800
LIGHT, GREY = "#e4e4e4", "#c4c4c4"


def svg(title: str, height: int, *parts: str) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    font = 'font-family="Helvetica, Arial, DejaVu Sans, sans-serif"'
    white = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">\n<title>{escape(title)}</title>'
    )
    return "\n".join([head, white, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, size: int = 15, anchor: str = "middle", bold: bool = False) -> str:
    """Lines of text, of which the middle is at `y`."""
    lines = words.split("\n")
    top = y - (len(lines) - 1) * size * 0.65 + size * 0.35
    style = f'font-size="{size}" text-anchor="{anchor}"' + (' font-weight="bold"' if bold else "")
    return "\n".join(
        f'<text x="{x:g}" y="{top + size * 1.3 * number:g}" {style}>{escape(line)}</text>'
        for number, line in enumerate(lines)
    )


def box(
    x: float, y: float, width: float, height: float, words: str = "", fill: str = "white",
    dashed: bool = False, line: float = 1.5, **style: object,
) -> str:  # fmt: skip
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    frame = f'stroke="black" stroke-width="{line:g}"{dashes}'
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" {frame}/>'
    return f"{shape}\n{text(x + width / 2, y + height / 2, words, **style)}" if words else shape


def arrow(*points: tuple[float, float], both: bool = False) -> str:
    """A line through `points` with a head at its end, or at both."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    heads = [_head(points[-2], points[-1])] + ([_head(points[1], points[0])] if both else [])
    return "\n".join([f'<polyline points="{path}" fill="none" stroke="black" stroke-width="2"/>', *heads])


def _head(start: tuple[float, float], tip: tuple[float, float]) -> str:
    angle = math.atan2(tip[1] - start[1], tip[0] - start[0])
    sides = [(tip[0] - 12 * math.cos(a), tip[1] - 12 * math.sin(a)) for a in (angle - 0.45, angle + 0.45)]
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in [tip, *sides])}"/>'


def batch_in_data_parallel() -> str:
    left, right, wide = 175, 530, 250

    def row(number: int, name: str, first: str, second: str, moves: str = "", dashed: bool = False) -> str:
        y = 75 + 66 * number
        middle = y + 24
        ends = [(left + wide + 4, middle), (right - 4, middle)]
        return "\n".join(
            [
                text(14, middle, name, anchor="start", bold=True),
                box(left, y, wide, 48, first, LIGHT),
                box(right, y, wide, 48, second, "white" if dashed else LIGHT, dashed),
                *([arrow(*(ends if moves == ">" else ends[::-1]))] if moves else []),
            ]
        )

    return svg(
        "What happens to a batch of 64 images in DataParallel, on two GPUs",
        588,
        box(left - 15, 8, 635, 572, line=2.5),
        text(left + 302, 28, "one process, with a thread for each GPU"),
        text(left + wide / 2, 57, "GPU 0", 17, bold=True),
        text(right + wide / 2, 57, "GPU 1", 17, bold=True),
        row(0, "1 replicate", "the weights", "a copy of all weights", ">"),
        row(1, "2 scatter", "the batch; keeps\nimages 0 to 31", "images 32 to 63", ">"),
        row(2, "3 forward", "outputs of 0 to 31", "outputs of 32 to 63"),
        row(3, "4 gather", "all outputs, and the loss", "its outputs", "<"),
        row(4, "5 backward", "gradients of 0 to 31", "gradients of 32 to 63", ">"),
        row(5, "6 sum", "the sum of the gradients", "its gradients", "<"),
        row(6, "7 optimizer", "new weights", "copy thrown away", dashed=True),
        text(14, 552, "again from 1 for\nthe next batch", 13, "start"),
        text(left + 302, 552, "Every arrow begins or ends at GPU 0: weights out, images out,\n"
             "outputs back, the gradients of the outputs out, the gradients of the weights back.", 13),
    )  # fmt: skip


def batch_in_ddp() -> str:
    left, right, wide = 175, 530, 250

    def row(y: float, name: str, first: str, second: str) -> list[str]:
        return [
            text(14, y + 24, name, anchor="start", bold=True),
            box(left, y, wide, 48, first, LIGHT),
            box(right, y, wide, 48, second, LIGHT),
        ]

    def across(y: float, words: str, both: bool) -> list[str]:
        ends = [(left + wide + 4, y + 32), (right - 4, y + 32)]
        return [arrow(*ends, both=both), text((left + wide + right) / 2, y + 15, words, 13)]

    return svg(
        "What happens to a batch of 64 images in DistributedDataParallel, on two GPUs",
        525,
        *(box(x - 15, 8, wide + 30, 475, line=2.5) for x in (left, right)),
        *(text(x + wide / 2, 28, f"a process: rank {rank}") for rank, x in enumerate((left, right))),
        *(text(x + wide / 2, 54, f"GPU {gpu}", 17, bold=True) for gpu, x in enumerate((left, right))),
        *row(75, "once, at start", "its weights", "the weights of rank 0"),
        *across(75, "broadcast", both=False),
        '<line x1="14" y1="141" x2="786" y2="141" stroke="black" stroke-dasharray="2 5"/>',
        *row(158, "1 share", "images 0 to 31", "images 32 to 63"),
        *row(224, "2 forward", "outputs and loss of 0 to 31", "outputs and loss of 32 to 63"),
        *row(290, "3 backward", "gradients of 0 to 31", "gradients of 32 to 63"),
        *row(356, "4 all-reduce", "mean of all gradients", "mean of all gradients"),
        *across(356, "gradients", both=True),
        *row(422, "5 optimizer", "new weights", "the same new weights"),
        text(14, 505, "Again from 1 for the next batch. 4 begins while 3 still computes. "
             "No GPU does more than the others.", 13, "start"),
    )  # fmt: skip


def ranks() -> str:
    def process(node: int, local: int) -> str:
        x, rank = 53 + 378 * node + 165 * local, 2 * node + local
        words = f"rank {rank}\nlocal rank {local}"
        return "\n".join(
            [
                box(x, 112, 150, 78, words, LIGHT, line=2.5),
                arrow((x + 75, 192), (x + 75, 236)),
                box(x, 240, 150, 46, f"GPU {local}", GREY),
            ]
        )

    return svg(
        "Rank, local rank, node and world: two nodes with two GPUs each",
        422,
        box(8, 8, 784, 404, dashed=True),
        text(400, 34, "the world: world size 4, in one process group", 17, bold=True),
        *(box(28 + 378 * node, 58, 366, 246) for node in (0, 1)),
        *(text(211 + 378 * node, 84, f"node n{1 + node}", 16, bold=True) for node in (0, 1)),
        *(process(node, local) for node in (0, 1) for local in (0, 1)),
        text(400, 334, "A box with a thick frame is a process; all run the same script."),
        text(400, 360, "The rank counts through all nodes: it chooses the share of the data."),
        text(400, 386, "The local rank begins at 0 on every node: it chooses the GPU."),
    )


def ring_steps(parts: list[list[int]]) -> Iterator[list[list[int]]]:
    """What every rank holds at the start and after each step of a ring all-reduce: N parts on N ranks."""
    size = len(parts)
    yield [list(part) for part in parts]
    for step in range(2 * (size - 1)):
        gathers = step >= size - 1
        values = [parts[rank][(rank - step) % size] for rank in range(size)]  # sent all at once
        for rank, value in enumerate(values):
            to, part = (rank + 1) % size, (rank - step) % size
            parts[to][part] = value if gathers else parts[to][part] + value
        yield [list(part) for part in parts]


def ring() -> str:
    frames = list(ring_steps([[1, 2, 3], [10, 20, 30], [100, 200, 300]]))
    total = frames[-1][0]

    def frame(column: int, row: int, title: str, step: int, below: str) -> str:
        x, y, held, cells = 12 + 396 * column, 12 + 292 * row, frames[step], []
        for rank in range(3):
            top = y + 50 + 62 * rank
            cells.append(text(x + 70, top + 20, f"rank {rank}"))
            for part in range(3):
                number = held[rank][part]
                whole = number == total[part]
                line = 4 if step < 4 and part == (rank - step) % 3 else 1  # what is sent next
                cells.append(
                    box(x + 110 + 82 * part, top, 74, 40, str(number), GREY if whole else "white",
                        line=line, size=18, bold=whole)
                )  # fmt: skip
        return "\n".join(
            [
                box(x, y, 380, 280, line=1),
                text(x + 190, y + 24, title, 16, bold=True),
                *cells,
                *(arrow((x + 70, y + 85 + 62 * rank), (x + 70, y + 118 + 62 * rank)) for rank in (0, 1)),
                arrow((x + 40, y + 194), (x + 18, y + 194), (x + 18, y + 70), (x + 40, y + 70)),
                text(x + 190, y + 250, below, 14),
            ]
        )

    return svg(
        "Ring all-reduce of three numbers on each of three ranks, in four frames",
        632,
        frame(0, 0, "1. The start", 0,
              "Each sends the part with the thick frame\nto the next rank, which adds it to its own."),
        frame(1, 0, "2. After one step", 1,
              "Again: what was just added to goes on,\nand is added to the next rank's part."),
        frame(0, 1, "3. After the reduce-scatter: 2 steps", 2,
              "Each rank has one whole sum (grey). Now\nthese go round; nothing is added any more."),
        frame(1, 1, "4. After the all-gather: 2 more steps", 4,
              "All have all sums: 1 + 10 + 100 = 111, ...\nDDP divides by 3, the number of ranks."),
        text(400, 610, "Each rank has sent 4 parts, a third each: "
             "2 (N - 1) / N = 4/3 of the whole, for N = 3 ranks.", 14),
    )  # fmt: skip


def buckets() -> str:
    layers = {"layer 4": 66, "layer 3": 66, "layer 2": 90, "layer 1": 90}
    backward = 190
    ready, done = backward + 132, backward + 312  # layers 4 and 3, and all

    def timeline(top: float, title: str, first: float, second: float) -> list[str]:
        x, parts = backward, []
        for name, wide in layers.items():
            parts.append(box(x, top + 30, wide, 44, name, LIGHT, size=14))
            x += wide
        return [
            text(14, top, title, 17, "start", bold=True),
            text(14, top + 52, "GPU", anchor="start"),
            text(14, top + 106, "network", anchor="start"),
            box(90, top + 30, 100, 44, "forward", size=14),
            *parts,
            box(first, top + 84, 90, 44, "bucket 1", GREY, size=14),
            box(second, top + 84, 80, 44, "bucket 2", GREY, size=14),
            box(second + 80, top + 30, 84, 44, "optimizer", size=14),
        ]

    end, sooner = done + 90 + 80 + 84, done + 80 + 84
    return svg(
        "A step of DDP without and with overlap: buckets of gradients travel during the backward pass",
        364,
        text(300, 24, "light grey: the backward pass, which begins with the last layer", 13, "start"),
        *timeline(24, "First compute, then send", done, done + 90),
        *timeline(202, "DDP: send each bucket as soon as it is full", ready, done),
        f'<line x1="{end}" y1="102" x2="{end}" y2="284" stroke="black" stroke-dasharray="4 4"/>',
        arrow((end - 2, 254), (sooner + 2, 254)),
        text(sooner + 45, 298, "sooner"),
        text(400, 348, "Layer 4 and layer 3 share bucket 1. The lengths are drawn, not measured.", 13),
    )


def parallelisms() -> str:
    columns = (250, 570)
    shares, all_images = ("images 0 to 31", "images 32 to 63"), ("images 0 to 63",) * 2

    def gpu(number: int, y: float, layers: str, below: str, share: str) -> list[str]:
        x, top, high = columns[number], y + 8, 44 if share == "whole" else 22
        parts = [box(x, y, 215, 88, line=1), text(x + 107, y + 72, below, 13)]
        for left, layer in zip(range(x + 14, x + 200, 49), layers, strict=False):
            if share == "fetched":
                parts.append(box(left, top, 40, 44, dashed=True, line=1))
            parts.append(box(left, top + 44 - high if number else top, 40, high, layer, GREY))
        return parts

    def row(
        number: int, name: str, words: str, travels: str, layers: tuple[str, str], images: tuple[str, str],
        share: str = "whole",
    ) -> list[str]:  # fmt: skip
        y = 44 + 106 * number
        return [
            text(14, y + 14, name, 16, "start", bold=True),
            text(14, y + 56, words, 13, "start"),
            arrow((columns[0] + 219, y + 44), (columns[1] - 4, y + 44), both=True),
            text((columns[0] + 215 + columns[1]) / 2, y + 20, travels, 12),
            *gpu(0, y, layers[0], images[0], share),
            *gpu(1, y, layers[1], images[1], share),
        ]

    every, some = ("ABCD", "ABCD"), ("AB", "CD")
    return svg(
        "Five ways to use two GPUs for a network of four layers, A to D",
        612,
        text(14, 24, "layers A, B, C, D", anchor="start"),
        *(text(x + 107, 24, f"GPU {number}", 17, bold=True) for number, x in enumerate(columns)),
        *row(0, "data parallel (DDP)", "each GPU has all weights,\nand its own images",
             "gradients", every, shares),
        *row(1, "sharded data parallel",
             "(FSDP, ZeRO) each GPU keeps\na share of every layer, and\nfetches the rest to use it",
             "weights,\ngradients", every, shares, "fetched"),
        *row(2, "model parallel", "some layers on each GPU;\none waits for the other",
             "activations", some, all_images),
        *row(3, "pipeline parallel", "the same, but the batch goes\nin parts: both work",
             "activations", some, ("part 1, 2, 3, 4, -", "part -, 1, 2, 3, 4")),
        *row(4, "tensor parallel", "each GPU computes a part\nof every layer",
             "activations,\nevery layer", every, all_images, "half"),
        box(14, 580, 30, 18, fill=GREY),
        text(54, 589, "weights that this GPU keeps", 13, "start"),
        box(330, 580, 30, 18, dashed=True, line=1),
        text(370, 589, "weights of others, here only while this layer computes", 13, "start"),
    )  # fmt: skip


PICTURES = {
    "02_multigpu_dp/pictures/batch.svg": batch_in_data_parallel,
    "03_multigpu_ddp/pictures/batch.svg": batch_in_ddp,
    "03_multigpu_ddp/pictures/ranks.svg": ranks,
    "03_multigpu_ddp/pictures/ring.svg": ring,
    "03_multigpu_ddp/pictures/buckets.svg": buckets,
    "03_multigpu_ddp/pictures/parallelisms.svg": parallelisms,
}


def timelines() -> dict[str, list[str]]:
    """The arguments of python that draw each of them, from the top folder."""
    page = (REPOSITORY / "slurm" / "MONITORING.md").read_text()
    commands = re.findall(
        r"^python (slurm/monitor\.py --plot \S+ --out (\S+/pictures/\S+))$", page, re.MULTILINE
    )
    return {name: shlex.split(command) for command, name in commands}


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (REPOSITORY / name).parent.mkdir(exist_ok=True)
        (REPOSITORY / name).write_text(picture())
    for name, arguments in timelines().items():
        (REPOSITORY / name).parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, check=True)
