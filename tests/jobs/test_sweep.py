"""slurm/sweep.py, and `make compare` where there is a Slurm, through the scripts.

Every test works on a copy of the checkout, so that it can have a site file of its own, and a fault
planted in a stage script. There is a space in its path.
"""

import csv
import re
import shlex
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import psutil
import pytest
from checkout import Checkout, pretended, wait_until
from cluster import RunningCluster
from conftest import failed, succeeded

from manygpus.record import records

pytestmark = pytest.mark.usefixtures("mnist_dir")

SMALL = ("--batch-size", 100, "--train-size", 600, "--test-size", 200, "--width", 4)
RUNS = [f"{run}-batch100-train600-r1" for run in ("single-1gpu", "ddp-1gpu", "ddp-2gpu")]


class SweepCheckout(Checkout):
    """A copy of the checkout. `sweep` is the folder that its sweeps go to."""

    def __init__(self, folder: Path, cluster: RunningCluster | None = None) -> None:
        super().__init__(folder, cluster)
        self.sweep = folder / "a sweep"

    def start_sweep(self, *arguments: object) -> subprocess.CompletedProcess:
        return self.python("slurm/sweep.py", *arguments, "--out", self.sweep)

    def kill_sweep(self) -> None:
        self.kill(self.folder / "slurm/sweep.py", self.sweep)

    def job(self, run: str) -> str:
        """The name of the folder of the latest job of a run: with Slurm its number."""
        return (self.sweep / run / "job").readlink().name

    def rows(self, run: str) -> list[dict]:
        """The rows of the only CSV of a run; none if there is none yet."""
        csvs = list((self.sweep / run / "runs").glob("*.csv"))
        assert len(csvs) < 2
        return records.read(csvs[0]) if csvs else []

    def compared(self) -> list[tuple[str, int]]:
        """Stage and devices of the rows of the comparison."""
        table = pd.read_csv(self.sweep / "comparison.csv")
        return sorted(zip(table.stage, table.devices, strict=True))


@pytest.fixture
def checkout(tmp_path: Path) -> SweepCheckout:
    return SweepCheckout(tmp_path / "a checkout")


@pytest.fixture
def on_cluster(tmp_path: Path, cluster: RunningCluster) -> SweepCheckout:
    return SweepCheckout(tmp_path / "a checkout", cluster)


APART = {"SBATCH_EXCLUSIVE": "exclusive"}  # as the documents say


# --- a real Slurm -----------------------------------------------------------------------------------


def test_a_killed_sweep_resumes_and_a_failing_run_leaves_the_others(on_cluster: SweepCheckout) -> None:
    on_cluster.plant("ddp", "if os.environ['SLURM_NTASKS'] == '1': raise ValueError('planted')")
    arguments = (*SMALL, "--epochs", 2, "--stages", "single,ddp", "--precision", "fp32", "--max-jobs", 2)
    arguments += ("--metric", "test_accuracy", "--goal", "maximize")
    single, ddp1, ddp2 = RUNS
    with ThreadPoolExecutor() as background:
        killed = background.submit(on_cluster.start_sweep, *arguments)
        wait_until(lambda: len(on_cluster.rows(single)) == 2 and (on_cluster.sweep / ddp1 / "job").exists())
        on_cluster.kill_sweep()
        assert killed.result().returncode == -signal.SIGKILL
    before = {run: on_cluster.job(run) for run in (single, ddp1)}
    for job in before.values():
        on_cluster.cluster.wait(int(job))

    done = on_cluster.start_sweep(*arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert on_cluster.job(single) == before[single]
    assert on_cluster.job(ddp1) != before[ddp1]
    # It waited in the queue for the two others, and was not sent again.
    assert (on_cluster.sweep / "commands.txt").read_text().splitlines()[2].startswith(ddp2)
    assert len([*on_cluster.sweep.glob("logs/*_3_0_log.out")]) == 1
    assert f"{ddp1} failed: error on rank 0: ValueError: planted" in done.stdout
    assert f"failed: {ddp1}." in done.stderr
    assert "left out (1): stage single" in done.stdout
    assert on_cluster.compared() == [("ddp", 2), ("single", 1)]
    assert [row["job_id"] for row in on_cluster.rows(single)] == [before[single]] * 2
    assert "epoch 2/2" in (on_cluster.sweep / single / "log.out").read_text()
    # The best run comes first, whether it ran before the sweep was killed or after, and the failed one last.
    with (on_cluster.sweep / "sweep.csv").open(newline="") as file:
        ranked = {row["run"]: row["metric"] for row in csv.DictReader(file)}
    recorded = {run: str(on_cluster.rows(run)[-1]["test_accuracy"]) for run in (single, ddp2)}
    assert ranked == recorded | {ddp1: ""} and [*ranked][-1] == ddp1
    assert float(ranked[[*ranked][0]]) >= float(ranked[[*ranked][1]])
    assert most_at_a_time(on_cluster) <= 2


def most_at_a_time(checkout: SweepCheckout) -> int:
    """How many jobs of the checkout ran at a time."""
    events = []
    for line in checkout.cluster.run(["scontrol", "--oneliner", "show", "jobs"]).stdout.splitlines():
        if f"WorkDir={checkout.folder}" in line:
            times = dict(re.findall(r"(StartTime|EndTime)=(\S+)", line))
            events += [(times["StartTime"], 1), (times["EndTime"], -1)]
    now, most = 0, 0
    for _, change in sorted(events):  # within a second the ends come first
        now += change
        most = max(most, now)
    return most


def test_compare_chooses_its_epochs_on_gpus_and_scales_strong_and_weak(on_cluster: SweepCheckout) -> None:
    """On two GPUs in Slurm."""
    on_cluster.pretend()
    done = succeeded(on_cluster.python("results/compare.py", "--repeats", 1, **APART))
    assert "the length of an epoch" in done.stdout
    assert "measured on one GPU: 300,000 images/s\n" in done.stdout
    assert "batch 4096 on each GPU, epochs of 900,000 images" in done.stdout
    # As long as the run on one GPU by its record: 4 epochs of 3 + 1 s, and 13 around them.
    assert "about 4 minute(s)" in done.stdout
    (on_cluster.sweep,) = (on_cluster.folder / "results" / "comparisons").iterdir()
    table = pd.read_csv(on_cluster.sweep / "comparison.csv")
    rows = sorted(zip(table.global_batch, table.devices, table.stage, strict=True))
    strong = [(4096, 1, "ddp"), (4096, 1, "single"), (4096, 2, "ddp"), (4096, 2, "dp")]
    assert rows == [*strong, (8192, 1, "single"), (8192, 2, "ddp"), (8192, 2, "dp")]
    assert table.speedup.notna().all()
    assert set(table.images) == {897_024, 892_928}  # whole batches

    before = sorted(on_cluster.sweep.rglob("runs/*.csv"))
    assert len(before) == 1 + 7
    assert "Slurm found" in done.stdout and most_at_a_time(on_cluster) == 1
    too_many = on_cluster.python("results/compare.py", "--workers", 3)
    assert "--workers 3 is more than the 2 found here" in too_many.stderr
    resume = re.search(r"^resume   (.*)$", done.stdout, re.MULTILINE)[1]
    on_cluster.plant("single", "raise errors.UserError('not again')")
    again = on_cluster.run(*shlex.split(resume))
    assert "7 runs, 7 of them finished" in again.stdout, again.stdout + again.stderr
    assert "epochs of 900,000 images" in again.stdout
    assert "the length of an epoch" not in again.stdout
    assert sorted(on_cluster.sweep.rglob("runs/*.csv")) == before
    failed = on_cluster.python("results/compare.py")
    assert "the run on one GPU with batch 4096 failed, as reported above" in failed.stderr


def test_a_first_job_that_is_refused_ends_the_sweep(on_cluster: SweepCheckout) -> None:
    done = on_cluster.start_sweep(*SMALL, "--partition", "nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("error: Slurm did not accept the job")
    assert done.stderr.count("nowhere") == 1
    assert not list(on_cluster.sweep.rglob("*.csv"))


# --- without Slurm ----------------------------------------------------------------------------------


@pytest.mark.full
def test_compare_on_one_gpu(checkout: SweepCheckout) -> None:
    """It says what can be seen there. Sizes that are given are not measured."""
    checkout.pretend()
    checkout.redefine("manygpus/jobs/local_job.py", "def gpus_here(): return 1")
    arguments = ("--batch-size", 256, "--repeats", 2, "--out", checkout.sweep)
    done = succeeded(checkout.python("results/compare.py", *arguments, "--train-size", 120_000))
    assert "measured" not in done.stdout
    assert "epochs of 120,000 images" in done.stdout
    assert "One GPU shows" in done.stdout
    assert checkout.compared() == [("ddp", 1), ("dp", 1), ("single", 1)]
    assert set(pd.read_csv(checkout.sweep / "comparison.csv").runs) == {2}
    too_short = checkout.python("results/compare.py", "--train-size", 200)
    assert (too_short.returncode, too_short.stderr) == (
        1,
        "error: --train-size 200 is not one step with batch 4096 on each of 1 GPU(s): raise it, or lower "
        "--batch-size.\n",
    )
    checkout.plant("single", "raise errors.UserError('planted')")
    broken = checkout.python("results/compare.py")
    assert "failed: error on rank 0: planted" in broken.stdout
    assert broken.stderr.startswith("error: the run on one GPU with batch 4096 failed, as reported above")


@pytest.mark.full
def test_a_killed_local_sweep_starts_no_second_run_beside_the_one_that_survived(
    checkout: SweepCheckout,
) -> None:
    """Of a script of one's own, whose runs go on after the sweep was killed. It resumes after their end."""
    may_end = checkout.folder / "may end"
    survives = f"while not os.path.exists({str(may_end)!r}): time.sleep(0.1)\n    time.sleep(3)"
    script = checkout.folder / "mine.py"
    script.write_text(pretended("mine").replace("opts = options", f"{survives}\n    opts = options"))
    arguments = (*SMALL, "--no-cuda", "--script", script, "--gpus", "1,2")
    run = "mine-1gpu-batch100-train600-r1"
    with ThreadPoolExecutor() as background:
        killed = background.submit(checkout.start_sweep, *arguments, "--epochs", 1)
        wait_until((checkout.sweep / run / "log.out").exists)
        second = checkout.start_sweep(*arguments, "--epochs", 1)
        assert second.returncode == 1
        assert "another sweep.py is running" in second.stderr
        checkout.kill_sweep()
        assert killed.result().returncode == -signal.SIGKILL
    before = checkout.job(run)
    refusal = failed(checkout.start_sweep(*arguments, "--epochs", 1))
    number = int(re.search("kill ([0-9]+)", refusal)[1])
    may_end.touch()
    wait_until(lambda: not psutil.pid_exists(number))
    done = succeeded(checkout.start_sweep(*arguments, "--epochs", 1))
    assert "no Slurm here" in done.stdout
    assert "no epoch after the warm-up was measured" in done.stdout  # how many GPUs to ask for is not known
    assert checkout.job(run) == before
    assert checkout.compared() == [("mine", 1), ("mine", 2)]

    other = checkout.start_sweep(*arguments, "--epochs", 2)
    assert other.returncode == 1
    assert "belongs to a sweep with the options" in other.stderr


def test_a_dry_run_shows_the_matrix(checkout: SweepCheckout) -> None:
    checkout.fake("srun", "")
    checkout.fake("sbatch", "")  # only asked for
    checkout.site("export SBATCH_TIMELIMIT=1:00:00\n")
    arguments = ("--gpus", "1,3,4", "--gpus-per-node", 2, "--batch-size", "64,512", "--scaling", "both")
    arguments += ("--train-size", 600, "--num-workers", "0,2", "--repeats", 2)
    done = succeeded(checkout.start_sweep(*arguments, "--dry-run"))
    runs = re.findall(r"^(\S+-r\d) +to run", done.stdout, re.MULTILINE)
    shapes = ("single-1gpu-batch64", "dp-1gpu-batch64", "ddp-1gpu-batch64")
    shapes += ("single-1gpu-batch512", "dp-1gpu-batch512", "ddp-1gpu-batch512")
    shapes += ("ddp-4gpu-2nodes-batch64", "ddp-4gpu-2nodes-batch256", "ddp-4gpu-2nodes-batch512")
    assert sorted(runs) == sorted(
        f"{shape}-workers{workers}-train600-r{repeat}"
        for shape in shapes for workers in (0, 2) for repeat in (1, 2)
    )  # fmt: skip
    for reason in (
        "stage single uses 1 GPU, not 3",
        "stage dp is one process and cannot leave its node",
        "--gpus 3 does not divide evenly among 2 nodes",
        "--batch-size 2048 is more than the 600 training images",
    ):
        assert re.search(rf"^left out \(\d+\): {re.escape(reason)}$", done.stdout, re.MULTILINE), done.stdout
    assert "72.0 GPU-hours" in done.stdout
    assert not checkout.sweep.exists()


def test_a_sweep_of_an_own_script(checkout: SweepCheckout) -> None:
    """Called after the script; its data is not ours to look for, and its other options go to it."""
    checkout.fake("sbatch", "")
    checkout.fake("srun", "")
    (checkout.folder / "data").unlink()
    (checkout.folder / "mine.py").touch()
    arguments = ("--script", "mine.py", "--gpus", "2,4", "--batch-size", "70000,70001", "--width", 64)
    done = succeeded(checkout.start_sweep(*arguments, "--dry-run"))
    runs = re.findall(r"^(\S+-r1) +to run +(.*)$", done.stdout, re.MULTILINE)
    assert runs == [
        (f"mine-{gpus}gpu-batch70000-r1", f"1 node(s), {gpus} process(es), {gpus} GPU(s)") for gpus in (2, 4)
    ]
    assert "left out (1): --batch-size 70001" in done.stdout


def test_a_file_system_without_locks(checkout: SweepCheckout) -> None:
    checkout.pretend()
    checkout.plant(
        "manygpus/commands/sweep.py",
        """
        import fcntl

        def no_locks(*arguments):
            raise OSError(37, "No locks available")

        fcntl.flock = no_locks
        """,
    )
    arguments = ("--stages", "single", "--gpus", 1, "--dataset", "synthetic", "--no-cuda")
    done = succeeded(checkout.start_sweep("--local", *arguments))
    assert "[1/1] single-1gpu-batch256-r1 finished" in done.stdout


def test_dp_needs_gpus(checkout: SweepCheckout) -> None:
    done = checkout.start_sweep("--no-cuda", "--stages", "dp", "--dry-run")
    assert "left out (1): without GPUs, stage dp" in done.stdout
    assert re.findall(r"^(dp-\S+)", done.stdout, re.MULTILINE) == ["dp-1gpu-batch256-r1"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--stages single,tp", "'tp'"),
        ("--train-size 600,100000001", "100000001 is too large"),
        ("--stages single --script mine.py", "--script: not allowed with"),
        ("--script mine.py", "there is no script mine.py"),
        ("--stages single --gpus 2", "no run is left"),
        ("--data-dir nowhere", "MNIST in nowhere"),
        ("--resume auto --checkpoint-dir somewhere", "single jobs"),
        ("--out /proc/nowhere", "cannot be written to"),
        ("--out manygpus", "other things"),
        ("--gpus 4096 --batch-size 4096", "4096 workers"),
        ("--batch-size-per-gpu 32", "--scaling weak"),
        ("--deadline soon", "'soon'"),
    ],
)
def test_a_sweep_refuses_bad_options_in_one_sentence(
    arguments: str, sentence: str, checkout: SweepCheckout
) -> None:
    done = checkout.python("slurm/sweep.py", *arguments.split())
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*\n", done.stderr)
    assert sentence in done.stderr
    assert not (checkout.folder / "results" / "sweeps").exists()
