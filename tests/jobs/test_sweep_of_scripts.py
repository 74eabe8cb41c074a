"""slurm/sweep.py over options of a script that knows nothing of the kit, and over those of our stages."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkout import Checkout, commit_of, wait_until
from cluster import running_cluster
from conftest import failed, one_error, succeeded
from json_documents import document

from manygpus.jobs.sweeps import progress_table

# Without PyTorch. It takes up what another run has saved where it saves.
SCRIPT = """
import argparse, os, signal, sys
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--batch_size", type=int)
parser.add_argument("--dir", default=".")
parser.add_argument("config", nargs="*")
args = parser.parse_args()
if args.lr == 8:
    os.kill(os.getpid(), signal.SIGKILL)
if args.lr > 1:
    sys.exit("lr is too large")
snapshot = os.path.join(args.dir, "snapshot.pt")
if os.path.exists(snapshot):
    print("resumed from", snapshot)
open(snapshot, "w").close()
print("config", *args.config)
print(f"val loss {args.lr / args.batch_size:g}")
os._exit(0)
"""


def write(checkout: Checkout) -> Path:
    script = checkout.folder / "my work" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    return script


def rows(sweep: Path) -> dict[str, dict[str, str]]:
    """The rows of the table of a sweep, by the names of the runs."""
    with (sweep / "sweep.csv").open(newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def test_an_option_of_a_script_is_varied_and_the_table_tells_how_its_runs_ended(checkout: Checkout) -> None:
    script, sweep = write(checkout), checkout.folder / "a sweep"

    def swept(lrs: str, *more: str) -> subprocess.CompletedProcess:
        options = (*more, "--local", "--out", sweep, "--gpus", 1, "--batch-size", 8, "--vary", f"lr={lrs}")
        options += ("--metric", "val loss", "--goal", "minimize")
        theirs = ("--batch_size", "{batch/gpus}", "--dir", "{folder}")
        done = checkout.python("slurm/sweep.py", *options, "--plain", script, *theirs, cwd=script.parent)
        assert done.returncode == ("9" in lrs), done.stdout + done.stderr
        return done

    printed = swept("0.4,8,9").stdout
    assert re.search("^train-1gpu-batch8-lr9-r1 +9 .*lr is too large$", printed, re.MULTILINE), printed
    assert "no run has written a record" in printed
    by_run = rows(sweep)
    shown = {run: (row["state"], row["exit_code"], row["last_line"]) for run, row in by_run.items()}
    assert shown == {
        "train-1gpu-batch8-lr0.4-r1": ("finished", "0", "val loss 0.05"),
        "train-1gpu-batch8-lr8-r1": ("failed", "137", ""),
        "train-1gpu-batch8-lr9-r1": ("failed", "1", "lr is too large"),
    }
    assert all(float(row["seconds"]) > 0 and row["batch"] == "8" for row in by_run.values())
    # It resumes: other values add runs, and what has finished is not run again. The lowest loss comes first.
    again = swept("0.2,0.4", "--json")
    assert "2 runs, 1 of them finished" in again.stderr
    best, *_, worst = document(again.stdout, "sweep")["runs"]
    assert (best["settings"], best["metric"], best["state"]) == ({"lr": "0.2"}, 0.025, "finished")
    assert (worst["metric"], worst["state"]) == (None, "failed")
    jobs = document(checkout.python("slurm/jobs.py", "--json").stdout, "jobs")["jobs"]
    assert [job["state"] for job in jobs if job["log"] == worst["log"]] == ["failed"]
    ranked = [(row["lr"], row["metric"]) for row in rows(sweep).values()]
    assert ranked[:2] == [("0.2", "0.025"), ("0.4", "0.05")] and {*ranked[2:]} == {("8", ""), ("9", "")}
    logs = [log.read_text() for log in sweep.glob("*/job/*_0_log.out")]
    assert len(logs) == 4 and not any("resumed" in log for log in logs)


def test_runs_that_start_in_their_own_folders_do_not_find_each_others_files(checkout: Checkout) -> None:
    script, sweep = write(checkout), checkout.folder / "a sweep"
    options = ("--local", "--chdir", "--out", sweep, "--gpus", 1, "--vary", "lr=0.1,0.2")
    done = checkout.python(
        "slurm/sweep.py", *options, "--plain", "-m", "train", "--batch_size", 1, cwd=script.parent
    )
    succeeded(done)
    assert len([*sweep.glob("*/snapshot.pt")]) == 2 and not (script.parent / "snapshot.pt").exists()
    assert "resumed" not in "".join(log.read_text() for log in sweep.glob("*/job/*_0_log.out"))


def test_a_dry_run_shows_each_command_and_fills_in_what_it_knows_alone(checkout: Checkout) -> None:
    checkout.fake("sbatch", "")
    checkout.fake("srun", "")
    script, sweep = write(checkout), checkout.folder / "a sweep"
    options = ("--out", sweep, "--gpus", "1,3,4", "--gpus-per-node", 2, "--batch-size", 8, "--vary", "lr=0.1")
    untouched = ("home=${oc.env:HOME}", "n=${gpus}", '{"a": {gpu}}')
    theirs = (
        "optimizer.lr={lr}",
        "devices={gpus}x{nodes}",
        "{batch}",
        "{batch/gpus}",
        "{folder}",
        *untouched,
    )
    done = succeeded(checkout.python("slurm/sweep.py", *options, "--dry-run", "--plain", script, *theirs))
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("    python")]
    names = ("train-1gpu-batch8-lr0.1-r1", "train-4gpu-2nodes-batch8-lr0.1-r1")
    expected = zip(("1x1", "4x2"), ("8", "2"), names, strict=True)
    assert commands == [
        [
            "python",
            str(script),
            "optimizer.lr=0.1",
            f"devices={shape}",
            "8",
            share,
            str(sweep / name),
            *untouched,
        ]
        for shape, share, name in expected
    ]
    assert "left out (1): --gpus 3 does not divide" in done.stdout
    assert "all runs start in" not in done.stdout and not sweep.exists()
    shared = ("--per-job", 2, "--gpus", 2, "--dry-run")
    for option in ("--gpus-per-node", "--gpus-per-job"):
        refused = checkout.python("slurm/sweep.py", *shared, option, 1, "--plain", script)
        assert option in failed(refused)


def test_there_is_one_run_for_each_value(checkout: Checkout) -> None:
    """On one GPU without --gpus, and whole if it has commas, or is a flag."""
    script = write(checkout)
    options = ("--local", "--dry-run", "--vary", "betas=[0.9,0.95],[0.9,0.999]", "--vary", "flag=--use-ema,")
    arguments = (*options, "--json", "--plain", script, "o={betas}", "{flag}")
    done = succeeded(checkout.python("slurm/sweep.py", *arguments))
    commands = [run["command"] for run in document(done.stdout, "sweep")["runs"]]
    values = ("o=[0.9,0.95]", "o=[0.9,0.999]")
    expected = [[value, *flag] for value in values for flag in (["--use-ema"], [])]
    assert commands == [["python", str(script), *words] for words in expected]


def test_a_file_a_flag_and_options_together_are_varied_with_each_other(checkout: Checkout) -> None:
    script = write(checkout)
    (script.parent / "grid.yaml").write_text("optimizer: [adam, sgd]\n")
    options = ("--local", "--dry-run", "--vary", "grid.yaml", "--vary", "width,lr=[64,0.1],[128,0.05]")
    options += ("--vary", "use-ema")
    done = checkout.python("slurm/sweep.py", *options, "--plain", script, "o={optimizer}", cwd=script.parent)
    commands = [
        shlex.split(line) for line in succeeded(done).stdout.splitlines() if line.startswith("    python")
    ]
    together = ("--width 64 --lr 0.1", "--width 128 --lr 0.05")
    assert [words[2:] for words in commands] == [
        [f"o={optimizer}", *sizes.split(), *flag]
        for optimizer in ("adam", "sgd") for sizes in together for flag in (["--use-ema"], [])
    ]  # fmt: skip
    names = re.findall("^(train-\\S+) +to run", done.stdout, re.MULTILINE)
    assert len({*names}) == 8 and "train-1gpu-optimizersgd-width64-lr0.1-no-use-ema-r1" in names


def test_options_of_a_stage_are_varied_by_the_same_door(checkout: Checkout) -> None:
    stage = ("--local", "--no-cuda", "--stages", "single", "--gpus", 1, "--dataset", "synthetic")
    vary = ("--vary", "seed=3,7", "--vary", "width=16,32")
    done = succeeded(checkout.python("slurm/sweep.py", *stage, *vary, "--repeats", 2, "--dry-run"))
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("    python")]
    varied = [[words[words.index("--width") + 1], *words[-3:-2]] for words in commands]
    assert sorted(varied) == sorted([width, seed] for width in ("16", "32") for seed in ("3", "4", "7", "8"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--vary grid.yaml --plain train.py", "grid.yaml cannot be read"),
        ("--vary lr,batch_size=[1,2],3 --plain train.py", "each of lr, batch_size"),
        ("--vary lr --stages single", "expected one argument"),
        ("--vary lr= --plain train.py", "NAME=VALUE"),
        ("--vary lr=1, --plain train.py", "--vary lr has an empty value"),
        ("--vary lr=[1,2 --plain train.py", "argument --vary"),
        ("--vary lr='1,2 --plain train.py", "argument --vary"),
        ("--vary gpus=1,2 --plain train.py", "give --gpus"),
        ("--vary lr=1 --vary lr=2 --plain train.py", "twice"),
        ("--batch-size 8 --plain train.py", "has no place"),
        ("--plain train.py {batch}", "give --batch-size"),
        ("--gpus 2 --batch-size 7 --plain train.py {batch/gpus}", "7 does not divide evenly among 2 GPUs"),
        ("--vary batch_size=1,2 --stages single", "itself has"),
        ("--metric loss --plain train.py", "--goal"),
        ("--per-job 2 --plain train.py", "--max-jobs"),
        ("--gpus-per-job 2 --plain train.py", "--per-job"),
        ("--metric loss=[0-9]+ --goal minimize --plain train.py", "0 groups"),
        ("--metric loss=( --goal minimize --plain train.py", "--metric loss=("),
    ],
)
def test_what_cannot_be_varied_is_refused_in_one_sentence(
    arguments: str, sentence: str, checkout: Checkout
) -> None:
    script = write(checkout)
    done = checkout.python("slurm/sweep.py", "--local", "--dry-run", *arguments.split(), cwd=script.parent)
    assert sentence in failed(done)
    assert done.stderr.count("\n") == 1


# The first two meet, and the first then fails. The second ends only when the third has begun.
MET = """
import json, os, sys, time
from pathlib import Path

folder, number = Path(sys.argv[2]), sys.argv[4]
place = {"cores": sorted(os.sched_getaffinity(0)), "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}
(folder / f"{number}.new").write_text(json.dumps(place))
(folder / f"{number}.new").rename(folder / number)
for other in {"1": "2", "2": "13"}.get(number, ""):
    while not (folder / other).exists():
        time.sleep(0.1)
sys.exit(number == "1")
"""


def test_runs_on_one_machine_have_places_of_their_own_which_the_next_ones_take(checkout: Checkout) -> None:
    checkout.redefine("manygpus/jobs/local_job.py", "def gpus_here(): return 2")
    script, sweep = write(checkout), checkout.folder / "a sweep"
    script.write_text(MET)
    options = ("--local", "--max-jobs", 2, "--out", sweep, "--vary", "number=1,2,3")
    env = {"CUDA_VISIBLE_DEVICES": "5,7"}
    done = checkout.python("slurm/sweep.py", *options, "--plain", script, "--folder", script.parent, **env)
    assert done.returncode == 1, done.stdout + done.stderr
    states = {row["number"]: (row["state"], row["exit_code"]) for row in rows(sweep).values()}
    assert states == {"1": ("failed", "1"), "2": ("finished", "0"), "3": ("finished", "0")}, done.stdout
    first, second, third = (json.loads((script.parent / number).read_text()) for number in "123")
    assert (first["gpu"], second["gpu"]) == ("5", "7") and third == first
    if len(os.sched_getaffinity(0)) > 1:
        assert not {*first["cores"]} & {*second["cores"]}


# The first of three is stopped once, and comes back; the last one fails.
STOPPED = """
import os, signal, sys, time
from pathlib import Path

asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(True))
lr, restart = sys.argv[2], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
print("lr", lr, "restart", restart, *map(repr, sys.argv[3:]), flush=True)
if lr == "1" and restart == 0:
    while not asked:
        time.sleep(0.1)
    (Path(os.environ["MANYGPUS_JOB_DIR"]) / "stopped").touch()
os._exit(3 if lr == "3" else 0)
"""


def test_runs_of_one_shape_are_an_array_whose_jobs_go_each_their_own_way(on_cluster: Checkout) -> None:
    """The sweep is killed meanwhile, and resumes with the jobs that it finds."""
    script, sweep = write(on_cluster), on_cluster.folder / "a sweep"
    script.write_text(STOPPED)
    odd = "two\nlines and $it's"
    options = ("--out", sweep, "--max-jobs", 2, "--gpus", 1, "--vary", "lr=1,2,3")
    options += ("--when-requeued", "--again {lr}", "--plain", script, "--lr", "{lr}", odd)
    log = sweep / "train-1gpu-lr1-r1" / "log.out"
    with ThreadPoolExecutor() as background:
        killed = background.submit(on_cluster.python, "slurm/sweep.py", *options)
        wait_until(lambda: log.exists() and "lr 1 restart 0" in log.read_text())
        on_cluster.kill(on_cluster.folder / "slurm/sweep.py", sweep)
        assert killed.result().returncode == -signal.SIGKILL
    job = log.readlink().name.removesuffix("_0_log.out")
    assert re.fullmatch("[0-9]+_1", job)
    assert "#SBATCH --array=1,2,3%2\n" in (sweep / "train-1gpu.sh").read_text()
    on_cluster.cluster.run(["scancel", "--signal=USR2", job])
    done = on_cluster.python("slurm/sweep.py", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    shown = {row["lr"]: (row["state"], row["exit_code"], row["last_line"]) for row in rows(sweep).values()}
    assert shown == {
        "1": ("finished", "0", f"lr 1 restart 1 {odd!r} '--again' '1'"),
        "2": ("finished", "0", f"lr 2 restart 0 {odd!r}"),
        "3": ("failed", "3", f"lr 3 restart 0 {odd!r}"),
    }, done.stdout
    # It is the job that had been sent, and the list of jobs has each of them by the name that scancel takes:
    # one has the number of the array for its own. If the third had failed before the sweep resumed, it was
    # sent once more, by itself, and stands further down.
    assert log.readlink().name == f"{job}_0_log.out"
    listed = on_cluster.python("slurm/jobs.py").stdout.splitlines()
    numbers = {line.split()[2]: line.split()[0] for line in reversed(listed) if "train-1gpu" in line}
    assert numbers == {f"train-1gpu-lr{lr}-r1": f"{job[:-2]}_{lr}" for lr in (1, 2, 3)}, listed


# The second does not end before it has begun twice.
BEGUN_TWICE = """
import sys, time
from pathlib import Path

begun = Path(sys.argv[2]) / f"begun by {sys.argv[4]}"
with begun.open("a") as file:
    file.write("x")
while sys.argv[4] == "2" and begun.read_text() == "x":
    time.sleep(0.1)
"""


@pytest.mark.full
def test_a_sweep_within_a_job_that_comes_back_keeps_what_has_finished(on_cluster: Checkout) -> None:
    script, sweep = write(on_cluster), on_cluster.folder / "a sweep"
    script.write_text(BEGUN_TWICE)
    command = [
        sys.executable,
        on_cluster.folder / "slurm/sweep.py",
        "--local",
        "--max-jobs",
        2,
        "--out",
        sweep,
    ]
    command += ["--vary", "number=1,2,3", "--plain", script, "--folder", script.parent]
    wrapped = shlex.join(map(str, command))
    sent = on_cluster.run("sbatch", "--parsable", "--cpus-per-task=2", "--requeue", "--wrap", wrapped)
    job = int(succeeded(sent).stdout)
    # The third takes the place of the first, while the second goes on.
    wait_until(lambda: all((script.parent / f"begun by {number}").exists() for number in "23"))
    on_cluster.cluster.run(["scontrol", "requeue", job])
    on_cluster.cluster.wait(job)
    assert {row["number"]: row["state"] for row in rows(sweep).values()} == dict.fromkeys("123", "finished")
    begun = [(script.parent / f"begun by {number}").read_text() for number in "12"]
    assert begun == ["x", "xx"]


# The third takes the place of the first, which has failed. The fourth ends only if it has begun twice.
SHARING = """
import os, signal, sys, time
from pathlib import Path

begun, number = Path(sys.argv[2]), sys.argv[4]
with begun.open("a") as file:
    file.write(f"{number} ")

def wait_until_begun(number, times=1):
    while begun.read_text().split().count(number) < times:
        time.sleep(0.1)

print("gpu", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
if number == "1":
    wait_until_begun("2")
    sys.exit(3)
if number == "2":
    wait_until_begun("3")
    os.kill(os.getpid(), signal.SIGKILL)
if number == "4":
    wait_until_begun("4", times=2)
if number == "5":
    wait_until_begun("4")
print("loss", number, "restart", os.environ.get("SLURM_RESTART_COUNT", "0"), *sys.argv[5:])
"""


def test_runs_share_a_job_whose_requeue_does_what_has_not_ended(on_cluster: Checkout) -> None:
    """They run frozen code, each has an end and a GPU of its own, and a free place takes the next."""
    script, sweep = write(on_cluster), on_cluster.folder / "a sweep"
    script.write_text(SHARING)
    commit_of(script.parent)
    begun = on_cluster.folder / "begun"
    options = ("--out", sweep, "--per-job", 2, "--max-jobs", 1, "--vary", "number=1,2,3,4,5")
    options += ("--metric", "loss", "--goal", "maximize", "--when-requeued", "--again")
    with ThreadPoolExecutor() as background:
        swept = background.submit(
            on_cluster.python, "slurm/sweep.py", *options, "--plain", script, "--begun", begun
        )
        fifth = sweep / "train-1gpu-number5-r1"
        wait_until(lambda: progress_table.has_finished(fifth))
        script.write_text("raise SystemExit(9)")
        (log,) = (sweep / "logs").iterdir()
        job = log.name.removesuffix("_0_log.out")
        on_cluster.cluster.run(["scontrol", "requeue", job])
        done = swept.result()
    assert done.returncode == 1, done.stdout + done.stderr
    order = begun.read_text().split()
    assert [{*order[:2]}, order[2], {*order[3:5]}, order[5:]] == [{"1", "2"}, "3", {"4", "5"}, ["4"]]
    table = rows(sweep)
    shown = {row["number"]: (row["exit_code"], row["metric"], row["last_line"]) for row in table.values()}
    first, second = shown.pop("1"), shown.pop("2")
    assert (first[:2], second[:2]) == (("3", ""), ("137", "")) and {first[2], second[2]} == {"gpu 0", "gpu 1"}
    assert shown == {
        "3": ("0", "3.0", "loss 3 restart 0"),
        "4": ("0", "4.0", "loss 4 restart 1 --again"),
        "5": ("0", "5.0", "loss 5 restart 0"),
    }
    assert [*table][0] == fifth.name
    listed = [line.split() for line in on_cluster.python("slurm/jobs.py").stdout.splitlines()]
    states = {words[2]: (words[0], words[3]) for words in listed if words[2].startswith("train-1gpu-number")}
    ends = {number: (job, "failed" if number in "12" else "done") for number in "12345"}
    assert states == {f"train-1gpu-number{number}-r1": end for number, end in ends.items()}, listed


# The first is stopped and saves. The second hears no signal, and ends by itself once the first has. The third
# begins after that.
SAVING = """
import os, signal, sys, time
from pathlib import Path

folder, number = Path(sys.argv[2]), sys.argv[4]
asked, job = [], Path(os.environ["MANYGPUS_JOB_DIR"])
saved, stopped = job / "checkpoints" / "saved", folder / "stopped"
print("gpu", os.environ["CUDA_VISIBLE_DEVICES"], "threads", os.environ["OMP_NUM_THREADS"], flush=True)
if number == "1":
    signal.signal(signal.SIGUSR2, lambda *_: asked.append(True))
    (folder / "waits").touch()
while number == "1" and not saved.exists():
    time.sleep(0.1)
    if asked:
        saved.touch()
        (job / "stopped").touch()
        stopped.touch()
        sys.exit()
while not stopped.exists():
    time.sleep(0.1)
print("ends after the stop")
"""


@pytest.mark.full
def test_a_shared_job_that_is_stopped_resumes_those_of_its_runs_that_have_saved(on_cluster: Checkout) -> None:
    """They share its GPU, too, and each is watched."""
    script, sweep = write(on_cluster), on_cluster.folder / "a sweep"
    script.write_text(SAVING)
    options = ("--out", sweep, "--per-job", 2, "--gpus-per-job", 1, "--max-jobs", 1, "--vary", "number=1,2,3")
    command = ("slurm/sweep.py", *options, "--plain", script, "--folder", script.parent)
    with ThreadPoolExecutor() as background:
        swept = background.submit(on_cluster.python, *command, SITE_MONITOR="on", OMP_NUM_THREADS="7")
        second = sweep / "train-1gpu-number2-r1" / "log.out"
        wait_until(lambda: (script.parent / "waits").exists() and second.exists())
        (log,) = (sweep / "logs").iterdir()
        job = log.name.removesuffix("_0_log.out")
        on_cluster.cluster.run(["scancel", "--signal=USR2", job])
        done = succeeded(swept.result())
    shown = {row["number"]: row["last_line"] for row in rows(sweep).values()}
    assert shown == dict.fromkeys("123", "ends after the stop"), done.stdout
    logs = [(sweep / f"train-1gpu-number{number}-r1" / "log.out").read_text() for number in "123"]
    assert all("gpu 0 threads 2\n" in text and "watch   " in text for text in logs), logs
    # The verdict of their job is that of each.
    of_job = ("slurm/monitor.py", "--verdict", job)
    said = succeeded(on_cluster.python(*of_job)).stdout
    assert all(f"train-1gpu-number{number}-r1 was watched for" in said for number in "123"), said
    assert str(on_cluster.folder / "results" / "jobs") in one_error(on_cluster.python(*of_job, "--json"))
    # The first has begun twice.
    assert len([*sweep.glob("*/job/*_0_log.out")]) == 4
    asked = (sweep / "train-1gpu.sh").read_text()
    assert all(
        f"#SBATCH --{option}\n" in asked for option in ("gpus-per-node=1", "cpus-per-task=4", "mem=16G")
    )


@pytest.mark.full
def test_what_a_site_with_short_arrays_refuses_leaves_the_runs_that_it_takes(tmp_path: Path) -> None:
    """One sentence names its limit. The runs that it has taken end, and are in the table."""
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "slurm.conf").write_text("MaxArraySize=3\n")
    with running_cluster("--conf", conf) as cluster:
        checkout = Checkout(tmp_path / "a checkout", cluster)
        script, sweep = write(checkout), checkout.folder / "a sweep"
        options = ("--out", sweep, "--gpus", "1,2", "--batch-size", 1, "--vary")
        theirs = ("--plain", script, "--batch_size", "{batch}", "--dir", "{folder}")
        done = checkout.python("slurm/sweep.py", *options, "lr=0.1,0.2", *theirs)
        assert done.returncode == 1 and done.stderr.count("MaxArraySize") == 1, done.stdout + done.stderr
        states = {(row["gpus"], row["lr"]): row["state"] for row in rows(sweep).values()}
        assert states == {
            ("1", "0.1"): "finished",
            ("1", "0.2"): "finished",
            ("2", "0.1"): "failed",
            ("2", "0.2"): "failed",
        }
        refused = checkout.python("slurm/sweep.py", *options, "lr=0.1,0.2", *theirs)
        assert "MaxArraySize" in failed(refused)
