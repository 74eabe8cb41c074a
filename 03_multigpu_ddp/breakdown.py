"""Where a training step of stage 03 goes: each phase timed on every rank, with and without communication.

Try: torchrun --standalone --nproc-per-node=2 breakdown.py --batch-size 256
"""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import step_phases
import torch
import torch.nn.functional as F
from beyond.by_feature.by_hand_overlap import Buckets
from torch import nn
from torch.profiler import profile

from manygpus import (
    DistEnv,
    Net,
    Options,
    at_least,
    augmentation,
    build_optimizer,
    destroy_distributed,
    entrypoint,
    errors,
    files,
    init_distributed,
    load_dataset,
    option,
    parse_options,
    resolve_precision,
    train_loader,
    tune_process,
)
from manygpus.distributed import process_group

STEPS = 10  # timed in a row, as a GPU works through a queue
TRACED_STEPS = 3


@dataclass(frozen=True)
class BreakdownOptions(Options):
    repeats: int = option(
        10,
        type=at_least(1, 10_000),
        metavar="N",
        help=f"times {STEPS} steps of each kind, in turns",
    )
    trace: bool = option(
        False,
        help=f"also write down {TRACED_STEPS} steps with torch.profiler",
    )
    by_hand: str | None = option(
        None,
        choices=("late", "at-once"),
        help="average the gradients as beyond/by_feature/by_hand_overlap.py does with this --wait, "
        "without DDP",
        shapes_training=True,
    )


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, BreakdownOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed + dist_env.rank)
    folder = opts.results_dir / "breakdown"
    fix = "free the space, fix the permissions, or give a different --results-dir."
    process_group.on_rank_0(lambda: opts.dry_run or files.check_writable(folder, "the breakdown", fix))

    # From here to `lr_scheduler` as in mnist_ddp.py. A schedule has to know of all steps.
    train_set, _ = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
    if opts.by_hand:
        buckets = ByHand(model, at_once=opts.by_hand == "at-once")
        no_sync = buckets.no_sync
        finish_all_reduce = buckets.finish
    else:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        no_sync = model.no_sync
        finish_all_reduce = do_nothing  # DDP's backward pass ends after the last all-reduce
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, 3 * STEPS * (1 + opts.repeats) + TRACED_STEPS)

    def training() -> Iterator[str]:
        """Run the training of mnist_ddp.py without an end, and yield after each phase."""
        model.train()
        for epoch in count(1):
            train_batches.set_epoch(epoch)
            for images, labels in train_batches:
                yield "data"
                optimizer.zero_grad()
                with autocast:
                    loss = F.nll_loss(model(images), labels)
                yield "forward"
                loss.backward()
                finish_all_reduce()
                yield "backward"
                optimizer.step()
                lr_scheduler.step()
                yield "optimizer"

    phases = training()
    measured = measure(phases, no_sync, dist_env, opts.repeats)
    seconds = step_phases.split(measured.together, measured.alone)

    facts = step_phases.facts(opts, dist_env, train_set.name, model)
    hosts = process_group.gather(platform.node())
    process_group.on_rank_0(lambda: errors.print_line(step_phases.as_text(facts, seconds, measured.step)))
    if opts.dry_run:
        process_group.on_rank_0(lambda: errors.print_line("dry run: nothing was written."))
    else:
        file = folder / f"{facts['run_id']}.tsv"
        seconds["step"] = measured.step
        process_group.on_rank_0(lambda: step_phases.write(file, facts, hosts, seconds))
        if opts.trace:
            write_trace(phases, file.with_suffix(""), dist_env.rank)
    destroy_distributed()


def do_nothing() -> None:
    pass


class Measured(NamedTuple):
    """Seconds of all ranks, float64."""

    step: torch.Tensor  # of a step as a whole, (ranks, repeats)
    together: torch.Tensor  # of the phases of steps that communicate, (ranks, repeats, steps, phases)
    alone: torch.Tensor  # of the phases of steps within `no_sync`


def measure(
    phases: Iterator[str],
    no_sync: Callable[[], AbstractContextManager[None]],
    dist_env: DistEnv,
    repeats: int,
) -> Measured:
    """Train, and time the kinds of steps in turns: a busy moment of the machine is to hit all alike."""
    steps = []
    together = []
    alone = []
    for _ in range(1 + repeats):
        whole = step_phases.laps(phases, dist_env.device, STEPS, every=STEPS * len(step_phases.TIMED))
        steps.append(whole.mean() / STEPS)
        of_phases = step_phases.laps(phases, dist_env.device, STEPS)
        together.append(of_phases.view(STEPS, -1))
        if dist_env.world_size > 1:
            with no_sync():  # the ranks drift apart: this is no training
                of_phases = step_phases.laps(phases, dist_env.device, STEPS)
        alone.append(of_phases.view(STEPS, -1))
    return Measured(of_all_ranks(steps), of_all_ranks(together), of_all_ranks(alone))


def of_all_ranks(repeats: list[torch.Tensor]) -> torch.Tensor:
    """Return what every rank has measured, (ranks, repeats, ...), without the first repeat, a warm-up."""
    return torch.stack(process_group.gather(torch.stack(repeats[1:])))


class ByHand(Buckets):
    """The all-reduce of by_hand_overlap.py, which steps can leave out, as with DistributedDataParallel."""

    alone = False

    def ready(self, weights: torch.Tensor) -> None:
        if not self.alone:
            super().ready(weights)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.alone = True
        yield
        self.alone = False


def write_trace(phases: Iterator[str], path: Path, rank: int) -> None:
    """Write what this rank does in some steps, as a timeline for a browser."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # where there is no GPU, the profiler calls that an error
    with profile() as profiler:
        for _ in islice(phases, TRACED_STEPS * len(step_phases.TIMED)):
            pass
    file = Path(f"{path}.rank-{rank}.json")
    profiler.export_chrome_trace(str(file))
    if not file.exists():  # of which it says nothing
        raise errors.UserError(
            f"{file} could not be written: free the space, or give a different --results-dir."
        )
    process_group.on_rank_0(
        lambda: errors.print_line(
            f"traces: {path}.rank-*.json, one of each rank. Open one at https://ui.perfetto.dev (it stays in "
            "your browser), or in Chrome at chrome://tracing."
        )
    )


if __name__ == "__main__":
    main()
