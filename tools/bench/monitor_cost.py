"""What the monitor (slurm/monitor.py) costs: trainings with and without it, in turns, on this machine.

Writes `<out>/monitor_cost.csv`, a row per training, and prints the table made of it. The two trainings of
a pair have the same seed, and every other pair begins with the one that is monitored.
"""

import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import psutil

from manygpus import errors
from manygpus.config.command_line import Parser
from manygpus.config.known_datasets import DEFAULT_DATA_DIR
from manygpus.data import staging
from manygpus.files import check_writable
from manygpus.jobs.site import OPTION_TEMPLATES, Site
from manygpus.jobs.stages import STAGES, resources
from manygpus.jobs.submit import executor
from manygpus.jobs.submit.request import Request
from manygpus.jobs.watch.job_status import LocalHandle
from manygpus.record import records
from manygpus.reports import page

HERE = Path(__file__).resolve().parent
TRAINING = ("--epochs=4", "--train-size=12800", "--batch-size=256", "--no-cuda", "--precision=fp32")
# Each computes on all cores, so that whatever the monitor takes is taken from it: stage, ranks, options.
CASES = {
    "2 ranks": ("ddp", 2, ()),
    "2 ranks, 1 loader worker each": ("ddp", 2, ("--loader=workers", "--num-workers=1")),
}
PAIRS = 8  # trainings with and without the monitor, of each case
DRAWS = 2_000  # resamplings of the pairs, for the interval


@errors.entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=DEFAULT_DATA_DIR, help="where MNIST is")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="default: tools/bench/out")
    args = parser.parse_args()
    staging.check("mnist", args.data_dir)
    check_writable(args.out, "the benchmark", "give a different --out.")
    rows = []
    for pair in range(PAIRS):
        for case in CASES:
            sampled_first = pair % 2 == 0
            for sampled in (sampled_first, not sampled_first):
                row = _train(case, pair, sampled, args.data_dir.absolute())
                rows.append({"case": case, "pair": pair} | row)
                pd.DataFrame(rows).to_csv(args.out / "monitor_cost.csv", index=False, float_format="%.6g")
    print(table(args.out / "monitor_cost.csv"))


def table(path: Path) -> str:
    """Lay out for each case the median ratio of its pairs' images/s, its interval, and the monitor's load."""
    chance = np.random.default_rng(1)
    lines = []
    for case, of_case in pd.read_csv(path).groupby("case", sort=False):
        speeds = of_case.pivot(index="pair", columns="sampled", values="images_per_s")
        ratios = (speeds[True] / speeds[False]).to_numpy()
        draws = np.median(chance.choice(ratios, (DRAWS, len(ratios))), axis=1)
        low, high = np.quantile(draws, [0.025, 0.975])
        lines.append(
            {
                "training": case,
                "pairs": str(len(ratios)),
                "images/s, sampled / not": f"{np.median(ratios):.3f} ({low:.3f} to {high:.3f})",
                "monitor, % of a core": f"{of_case.core_percent.median():.2f}",
                "monitor, MB": f"{of_case.memory_mb.max():.0f}",
            }
        )
    return page.markdown(pd.DataFrame(lines))


def _train(case: str, seed: int, sampled: bool, data_dir: Path) -> dict[str, object]:
    stage, ranks, options = CASES[case]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        submit = executor.submitter(STAGES[stage])
        handle = submit(
            Request(
                stage=STAGES[stage],
                resources=resources(STAGES[stage], ranks),
                arguments=(*TRAINING, *options, f"--seed={seed}"),
                site=Site(
                    {}, data_dir, folder, folder / "jobs", option_templates=OPTION_TEMPLATES, monitor=sampled
                ),
                folder=folder / "job",
                why_here="to time it",
                threads=1,
            )
        )
        load = _follow(handle)
        if handle.state().name == "failed":
            raise errors.UserError(f"{case}: the training failed ({handle.state().detail}).")
        (path,) = handle.results.glob("*.csv")
        speeds = [row["images_per_s"] for row in records.read(path) if not row["warmup"]]
    return {"sampled": sampled, "images_per_s": float(np.median(speeds))} | load


def _follow(handle: LocalHandle) -> dict[str, float]:
    """Wait for its end, and return the load of its monitor while it ran."""
    load = {}
    while handle.state().name == "running":
        if handle.monitor and not handle.has_ended():
            with suppress(psutil.Error):
                process = psutil.Process(handle.monitor.pid)
                seconds = time.time() - process.create_time()
                busy = sum(process.cpu_times()[:2])
                load = {"core_percent": 100 * busy / seconds, "memory_mb": process.memory_info().rss / 1e6}
        time.sleep(0.5)
    return load


if __name__ == "__main__":
    main()
