"""submit.py: jobs by submitit, as local processes and on a real Slurm, the practice cluster.

Every test works on a copy of the checkout, so that it can have a site file of its own, and another
stage script. There is a space in its path.
"""

import errno
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from checkout import FOLDERS, SCRIPTS, Checkout, wait_until
from cluster import RunningCluster
from conftest import REPOSITORY, one_error, rows_of, succeeded

from manygpus import job_folder
from manygpus.errors import UserError
from manygpus.job_folder import Outcome
from manygpus.jobs import local_job, site, slurm
from manygpus.jobs.submit import slurm_options
from manygpus.jobs.watch import job_status
from manygpus.jobs.watch.job_status import SlurmHandle, State

SMALL = ("--train-size", 600, "--test-size", 200, "--epochs", 1, "--width", 4, "--precision", "fp32")
SMALL += ("--no-cuda",)
# A stage that only tells how it was started.
FACTS = """
import json, os, signal, sys
from pathlib import Path
from manygpus import errors

@errors.entrypoint
def main():
    report = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "signals": {str(n): str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGUSR2)},
    }
    Path(os.environ["MANYGPUS_JOB_DIR"], f"report-{os.environ['RANK']}.json").write_text(json.dumps(report))
    # here

if __name__ == "__main__":
    main()
"""


def job_folders(checkout: Checkout) -> list[Path]:
    return sorted((checkout.folder / "results" / "jobs" / "submitit").glob("*"))


def reports_in(folder: Path) -> list[dict]:
    """Return what the ranks of the stage `FACTS` printed, in rank order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("report-*.json"))]


# --- local processes --------------------------------------------------------------------------------


def test_a_script_of_ones_own(checkout: Checkout) -> None:
    """Its data and its own options are not checked; it imports the modules next to it."""
    folder = checkout.folder / "my work"
    folder.mkdir()
    (folder / "beside.py").touch()
    (folder / "my training.py").write_text(f"import beside\n{FACTS}")
    (checkout.folder / "data").unlink()
    arguments = ("--width", "64", "--train-size", "70000")
    succeeded(checkout.submit_py("ddp", "--script", "my work/my training.py", "--wait", *arguments))
    (folder,) = job_folders(checkout)
    assert folder.name.startswith("my training-")
    assert [report["arguments"][-4:] for report in reports_in(folder)] == [list(arguments)] * 2


def test_the_environment_of_local_processes(checkout: Checkout) -> None:
    """What the user's shell has set for something else does not count, except the choice of GPUs."""
    checkout.script("ddp").write_text(FACTS)
    done = checkout.submit_py(
        "ddp", "--gpus", 2, "--wait", "--seed", 5,
        RANK="7", WORLD_SIZE="9", LOCAL_RANK="7", MASTER_ADDR="elsewhere", MASTER_PORT="1",
        TORCHELASTIC_USE_AGENT_STORE="True", PET_NNODES="3", OMPI_COMM_WORLD_SIZE="2", GROUP_RANK="1",
        SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]", SLURM_STEP_ID="0",
        CUDA_VISIBLE_DEVICES="4,6,7",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = job_folders(checkout)
    for rank, report in enumerate(reports_in(folder)):
        environment = report["environment"]
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        names += ("CUDA_VISIBLE_DEVICES",)
        assert [environment[name] for name in names] == [str(rank), str(rank), "2", "2", "localhost", "4,6"]
        assert 1024 < int(environment["MASTER_PORT"]) < 32768
        assert [
            name for name in environment if name.startswith(("TORCHELASTIC", "PET_", "OMPI", "SLURM"))
        ] == []
        assert set(report["signals"].values()) == {str(signal.SIG_DFL)}
        folders = {"data": checkout.folder / "data", "results": checkout.folder / "results"}
        folders["checkpoint"] = folder / "checkpoints"
        before = [word for name, place in folders.items() for word in (f"--{name}-dir", str(place))]
        assert report["arguments"] == [*before, "--resume", "auto", "--seed", "5"]


def test_the_gpus_of_this_machine(checkout: Checkout) -> None:
    """Without Slurm all of them are used, but for one process one; and no more than there are."""
    checkout.redefine("manygpus/jobs/local_job.py", "def gpus_here(): return 3")
    checkout.script("ddp").write_text(FACTS)
    sizes = ("--batch-size", 66)
    # What the shell has chosen; AMD's variable is the one that counts, where there are both.
    chosen = {"CUDA_VISIBLE_DEVICES": "8,9", "HIP_VISIBLE_DEVICES": "1,5,6,7"}
    succeeded(checkout.submit_py("ddp", *sizes, "--wait", **chosen))
    for report in reports_in(*job_folders(checkout)):
        assert report["environment"]["HIP_VISIBLE_DEVICES"] == "1,5,6"
        assert report["environment"]["CUDA_VISIBLE_DEVICES"] == "1,5,6"
        assert report["environment"]["WORLD_SIZE"] == "3"
    checkout.script("single").write_text(FACTS)
    before = set(job_folders(checkout))
    assert checkout.submit_py("single", "--gpus", 0, "--wait", CUDA_VISIBLE_DEVICES="3").returncode == 0
    (report,) = reports_in(*set(job_folders(checkout)) - before)
    assert report["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    for stage, arguments, exit_code, key_words in (
        ("single", (), 0, "1 local"),
        ("ddp", ("--gpus", 2), 0, "2 local"),
        ("ddp", ("--gpus", 4), 1, "3 GPU(s) of this machine"),
        ("ddp", ("--gpus", 4, "--no-cuda"), 0, "4 local"),
        ("ddp", ("--no-cuda",), 0, "2 local"),
        ("dp", (), 1, "63 or 66"),
    ):
        done = checkout.submit_py(stage, *arguments, "--dry-run")
        assert done.returncode == exit_code, arguments
        assert key_words in done.stdout + done.stderr, arguments
        assert "Traceback" not in done.stderr


def test_gpus_are_those_that_pytorch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_job, "GPU_DEVICES", ("null",))  # as good as an AMD GPU's: there is one
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local_job.gpus_here() == 2


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        # Rank 0 waits for the other: for minutes, were it not ended, by force.
        (("signal.signal(signal.SIGTERM, print); time.sleep(600)", "raise errors.UserError('planted')"),
         "error on rank 1: planted"),
        (("time.sleep(600)", "os.kill(os.getpid(), signal.SIGKILL)"),
         "rank 0, 1 ended silently: killed"),
        (("os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)", "time.sleep(600)"),
         "rank 0"),  # and 1, if that has begun
        # They have met, so rank 0 fails too, and must not be taken for the reason.
        (("time.sleep(1); raise RuntimeError('gloo')", "os.kill(os.getpid(), signal.SIGKILL)"),
         "rank 1 ended silently: killed"),
        (("import nothing_of_that_name", ""),
         "error on rank 0: .*nothing_of_that_name"),
    ],
    ids=["raises", "is killed", "without its parent", "is killed and lost", "cannot import"],
)  # fmt: skip
def test_the_rank_that_failed_tells_why(faults: tuple[str, str], error: str, checkout: Checkout) -> None:
    planted = f"import time; exec({faults!r}[int(os.environ['RANK'])])"
    checkout.script("ddp").write_text(FACTS.replace("# here", planted))
    done = checkout.submit_py("ddp", "--gpus", 2, "--wait", *SMALL)
    assert done.returncode == 1
    assert re.fullmatch(rf"job \d+ failed: {error}.*\n", done.stderr), done.stderr
    (folder,) = map(str, job_folders(checkout))
    ours = [
        process for process in psutil.process_iter(["cmdline"]) if folder in (process.info["cmdline"] or ())
    ]
    assert psutil.wait_procs(ours, timeout=60)[1] == []


def test_ctrl_c_ends_local_processes(checkout: Checkout) -> None:
    """SIGTERM does it, which submitit's processes would survive."""
    checkout.script("ddp").write_text(FACTS.replace("# here", "import time; time.sleep(600)"))
    process = subprocess.Popen(
        [sys.executable, checkout.folder / "03_multigpu_ddp" / "submit.py", "--gpus", "2", "--wait"],
        cwd=checkout.folder,
        env=checkout.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    next(line for line in process.stdout if line.startswith("running: "))
    wait_until(lambda: len(list(checkout.folder.rglob("report-*.json"))) == 2)
    ours = psutil.Process(process.pid).children(recursive=True)
    assert len(ours) == 3  # submitit's controller and two ranks
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to all of them
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint == ""
    assert psutil.wait_procs(ours, timeout=60)[1] == []


# --- a real Slurm -----------------------------------------------------------------------------------


ODD = ["-", "--", "--x", "-rf *", "", " ", "two words", "~", "*", "!x", "#", "é", "=", "a=b", "%j", "%"]
ODD += ["$HOME", "$(touch pwned)", "`touch pwned`", "; touch pwned", "| cat", "> pwned", "&& ls", "${x}"]
ODD += ["\\", "\\n", "'", '"', "''", '"$(id)"', "'$(id)'", "new\nline", "\n", "\t", "\r", "\x1b[31mred"]
ODD += ["\u202e", "#SBATCH --hold"]
ODD += [before + odd + after for odd in ODD for before, after in (("--x=", ""), ("a", "'b"))]


def test_odd_text_stays_text(tmp_path: Path, cluster: RunningCluster) -> None:
    """More than a hundred arguments, the checkout's path, a script's name and the job's name: in two jobs."""
    assert len(ODD) > 100
    checkout = Checkout(tmp_path / "-a \"b\" $(touch pwned) `id` 'c';&|*[x]{y}<z>!~#=é", cluster)
    own_script = FACTS.replace("os.environ['RANK']", "os.environ.get('RANK', os.environ['SLURM_PROCID'])")
    script = checkout.folder / "03_multigpu_ddp" / "-my\n$(id) '%j.py"
    for path in (script, script.with_name("mine.py")):
        path.write_text(own_script)
    name = "-x $(touch pwned) '\"\n#SBATCH --hold \033[31m"
    job = checkout.submit("srun", "mine.py", *ODD, sbatch=(f"--job-name={name}", "--output=log-%j.log"))
    succeeded(checkout.submit_py("ddp", f"--script={script}", "--wait", "--", *ODD))
    assert checkout.cluster.wait(job)["JobState"] == "COMPLETED", checkout.log(job)
    assert f"job     {job} {name}, restart 0" in checkout.log(job)
    ranks = [
        report for folder in (checkout.folder / "results" / "jobs").iterdir() for report in reports_in(folder)
    ]
    assert [report["arguments"][-len(ODD) :] for report in ranks] == [ODD] * 4
    assert not list(tmp_path.rglob("pwned"))


def test_the_environment_of_the_ranks_of_a_job(on_cluster: Checkout) -> None:
    scratch = on_cluster.folder / "scratch space"
    on_cluster.site(
        f"SITE_SCRATCH_DIR='{scratch}'\n"
        "SITE_SRUN_ARGS=(--comment='two words')\n"
        "export SBATCH_MEM_PER_CPU=900M\n"
        "SITE_CONTAINER=(env 'INSIDE=a container')  # as good as one\n"
    )
    on_cluster.script("ddp").write_text(FACTS)
    asked = ("--gpus", 4, "--nodes", 2, "--wait", "--results-dir", scratch / "other")
    succeeded(on_cluster.submit_py("ddp", *asked, RANK="7", MASTER_ADDR="elsewhere", MASTER_PORT="1"))
    (script,) = on_cluster.folder.rglob("*_submission.sh")
    job = script.name.partition("_")[0]
    log = script.with_name(f"{job}_0_log.out").read_text()
    assert "with exit code 0\n" in log
    assert on_cluster.cluster.job(int(job))["MinMemoryCPU"] == "900M"
    ranks = reports_in(scratch / job)
    assert len(ranks) == 4
    for rank, report in enumerate(ranks):
        environment = report["environment"]
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_CPUS_PER_TASK")
        assert [environment[name] for name in names] == [str(rank), str(rank % 2), "4", "2", "2"]
        assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"  # both: each process picks its own
        assert environment["INSIDE"] == "a container"
        assert environment["MASTER_PORT"] == str(10_000 + int(job) % 20_000)
        assert environment["MASTER_ADDR"] not in ("elsewhere", "localhost")
        assert set(report["signals"].values()) == {str(signal.SIG_DFL)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--partition nowhere",
            r"did not accept the job \((?!.*error: ).*invalid partition specified: nowhere.*\): "
            "set SBATCH_PARTITION in slurm/site.sh.*; --local runs it on this machine",
        ),
        # One of the two, by what is lacking: Slurm accepts much that it can never start.
        ("--gpus 64", r"(did not accept the job .*node configuration|would never start the job \(Part)"),
    ],
)
def test_what_slurm_refuses(arguments: str, sentence: str, on_cluster: Checkout) -> None:
    done = on_cluster.submit_py("ddp", *arguments.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"error: Slurm {sentence}.*\n", done.stderr), done.stderr
    assert not job_folders(on_cluster)
    assert str(on_cluster.folder) not in on_cluster.cluster.run(["squeue", "--format=%Z"]).stdout


def test_a_preempted_job_that_ended_well_is_done(on_cluster: Checkout) -> None:
    """Slurm before 26.05 (seen: 24.11) calls it PREEMPTED where the cluster cancels preempted jobs."""
    slow = "faults.before_every_step(lambda optimizer: time.sleep(2))"
    on_cluster.plant("single", f"if faults.is_first_start(): {slow}")

    def preempt_by(mode: str) -> None:
        partition = ("PartitionName=practice", f"PreemptMode={mode}")
        succeeded(on_cluster.cluster.run(["scontrol", "update", *partition]))

    preempt_by("CANCEL")
    try:
        with ThreadPoolExecutor() as background:
            following_it = background.submit(on_cluster.submit_py, "single", *SMALL, "--wait")
            logs = on_cluster.folder / "results" / "jobs" / "submitit"
            wait_until(lambda: any("\nstage single" in log.read_text() for log in logs.rglob("*_0_log.out")))
            urgent = ("--partition=urgent", "--nodes=2", "--exclusive")
            on_cluster.cluster.submit(*urgent, "--wrap=true", cwd="/tmp")
            done = succeeded(following_it.result())
    finally:
        preempt_by("REQUEUE")
    assert any(", restart 1, " in log.read_text() for log in logs.rglob("*_0_log.out"))
    assert done.stdout.splitlines()[-1].startswith("done: results: "), done.stdout


def test_in_the_shell_of_salloc(on_cluster: Checkout) -> None:
    """It is on the login host: what trains there is no part of the job, and the comparison does not."""
    small = shlex.join(map(str, (*SMALL, "--batch-size", 60, "--dataset", "synthetic")))
    train = f"python 01_singlegpu/mnist_singlegpu.py {small} && exec python results/compare.py"
    done = on_cluster.run("salloc", "--ntasks=1", "--mem=100M", "bash", "-c", train)
    (row,) = rows_of(on_cluster.folder / "results")
    assert (row["job_id"], row["node_list"]) == ("", "login")
    assert done.returncode == 1
    assert re.search(
        r"^error: this shell is in job \d+, but on login, .* --local\.$", done.stderr, re.MULTILINE
    )


# --- what sbatch gets -------------------------------------------------------------------------------


# The controller takes the job, and is too busy to say so.
TIMED_OUT = """PATH=${PATH#*:} sbatch "$@" >/dev/null
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1"""


def test_a_sweep_finds_in_the_queue_what_sbatch_did_not_name(on_cluster: Checkout) -> None:
    on_cluster.pretend()
    on_cluster.fake("sbatch", TIMED_OUT)
    sweep = on_cluster.folder / "a sweep"
    options = ("--stages", "single", "--gpus", 1, "--batch-size", 500, "--no-cuda", "--repeats", 2)
    first = on_cluster.python("slurm/sweep.py", *options, "--out", sweep)
    assert "not known whether Slurm has accepted" in one_error(first)
    succeeded(on_cluster.python("slurm/sweep.py", *options, "--out", sweep))
    assert len([*sweep.glob("logs/*_0_log.out")]) == 2
    assert len([*sweep.glob("*/runs/*.csv")]) == 2 and (sweep / "comparison.csv").exists()


def test_a_job_that_may_be_in_the_queue_keeps_its_folder(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.fake("sbatch", TIMED_OUT.replace("PATH=", "true PATH="))
    for command in ("srun", "squeue", "scontrol"):
        checkout.fake(command, "")
    with pytest.raises(UserError, match="not known whether Slurm has accepted the job"):
        _main("ddp", "", checkout, monkeypatch)
    (folder,) = job_folders(checkout)
    assert next(folder.glob(".submission_file_*.sh"), None)


def test_dry_run_shows_a_job_script_and_sends_nothing(checkout: Checkout) -> None:
    checkout.fake("sbatch", "touch sent")
    checkout.fake("srun", "")
    checkout.site("export SBATCH_ACCOUNT=physics SBATCH_OUTPUT=elsewhere\nSITE_GPUS=--gpus-per-node=a100:%d")
    arguments = "--gpus 4 --nodes 2 --partition gpu --time 1:30:00 --dry-run --epochs 3"
    done = succeeded(checkout.submit_py("ddp", *arguments.split()))
    lines = done.stdout.splitlines()
    asked = ("nodes=2", "ntasks-per-node=2", "gpus-per-node=a100:2", "cpus-per-task=2", "mem=16G", "time=90")
    asked += ("partition=gpu", "account=physics", "job-name=mnist-ddp", "signal=USR2@60", "requeue")
    assert set(lines) >= {f"#SBATCH --{option}" for option in asked}
    assert "elsewhere" not in done.stdout
    assert not (checkout.folder / "results" / "jobs").exists()
    assert not list(checkout.folder.rglob("sent"))


def test_the_script_of_a_dry_run_is_a_job(on_cluster: Checkout) -> None:
    """Sent from another folder, with one more option: it trains what submit.py would."""
    on_cluster.pretend()
    asked = ("--gpus", 2, "--dataset", "synthetic", "--epochs", 2, "--dry-run")
    script = succeeded(on_cluster.submit_py("ddp", *asked)).stdout
    elsewhere = on_cluster.folder / "else where"
    elsewhere.mkdir()
    (elsewhere / "job.sh").write_text(script)
    done = succeeded(on_cluster.run("sbatch", "--parsable", "job.sh", "--epochs", 3, cwd=elsewhere))
    job = int(done.stdout)
    assert on_cluster.cluster.wait(job)["JobState"] == "COMPLETED", on_cluster.log(job)
    rows = rows_of(on_cluster.folder / "results")
    assert [(row["world_size"], row["epoch"]) for row in rows] == [(2, 1), (2, 2), (2, 3)]


def test_submitit_a_dry_run_and_a_job_script_ask_for_the_same(checkout: Checkout) -> None:
    checkout.fake("sbatch", "echo Submitted batch job 7")
    checkout.fake("srun", "")
    for stage, launcher in (("single", "single"), ("dp", "dp"), ("ddp", "srun")):
        before = set(job_folders(checkout))
        succeeded(checkout.submit_py(stage))
        (folder,) = set(job_folders(checkout)) - before
        sent = (folder / "7_submission.sh").read_text()
        shown = succeeded(checkout.submit_py(stage, "--dry-run")).stdout
        script = (checkout.folder / SCRIPTS[launcher]).read_text()
        asked = [asked_in(text) for text in (sent, shown, script)]
        assert asked[0] == asked[1] == asked[2]
        assert len(asked[0]) == 9
        for text in (sent, shown):
            assert f"source '{checkout.job_env}'" in text.splitlines()
        (srun,) = [line for line in sent.splitlines() if line.startswith("srun ")]
        for option in re.findall(r"--(?:kill|wait)\S+", script.partition("\nsrun ")[2]):
            assert option in shlex.split(srun)
        # In Slurm 22.05 to 23.02 srun does not inherit --cpus-per-task, and submitit does not repeat it.
        assert "--cpus-per-task=$SLURM_CPUS_PER_TASK" in shlex.split(srun)
        assert '"${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" env PYTHONSAFEPATH=1 python -u' in srun


def asked_in(script: str) -> dict[str, str]:
    """What a batch script asks sbatch for, in the same words whoever wrote it."""
    text = script.replace("--ntasks-per-node=", "--ntasks=").replace("GB\n", "G\n")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", text.replace("00:30:00", "30"), re.MULTILINE))
    assert asked.pop("output") and asked.pop("job-name").startswith("mnist-")
    asked.pop("error", None)
    asked.pop("wckey", None)  # submitit's own
    return asked


def test_a_job_script_asks_for_as_much_memory_as_submit_py(checkout: Checkout) -> None:
    scripts = list(checkout.folder.glob("0*/slurm_submit*.sh"))
    assert len(scripts) == 4
    for script in scripts:
        text = script.read_text()
        gpus, memory = re.search(r"#SBATCH --gpus-per-node=(\d)[^$]*#SBATCH --mem=(\d+)G", text).groups()
        assert int(memory) == slurm_options.MEMORY_PER_GPU_GB * int(gpus), script
        advice = re.findall(r"--gpus-per-node=(\d) --mem=(\d+)G slurm_submit.sh", text)
        assert all(int(memory) == slurm_options.MEMORY_PER_GPU_GB * int(gpus) for gpus, memory in advice)


@pytest.mark.parametrize(
    ("arguments", "environment", "sent"),
    [
        ((), {}, "site,,,"),
        (("--partition", "mine", "--time", "0:59:01"), {}, "mine,60,,"),
        ((), {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "9", "SLURM_CONF": "/a.conf"}, "site,,,/a.conf"),
    ],
    ids=["site file", "options", "inside a job"],
)
def test_what_sbatch_is_told(arguments: tuple, environment: dict, sent: str, checkout: Checkout) -> None:
    received = checkout.folder / "received"
    variables = "$SBATCH_PARTITION,$SBATCH_TIMELIMIT,$SLURM_NTASKS,$SLURM_CONF"
    checkout.fake("sbatch", f"echo {variables} >{shlex.quote(str(received))}; echo Submitted batch job 7")
    checkout.fake("srun", "")
    checkout.site("export SBATCH_PARTITION=site")
    done = succeeded(checkout.submit_py("single", *arguments, SBATCH_PARTITION="shell", **environment))
    assert received.read_text().strip() == sent
    assert ("this shell is in job 1, " in done.stdout) == ("SLURM_JOB_ID" in environment)
    (folder,) = job_folders(checkout)
    for line in ("squeue --jobs=7", "scancel 7", f"tail -n +1 -F '{folder}/7_0_log.out'"):
        assert line in done.stdout


def test_options_of_sbatch_are_passed_on_and_come_before_the_sites(on_cluster: Checkout) -> None:
    """Also where the site counts memory in another way, and in a sweep and a dry run."""
    on_cluster.site("SITE_MEM=--mem-per-cpu=900M\nexport SBATCH_JOB_NAME=site SBATCH_MEM_PER_NODE=4G\n")
    first = on_cluster.cluster.submit("--hold", "--wrap=true", cwd="/tmp")
    options = ("--job-name", "vae", "--mem=1G", "--dependency", f"afterany:{first}")
    done = succeeded(on_cluster.submit_py("single", *options, "--no-cuda"))
    job = on_cluster.cluster.job(int(done.stdout.split()[1]))
    sent = (job["JobName"], job["MinMemoryNode"], job["Dependency"].partition("(")[0])
    assert sent == ("vae", "1G", f"afterany:{first}")
    shown = succeeded(on_cluster.submit_py("single", *options, "--dry-run")).stdout
    (folder,) = job_folders(on_cluster)
    (script,) = folder.glob("*_submission.sh")
    for text in (shown, script.read_text()):
        assert {"#SBATCH --job-name=vae", "#SBATCH --mem=1G"} <= set(text.splitlines()) and "900M" not in text
    # The variable of the site comes before its form.
    shown = succeeded(on_cluster.submit_py("single", "--dry-run")).stdout
    assert "#SBATCH --mem=4G\n" in shown and "900M" not in shown
    done = succeeded(on_cluster.submit_py("single", *options[:2], *options[-2:], "--no-cuda"))
    job = on_cluster.cluster.job(int(done.stdout.split()[1]))
    assert job.get("MinMemoryNode") == "4G" and "MinMemoryCPU" not in job
    swept = ("--stages", "single", "--gpus", 1, "--batch-size", 500)
    done = on_cluster.python("slurm/sweep.py", *swept, "--dependency", "afterwards")
    assert done.returncode == 1 and "dependency" in done.stderr, done.stdout + done.stderr


# --- how a job is doing -----------------------------------------------------------------------------

# What squeue answers of a job that it has forgotten.
FORGOTTEN = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"


WELL = Outcome(
    restart=0,
    exit_code=0,
    why=[],
    failed_rank=None,
    saved=None,
    requeued=False,
    seconds=9,
    said=[],
)
CAME_BACK = replace(WELL, restart=1)
WENT_BACK = replace(WELL, saved="/somewhere", requeued=True)


def _failed(*why: str) -> Outcome:
    return replace(WELL, exit_code=1, why=list(why))


def _show(
    state: str, reason: str = "None", restarts: int = 0, job_id: int = 7, partitions: str = "gpu"
) -> str:
    """What squeue answers of a job, in the columns that it is asked for."""
    words = f"{job_id} {job_id} '{state}' {restarts} {partitions} '{reason}'"
    return f"printf '%-20s%-20s%-20s%-20s%-200s%-200s\\n' {words}"


def job_seven(checkout: Checkout) -> SlurmHandle:
    """A job of two ranks that was submitted just now."""
    return SlurmHandle("7", 2, checkout.folder / "7_0_log.out", checkout.folder, checkout.folder)


@pytest.mark.parametrize(
    ("squeue", "sacct", "outcome", "state", "detail"),
    [
        (_show("PENDING", "Priority"), None, None, "queued", "Priority"),
        (_show("PENDING"), None, None, "queued", "no reason"),
        (_show("RESV_DEL_HOLD", "ReservationDeleted"), None, None, "queued", "ReservationDeleted"),
        (_show("PENDING", "BeginTime", restarts=2), None, WENT_BACK, "queued", "BeginTime, restart 2"),
        # It ended well while it was preempted, and Slurm 24.11 brings it back. The next has not begun: the
        # outcome is that of an older job with its number.
        (_show("PENDING", "BeginTime", restarts=1), None, WELL, "done", "somewhere"),
        (_show("PENDING", "Priority"), None, WELL, "queued", "Priority"),
        (_show("PENDING", "launch failed requeued held"), None, None, "failed", "scontrol release 7"),
        (_show("RUNNING"), None, None, "running", "epoch 2/3"),
        (_show("COMPLETING"), None, WELL, "running", "epoch 2/3"),
        (_show("COMPLETED"), None, WELL, "done", "somewhere"),
        (_show("COMPLETED"), None, None, "done", "somewhere"),
        (_show("TIMEOUT"), None, _failed(), "failed", "time limit"),
        (_show("FAILED"), None, _failed("error on rank 1", "y"), "failed", "error on rank 1"),
        (
            _show("OUT_OF_MEMORY"),
            None,
            _failed("x was killed"),
            "failed",
            "x was killed; it needed more memory",
        ),
        # The last of such a line: the job had come back from the queue.
        (_show("FAILED"), None, None, "failed", "cannot start again"),
        ("echo cannot reach it >&2; exit 1", None, None, "unknown", "cannot reach it"),
        # Slurm before 26.05 says so of a job that came back, and trained to its end.
        (_show("PREEMPTED", restarts=1), None, CAME_BACK, "done", "somewhere"),
        (_show("PREEMPTED", restarts=1), None, None, "failed", "higher priority"),
        (_show("PREEMPTED"), None, None, "failed", "higher priority"),
        (FORGOTTEN, "echo '7|FAILED'", _failed("error on rank 1"), "failed", "error on rank 1"),
        (FORGOTTEN, "echo '7|CANCELLED by 0'", None, "failed", "cancelled"),
        (FORGOTTEN, "echo '7|COMPLETED'", None, "done", "somewhere"),
        # The end of the job did not reach accounting.
        (FORGOTTEN, "echo '7|RUNNING'", None, "failed", "forgets"),
        (FORGOTTEN, "echo '7|RUNNING'", WELL, "done", "somewhere"),
        (FORGOTTEN, "echo disabled >&2; exit 1", None, "failed", "forgets"),
        (FORGOTTEN, None, WELL, "done", "somewhere"),
        (FORGOTTEN, None, WENT_BACK, "failed", "forgets"),
        (FORGOTTEN, None, _failed("x"), "failed", "x"),
    ],
)
def test_the_state_of_a_job(
    squeue: str,
    sacct: str | None,
    outcome: Outcome | None,
    state: str,
    detail: str,
    checkout: Checkout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It follows from what Slurm says, with accounting or without, and from the outcome that the job left."""
    checkout.fake("squeue", squeue)
    if sacct:
        checkout.fake("sacct", sacct)
    monkeypatch.setenv("PATH", str(checkout.commands))
    job = job_seven(checkout)
    # A result of submitit, as a rank may leave it before its job goes back to the queue.
    (checkout.folder / "7_0_result.pkl").touch()
    job.log.write_text("epoch 1/3: so far\nepoch 2/3: so far\nresults: somewhere\n")
    if outcome:
        job_folder.keep_outcome(job.folder, outcome)
    (checkout.folder / "7_1_log.out").write_text(
        "srun: error: cannot start\nsrun: error: cannot start again\n"
    )
    now = job.state()
    assert now.name == state
    assert detail in now.detail


@pytest.mark.parametrize(("outcome", "state"), [(WELL, "failed"), (CAME_BACK, "done")])
def test_a_plain_script_that_left_with_0_as_it_was_preempted(
    outcome: Outcome, state: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have caught SIGTERM, on a cluster that sends nobody back (PreemptMode=CANCEL)."""
    checkout.fake("squeue", _show("PREEMPTED"))
    monkeypatch.setenv("PATH", str(checkout.commands))
    job = job_seven(checkout)
    (checkout.folder / "plain").touch()
    job_folder.keep_outcome(checkout.folder, outcome)
    assert job.state().name == state


def test_a_job_that_never_ran_and_another_with_its_number(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.fake("squeue", _show("COMPLETED"))
    monkeypatch.setenv("PATH", str(checkout.commands))
    job = replace(job_seven(checkout), folder=checkout.folder / "nowhere")
    assert job.state().name == "running"
    monkeypatch.setattr(job_status, "OUTCOME_SECONDS", 0)
    assert job.state().name == "failed"


@pytest.mark.parametrize("state", ["FAILED", "COMPLETED"])
def test_a_job_whose_nodes_do_not_see_its_folder(
    state: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that does not exist is not named, but the settings that choose its folder are."""
    checkout.fake("squeue", _show(state, "NonZeroExitCode"))
    monkeypatch.setenv("PATH", str(checkout.commands))
    monkeypatch.setattr(job_status, "OUTCOME_SECONDS", -1)
    job = replace(job_seven(checkout), folder=checkout.folder / "nowhere")
    seen = job.state()
    assert seen.name == "failed"
    assert str(job.log) not in seen.detail and "SITE_SCRATCH_DIR" in seen.detail
    job.log.touch()
    assert "SITE_SCRATCH_DIR" not in job.state().detail


@pytest.mark.parametrize(
    "reason", ["PartitionTimeLimit", "MaxMemPerLimit", "QOSMaxWallDurationPerJobLimit", "QOSMinGRES"]
)
def test_a_reason_that_comes_later_and_never_ends(
    reason: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told with advice; and if it stays for long, the job is given up."""
    checkout.fake("squeue", _show("PENDING", reason))
    monkeypatch.setenv("PATH", str(checkout.commands))
    job = job_seven(checkout)
    queued = job.state()
    assert (queued.name, queued.reason) == ("queued", reason)
    assert slurm.advice(reason) in queued.detail and "ask your admin" not in queued.detail
    monkeypatch.setattr(job_status, "NEVER_STARTS_SECONDS", 0)
    assert job.state().name == "failed"


@pytest.mark.parametrize(
    ("reason", "partitions"),
    [("QOSMaxJobsPerUserLimit", "gpu"), ("MaxMemPerLimit", "small,gpu"), ("PartitionTimeLimit", "gpu,small")],
)
def test_a_limit_of_other_jobs_or_of_one_of_several_partitions_is_waited_for(
    reason: str, partitions: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.fake("squeue", _show("PENDING", reason, partitions=partitions))
    monkeypatch.setenv("PATH", str(checkout.commands))
    monkeypatch.setattr(job_status, "NEVER_STARTS_SECONDS", 0)
    assert job_seven(checkout).state().name == "queued"


def test_of_a_log_only_what_is_new_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    progress = job_status.GrowingLog(log)
    assert progress.update() is None
    log.write_text("epoch 1/3: so far\nepoch 2")
    assert progress.update() == "epoch 1/3: so far"
    with log.open("r+") as file:
        file.write("what is read once is not read again\n"[: len("epoch 1/3: so far")])
        file.seek(0, os.SEEK_END)
        file.write("/3: so far\nother words\n")
    assert progress.update() == "epoch 2/3: so far"
    log.write_text("epoch 3/3: so far\n")  # shorter: somebody has emptied it
    assert progress.update() == "epoch 3/3: so far"


def test_slurm_is_asked_once_for_many_jobs(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it has forgotten are left out of its answer; accounting is asked once for all of them."""
    asked = checkout.folder / "asked"
    checkout.fake("squeue", f"echo squeue >>'{asked}'; {_show('RUNNING')}; {_show('FAILED', job_id=8)}")
    checkout.fake("sacct", f"echo sacct >>'{asked}'; echo '9|TIMEOUT'; echo '10|COMPLETED'")
    monkeypatch.setenv("PATH", str(checkout.commands))
    jobs = [replace(job_seven(checkout), job_id=str(number)) for number in (10, 9, 8, 7)]
    for _ in range(3):
        seen = job_status.states(jobs)
    assert [state.name for state in seen] == ["done", "failed", "failed", "running"]
    assert asked.read_text().split() == ["squeue", "sacct"]


def test_slurm_is_asked_seldom(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """But at once when the job begins, and when it ends."""
    asked = checkout.folder / "asked"
    checkout.fake("squeue", f"echo >>'{asked}'; {_show('X')}".replace("'X'", '"$(<state)"'))
    monkeypatch.setenv("PATH", str(checkout.commands))
    monkeypatch.chdir(checkout.folder)
    job = replace(job_seven(checkout), folder=checkout.folder / "job")

    def look(state: str) -> tuple[str, int]:
        """The state that is told after three looks, and how often Slurm was asked so far."""
        Path("state").write_text(state)
        name = [job.state().name for _ in range(3)][-1]
        return name, asked.read_text().count("\n")

    assert look("PENDING") == ("queued", 1)
    job.folder.mkdir()
    assert look("RUNNING") == ("running", 2)
    assert look("COMPLETING") == ("running", 2)
    job_folder.keep_outcome(job.folder, WELL)
    assert look("COMPLETING") == ("running", 5)
    assert look("COMPLETED")[0] == "done"
    # A job in the queue may have the outcome of its last start.
    job_folder.keep_outcome(job.folder, WENT_BACK)
    assert look("PENDING")[0] == "queued"
    before = asked.read_text().count("\n")
    assert look("PENDING") == ("queued", before)


class Script(SlurmHandle):
    """A job whose states are known beforehand."""

    poll_seconds = 0

    def __init__(self, *states: State | type[BaseException]) -> None:
        super().__init__("7", 1, *[Path("/nowhere")] * 3)
        self._states = list(states)

    def state(self) -> State:
        state = self._states.pop(0)
        if isinstance(state, State):
            return state
        raise state


WAITING, RUNNING, DONE = (
    State("queued", "Priority"),
    State("running", "epoch 1/2"),
    State("done", "results: x"),
)


def test_following_prints_every_change(capsys: pytest.CaptureFixture) -> None:
    assert job_status.follow(Script(WAITING, WAITING, RUNNING, WAITING, RUNNING, DONE)) == 0
    seen = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in seen] == ["queued", "running", "queued", "running", "done"]


def test_ctrl_c_leaves_a_job_of_slurm_alone(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt):
        job_status.follow(Script(WAITING, KeyboardInterrupt))
    assert "scancel 7" in capsys.readouterr().err


def test_patience_with_a_slurm_that_does_not_answer(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = State("unknown", "connect failure")
    assert job_status.follow(Script(silent, silent, RUNNING, silent, DONE)) == 0
    checkout.fake("squeue", "echo connect failure >&2; exit 1")
    monkeypatch.setenv("PATH", str(checkout.commands))
    assert job_seven(checkout).state() == silent
    monkeypatch.setattr(job_status, "UNANSWERED_SECONDS", 0)
    with pytest.raises(UserError, match=r"connect failure.*squeue --jobs=7"):
        job_status.follow(job_seven(checkout))


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "arguments", "sentence"),
    [
        ("ddp", "--gpus 3 --nodes 2", "divide evenly among 2 nodes"),
        ("ddp", "--gpus 2 --nodes 2", "one node, not 2"),
        ("dp", "--nodes 2", "cannot leave its node"),
        ("single", "--gpus 2", "uses 1 GPU"),
        ("ddp", "--gpus -1", "--gpus: -1"),
        ("ddp", "--time soon", "--time: 'soon'"),
        ("ddp", "--epoch 2", "unrecognized .* --epoch 2"),
        ("ddp", "--gpus 3", "divide evenly among 3 processes"),
        ("dp", "--gpus 3", "divide evenly among 3 GPUs"),
        ("ddp", "--batch-size 64 --batch-size-per-gpu 32", "give only one"),
        ("ddp", "--gpus 2 --batch-size-per-gpu 40000", "--batch-size 80000 is more"),
        ("ddp", "--data-dir /nowhere", "MNIST in /nowhere .* python -m manygpus.data.datasets"),
        ("ddp", "--results-dir /proc/nowhere", "/proc/nowhere/runs"),
        ("ddp", "--script nowhere.py", "no script nowhere.py"),
        ("ddp", "--script README.md", "README.md .* .py"),
        ("ddp", "--plain nowhere.py --gpus 3", "no script nowhere.py"),
        ("ddp", "--epochs 2 --plain mnist_ddp.py", "--epochs is not for plain"),
        ("ddp", "--script a.py --plain mnist_ddp.py", "--script is not for plain"),
        ("ddp", "--plain -m package/train.py", "takes the name of a module"),
        ("ddp", "--python nowhere/python --plain mnist_ddp.py", "--python nowhere/python is not a program"),
        ("ddp", "--when-requeued --resume --epochs 2", "are for plain scripts"),
        ("ddp", "--one-process-per-node --epochs 2", "are for plain scripts"),
    ],
)
def test_a_mistake_is_told_before_anything_is_sent(
    stage: str, arguments: str, sentence: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=sentence):
        _main(stage, arguments, checkout, monkeypatch)
    assert not job_folders(checkout)


@pytest.mark.parametrize(
    ("command", "unwritten"),
    [
        ("03_multigpu_ddp/submit.py --local", "results/jobs/submitit/tell-"),
        ("slurm/sweep.py --local --gpus 1 --out full/sweep", "sweep/options.txt"),
    ],
)
def test_a_disk_that_is_full_after_the_first_file(command: str, unwritten: str, checkout: Checkout) -> None:
    """It has room for the file that is written to see whether a folder can be written to."""
    full = checkout.folder / "full"
    full.mkdir()
    checkout.site(f"SITE_RESULTS_DIR={shlex.quote(str(full / 'results'))}\nSITE_MONITOR=off\n")
    script = checkout.folder / "tell.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    mount = (
        'page=$(getconf PAGESIZE); mount -t tmpfs -o size=$((10 * page)) full "$1" || exit 77; '
        'mkdir -p "$1/results/runs" "$1/results/jobs/submitit"; '
        'head -c $((9 * page)) /dev/zero >"$1/filled"; shift; exec "$@"'
    )
    host = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    program, *options = command.split()
    done = checkout.run(
        "env", f"PATH={os.environ['PATH']}", *host, "bash", "-c", mount, "bash", full,
        sys.executable, program, *options, "--plain", script,
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no disk can be mounted here: {done.stderr}")
    error = one_error(done)
    assert str(full / unwritten) in error and os.strerror(errno.ENOSPC) in error


@pytest.mark.parametrize(
    ("scontrol", "is_here"),
    [
        ("echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1", False),
        ("echo 'Slurmctld(primary) at n0 is DOWN'; exit 1", True),  # it may come back
        ("echo 'Slurmctld(primary) at n0 is UP'", True),
    ],
)
def test_slurm_is_here_where_it_knows_a_controller(scontrol: str, is_here: bool, checkout: Checkout) -> None:
    for command in ("sbatch", "srun"):
        checkout.fake(command, "exit 1")
    checkout.fake("scontrol", scontrol)
    done = succeeded(checkout.submit_py("single", "--dry-run"))
    assert done.stdout.startswith("#!/bin/bash") == is_here
    assert checkout.submit_py("single", "--dry-run", "--local").stdout.startswith("--local: would run as 1")
    swept = succeeded(checkout.python("slurm/sweep.py", "--dry-run", "--gpus", 1, "--stages", "single"))
    assert ("GPU-hours" in swept.stdout) == is_here


def test_a_reason_to_start_never_that_comes_late_cancels_the_job(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm 24.11 and 26.05 give it; of real clusters: test_other_sites.py."""
    cancelled = checkout.folder / "cancelled"
    checkout.fake("sbatch", "echo Submitted batch job 7")
    checkout.fake("srun", "")
    checkout.fake("scontrol", "echo 'Slurmctld(primary) at n0 is UP'")
    asked_before = shlex.quote(str(checkout.folder / "asked before"))
    late = f"[[ -e {asked_before} ]] && {_show('PENDING', 'MaxMemPerLimit')} || {_show('PENDING')}"
    checkout.fake("squeue", f"{late}; >{asked_before}")
    checkout.fake("scancel", f"echo $1 >{shlex.quote(str(cancelled))}")
    with pytest.raises(UserError, match=r"never start the job \(MaxMemPerLimit\): ask"):
        _main("ddp", "", checkout, monkeypatch)
    assert cancelled.read_text() == "7\n"
    assert not job_folders(checkout)


def test_the_dry_run_of_the_stage_stands_behind_two_dashes(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert _main("ddp", "--dry-run --epochs 2 -- --dry-run", checkout, monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "2 local process" in shown
    assert "mnist_ddp.py" in shown
    assert " --epochs 2 --dry-run\n" in shown


def _main(stage: str, arguments: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> int:
    """submit.py within this process."""
    monkeypatch.setattr(sys, "argv", ["submit.py", *arguments.split()])
    monkeypatch.setattr(site, "SCRIPTS", checkout.job_env.parent)
    for name, value in checkout.environment.items():
        monkeypatch.setenv(name, value)
    return runpy.run_path(str(REPOSITORY / FOLDERS[stage] / "submit.py"))["main"].__wrapped__()
