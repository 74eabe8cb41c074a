"""What each step buys a GPT in speed and memory: 16 bits, recomputing, splitting, compiling.

Try: PYTHONPATH=. python3 tools/bench/gpt_ladder.py --out results/sample/h100/gpt_ladder.csv

124 million weights on one GPU, or, with --cpu, 7 million on two ranks of a CPU. Each section is a training by
beyond/complete/gpt.py or gpt_fsdp.py of stage 03 in a separate process, with its own time limit. Its row is
written to the CSV as soon as it is known; the table of all is printed at the end. A failed section has its
error instead of numbers. Name sections to run only these.
"""

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from manygpus import entrypoint, files
from manygpus.config.command_line import Parser, one_of
from manygpus.record import records

SCRIPTS = Path(__file__).resolve().parents[2] / "03_multigpu_ddp" / "beyond" / "complete"
EPOCHS = 3  # the first warms up, and is not counted


class Section(NamedTuple):
    name: str
    arguments: str
    steps: int  # of an epoch
    limit_s: int  # for the process
    script: str = "gpt.py"
    batch_size: int = 16


class Ladder(NamedTuple):
    sections: list[Section]
    arguments: str  # of all sections
    ranks: int


ON_A_GPU = Ladder(
    [
        Section("fp32", "", 10, 60),
        Section("tf32", "--precision tf32", 25, 45),
        Section("bf16", "--precision bf16", 50, 45),
        Section("bf16, checkpointing", "--precision bf16 --checkpoint-activations", 50, 45),
        Section("bf16, split over one rank", "--precision bf16", 50, 45, "gpt_fsdp.py"),
        Section("bf16, compiled", "--precision bf16 --compile", 50, 120),
        Section("bf16, split, compiled", "--precision bf16 --compile", 50, 120, "gpt_fsdp.py"),
        Section("bf16, compiled, 64 windows", "--precision bf16 --compile", 20, 120, batch_size=64),
        Section(
            "bf16, compiled, 64 windows, bf16 residuals",
            "--precision bf16 --compile --bf16-residuals",
            20,
            120,
            batch_size=64,
        ),
        Section(
            "bf16, split, compiled, 64 windows", "--precision bf16 --compile", 20, 120, "gpt_fsdp.py", 64
        ),
    ],
    "--layers 12 --heads 12 --width 768 --context 1024 --vocabulary 50304 --test-size 32",
    ranks=1,
)
ON_A_CPU = Ladder(
    [
        Section("fp32", "", 6, 400),
        Section("bf16", "--precision bf16", 1, 400),
        Section("compiled", "--compile", 6, 400),
        Section("checkpointing", "--checkpoint-activations", 6, 400),
        Section("split over two ranks", "", 6, 400, "gpt_fsdp.py"),
        Section("split, checkpointing", "--checkpoint-activations", 6, 400, "gpt_fsdp.py"),
    ],
    "--layers 6 --heads 4 --width 256 --context 256 --vocabulary 8192 --test-size 16 --no-cuda",
    ranks=2,
)
FACTS = ["parameters", "global_batch", "device_name", "torch_version", "cuda_version", "started_at"]
NUMBERS = ["tokens_per_s", "slowest", "fastest", "mfu_percent", "peak_memory_mb", "train_loss"]
COLUMNS = ["section", *NUMBERS, "process_seconds", "error", "arguments", *FACTS]


def measure(section: Section, ladder: Ladder, folder: Path) -> dict[str, object]:
    """Run one section, and return its row."""
    batch = section.batch_size
    arguments = f"{ladder.arguments} --batch-size {batch} {section.arguments}".split()
    results = folder / section.name
    command = [sys.executable]
    if ladder.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ladder.ranks]
    command += [
        SCRIPTS / section.script,
        *arguments,
        "--train-size",
        section.steps * batch,
        "--epochs",
        EPOCHS,
    ]
    command += ["--lr-warmup-images", batch, "--data-dir", folder, "--results-dir", results]
    row = {"section": section.name, "arguments": " ".join([section.script, *arguments])}
    started = time.monotonic()
    error = _run([str(word) for word in command], section.limit_s, folder / "log.txt")
    row["process_seconds"] = round(time.monotonic() - started, 1)
    if error:
        return row | {"error": error}
    (path,) = (results / "runs").glob("*.csv")
    counted = records.read(path)[1:]
    metrics = [metric for metric in records.read_metrics(path) if metric["epoch"] > 1]
    speeds = [metric["value"] for metric in metrics if metric["metric"] == "tokens_per_s"]
    mfu = median(metric["value"] for metric in metrics if metric["metric"] == "mfu_percent")
    row |= {
        "tokens_per_s": round(median(speeds)),
        "slowest": round(min(speeds)),
        "fastest": round(max(speeds)),
        "mfu_percent": round(mfu, 1),
        "train_loss": round(counted[-1]["train_loss"], 4),
        "peak_memory_mb": round(max(epoch["peak_memory_mb"] for epoch in counted)),
    }
    return row | {name: counted[-1][name] for name in FACTS}


def _run(command: list[str], limit_s: int, log: Path) -> str:
    """Run the command, and return what went wrong, or ""."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGTERM, signal.SIGKILL):  # at the first, torchrun ends its ranks
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(40)
            return f"not done after {limit_s} s"
    if code == 0:
        return ""
    lines = log.read_text().strip().splitlines()
    print("\n".join(lines[-15:]), file=sys.stderr, flush=True)
    return lines[-1] if lines else f"exit code {code}"


def table(path: Path) -> str:
    """Lay out the CSV as a table for people."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [
        "| what | tokens/s | times the first | MFU % | peak memory GB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["error"]:
            lines.append(f"| {row['section']} | {row['error']} | | | |")
            continue
        tokens_per_s = int(row["tokens_per_s"])
        of_first = rows[0]["tokens_per_s"]  # empty if the first section failed
        gain = f"{tokens_per_s / int(of_first):.2f}" if of_first else "-"
        mfu = row["mfu_percent"].replace("nan", "-")
        peak_gb = int(row["peak_memory_mb"]) / 1000
        lines.append(f"| {row['section']} | {tokens_per_s:,} | {gain} | {mfu} | {peak_gb:.1f} |")
    return "\n".join(lines)


@entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV to write")
    parser.add_argument("--cpu", action="store_true", help="the small network, on two ranks of a CPU")
    names = sorted({section.name for section in ON_A_GPU.sections + ON_A_CPU.sections})
    parser.add_argument("sections", nargs="*", type=one_of(names), metavar="SECTION", help=str(names))
    chosen = parser.parse_args()
    ladder = ON_A_CPU if chosen.cpu else ON_A_GPU
    sections = ladder.sections
    if chosen.sections:
        sections = [section for section in sections if section.name in chosen.sections]
    if not sections:
        parser.error(f"there is no {chosen.sections[0]} {'with' if chosen.cpu else 'without'} --cpu")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for section in sections:
            rows.append(measure(section, ladder, Path(folder)))
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            with files.replacing(chosen.out) as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            print(f"{section.name}: {rows[-1].get('error') or 'done'}", file=sys.stderr, flush=True)
    print(table(chosen.out))


if __name__ == "__main__":
    main()
