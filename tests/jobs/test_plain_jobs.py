"""Scripts that know nothing of the kit, as jobs: submit.py and the job scripts with --plain."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import traces
from checkout import SCRIPTS, Checkout, commit_of, own_environment, wait_until
from conftest import ENVIRONMENT, REPOSITORY, ran, succeeded
from json_documents import document
from traces import FROM_LOADERS, STARVED, SyntheticJob

from manygpus import job_folder
from manygpus.monitor import wording
from manygpus.monitor.verdict import judge
from manygpus.record import records

# Without PyTorch: the question is whom the signal reaches.
HEARS = """
import os, signal, sys, time
from pathlib import Path

asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(True))
job = Path(os.environ["MANYGPUS_JOB_DIR"])
last, first = job / f"rank-{os.environ['RANK']}.pt", 1
assert ("--again" in sys.argv) == last.exists()  # as scripts with --resume that want their checkpoint
(job / f"ready-{last.name}").touch()
while len(list(job.glob("ready-*"))) < 2:
    time.sleep(0.1)
if last.exists():
    first = int(last.read_text()) + 1
for epoch in range(first, 5):
    print(f"Train Epoch: {epoch} of {sys.argv[4]} {sys.argv[8]} {os.environ['DATA_DIR']}", flush=True)
    while first == 1 and not asked:
        time.sleep(0.1)
    if asked:
        last.write_text(str(epoch))
        (job / "stopped").touch()
        break
"""
# With that of its vae: one process, which writes to a folder that it expects where it is started.
VAE = """
import argparse, os
parser = argparse.ArgumentParser(description="VAE MNIST Example")
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()
open(f"results/sample_{args.epochs}_{os.environ['WORLD_SIZE']}", "w").close()
os._exit(0)
"""
# Its ranks do what they are told to.
FATES = "import os, sys, time\nrank = int(os.environ['RANK'])\nexec(sys.argv[1])\n"


def write(checkout: Checkout, text: str) -> Path:
    script = checkout.folder / "my work" / "train.py"
    (script.parent / "results").mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    return script


def test_its_own_handler_hears_usr2_of_torchrun_and_it_comes_back(on_cluster: Checkout) -> None:
    """Its options reach it, whatever they mean elsewhere, and a variable of its own stays what it was.

    It gets more of them when it comes back.
    """
    script = write(on_cluster, HEARS)
    theirs = ("--batch-size", 63, "--gpus", 3, "--epochs", 4, "--resume", "ck.pt")
    sbatch = (f"--chdir={script.parent}", f"--output={on_cluster.folder}/plain-%j.log")
    on_cluster.site("SITE_MONITOR=on\nexport DATA_DIR=/mine\n")
    words = ("--when-requeued", "--again", "--plain", script.name)
    job = on_cluster.submit("torchrun", *words, *theirs, sbatch=sbatch)
    on_cluster.wait_for("Train Epoch: 1 of 3 ck.pt /mine", job)
    on_cluster.cluster.run(["scancel", "--signal=USR2", job])
    state = on_cluster.cluster.wait(job, timeout=300)
    log = on_cluster.log(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), log
    epochs = list(map(int, re.findall("Train Epoch: (\\d+)", log)))
    assert sorted(epochs) == [1, 1, 2, 2, 3, 3, 4, 4], log
    assert "watch   job" in log and "--num-workers" not in log and "results in" not in log
    assert log.count("ck.pt\npython ") == 1 and log.count("ck.pt --again\npython ") == 1, log


# Until a signal has come the first start stays in step 5, and the second in step 15.
STAYS = """
            restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
            if step == 10 * restart + 4:
                print("waits", restart, flush=True)
            while step == 10 * restart + 4 and restart < 2 and not signals_received:
                time.sleep(0.1)
            optimizer.zero_grad()
"""


def test_the_script_of_the_page_comes_back_after_usr2_and_after_preemption(
    few_images: Path, on_cluster: Checkout
) -> None:
    """Also its loader workers get the signals, and go on until it has saved."""
    script = on_cluster.folder / "03_multigpu_ddp" / "resumable_ddp.py"
    node = ("--nodelist=n1", "--exclusive")
    script.write_text(script.read_text().replace("\n            optimizer.zero_grad()\n", STAYS))
    theirs = ("--epochs", 1, "--batch-size", 20, "--num-workers", 1, "--data-dir", few_images)
    job = on_cluster.submit("srun", "--plain", script.name, *theirs, sbatch=node)
    on_cluster.wait_for("waits 0", job)
    on_cluster.cluster.run(["scancel", "--signal=USR2", job])
    on_cluster.wait_for("waits 1", job)
    on_cluster.cluster.submit("--partition=urgent", *node, "--wrap=true", cwd="/tmp")
    state, log = on_cluster.cluster.wait(job, timeout=300), on_cluster.log(job)
    # Slurm before 26.05 (seen: 24.11) starts it once more when it has ended (SchedMD's ticket 25682).
    assert (state["JobState"], state["Restarts"] in "23") == ("COMPLETED", True), log
    assert re.findall(r"^resumed from .*: epoch 1, (\d+) of 50 steps done$", log, re.MULTILINE) == [
        "10",
        "20",
    ], log
    assert len(re.findall(r"^epoch 1: loss ", log, re.MULTILINE)) == 1, log


def test_a_script_that_saves_nothing_is_preempted(on_cluster: Checkout) -> None:
    """It comes back by itself from Slurm 24.05 on, and is told so for each."""
    script, nodes = write(on_cluster, FATES), ("--nodelist=n1", "--exclusive")
    fate = "print('begun', flush=True); time.sleep(600)"
    job = on_cluster.submit("single", "--plain", script, fate, sbatch=nodes)
    on_cluster.wait_for("begun", job)
    on_cluster.cluster.submit("--partition=urgent", *nodes, "--wrap=true", cwd="/tmp")
    state = on_cluster.cluster.wait(job, until="PENDING")
    assert (state["JobState"], state["Restarts"]) in (("FAILED", "0"), ("PENDING", "1")), on_cluster.log(job)
    why = "\nwhy     a job of higher priority took its place (preemption): if squeue "
    assert why in on_cluster.log(job), on_cluster.log(job)


# It saves in its second start, and ends well in its third, or if it starts anew for good.
PREEMPTED = """
restart, job = int(os.environ.get("SLURM_RESTART_COUNT", "0")), os.environ["MANYGPUS_JOB_DIR"]
print("begun", restart, *sys.argv[3:], flush=True)
if restart:
    open(f"{job}/checkpoints/model-{restart}.pt", "w").close()
time.sleep(600 if restart < int(sys.argv[2]) else 0)"""


@pytest.mark.parametrize(
    ("words", "preempted", "last"),
    [
        ("--resume {folder}/checkpoints/model-*.pt", 2, " --resume {folder}/checkpoints/model-1.pt"),
        ("", 1, ""),
    ],
)
def test_a_script_without_a_handler_is_preempted_and_comes_back(
    words: str, preempted: int, last: str, on_cluster: Checkout
) -> None:
    """With what it has saved last, once it has saved, or anew, by whatever release of Slurm."""
    script, nodes = write(on_cluster, FATES), ("--nodelist=n1", "--exclusive")
    sent = ("--when-requeued", words, "--plain", script, PREEMPTED, preempted)
    job = on_cluster.submit("single", *sent, sbatch=nodes)
    for restart in range(preempted):
        on_cluster.wait_for(f"begun {restart}\n", job)
        on_cluster.cluster.submit("--partition=urgent", *nodes, "--wrap=true", cwd="/tmp")
    state, log = on_cluster.cluster.wait(job, timeout=300), on_cluster.log(job)
    last = last.replace("{folder}", f"{on_cluster.folder}/results/jobs/{job}")
    assert state["JobState"] == "COMPLETED" and f"\nbegun {preempted}{last}\n" in log, log
    assert "\nwhy " not in log, log


# What handlers see and get; `heard` has the numbers of the signals that they were called with.
STATES = """
import os, signal, subprocess, sys, time
from signal import SIG_DFL, SIGUSR1, SIGUSR2

heard = []
rank = os.getpid()
def hear(number, frame):
    if os.getpid() != rank:
        os._exit(3)
    heard.append(number)
def send(expected):
    heard.clear()
    os.kill(os.getppid(), SIGUSR2)  # to the process that Slurm has started
    until = time.monotonic() + 60
    while not heard and time.monotonic() < until:
        time.sleep(0.01)
    assert heard == [expected], heard

assert signal.getsignal(SIGUSR2) == SIG_DFL
os.kill(rank, SIGUSR2)
signal.signal(SIGUSR1, hear)
subprocess.run([sys.executable, "-c", f"import os; os.kill(os.getpid(), {SIGUSR2})"], check=True)
worker = os.fork()
if not worker:
    time.sleep(600)
send(SIGUSR1)
send(SIGUSR1)  # by now the worker would have had the first
assert os.waitpid(worker, os.WNOHANG) == (0, 0), "a loader's worker has done what its rank should do"
assert signal.signal(SIGUSR2, hear) == SIG_DFL
send(SIGUSR2)
assert signal.signal(SIGUSR2, SIG_DFL) == hear  # as Lightning does at the end of a fit
send(SIGUSR1)
print(*sys.argv, __name__, os.path.basename(__file__), flush=True)
"""


def test_usr2_reaches_who_installs_a_handler_and_ends_nobody(tmp_path: Path) -> None:
    """Also those who install it only where Python tells of none, and those who wait for USR1."""
    script = tmp_path / "states.py"
    script.write_text(STATES)
    done = succeeded(
        ran(sys.executable, "-m", "manygpus.jobs.inside.run_plain", "--plain", script, "an", "argument")
    )
    assert done.stdout == f"{script} an argument __main__ states.py\n"


# Each says when it waits for USR1, and when it has come (in a handler `print` may interrupt a `print`).
WAITS = """
import os, signal, time
assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
signal.signal(signal.SIGUSR1, lambda number, _: (os.write(1, b"heard %d\\n" % number), os._exit(0)))
os.write(1, b"waits\\n")
time.sleep(60)
"""
# With the trap Bash catches USR1, too, and would end by it.
WAITS_IN_A_SHELL = f"""#!/bin/bash
trap 'echo ends' EXIT
python -c '{WAITS}'
echo goes on
"""
WAITS_IN_ASYNCIO = """
import asyncio, signal
async def main():
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
    print("waits", flush=True)
    await asyncio.wait_for(heard.wait(), 60)
    print("heard 10")
asyncio.run(main())
"""
WAITS_IN_A_CHILD = f"""
import multiprocessing
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=exec, args=({WAITS!r}, {{}}))
    child.start()
    child.join()
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [(WAITS_IN_A_SHELL, "goes on\nends\n"), (WAITS_IN_ASYNCIO, ""), (WAITS_IN_A_CHILD, "")],
    ids=["shell", "asyncio", "child"],
)
def test_usr2_comes_as_usr1_to_the_process_that_waits_for_it(script: str, said: str, tmp_path: Path) -> None:
    """Whoever has started it, and to no other."""
    path = tmp_path / "program"
    path.write_text(script)
    path.chmod(0o755)
    if not script.startswith("#!"):
        path = path.rename(tmp_path / "program.py")
    command = [sys.executable, "-m", "manygpus.jobs.inside.run_plain", "--plain", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.read() == f"heard 10\n{said}"
    assert process.returncode == 0


# Its Python saves once Bash is gone.
SAVES_AFTER_ITS_SHELL = """#!/bin/bash
python -c '
import os, signal, time
shell = os.getppid()
def save(*_):
    while os.getppid() == shell:
        time.sleep(0.1)
    os.write(1, b"saved\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, save)
os.write(1, b"waits\\n")
time.sleep(60)
'
true
"""


def test_what_a_shell_script_has_started_may_save_after_sigterm(tmp_path: Path) -> None:
    """Slurm then waits for it, and the shell's end is that of the job."""
    path = tmp_path / "run.sh"
    path.write_text(SAVES_AFTER_ITS_SHELL)
    path.chmod(0o755)
    command = [sys.executable, "-m", "manygpus.jobs.inside.run_plain", "--plain", path]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, **pipes) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert process.returncode == -signal.SIGTERM
        assert process.stdout.read() == "saved\n"


@pytest.mark.parametrize(
    ("variables", "said", "read"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "print('so', 'far', 0)", b"so far 0\n"),
        ({}, "print('.', end='')", b"."),
    ],
    ids=["lines of torchrun's ranks", "text without a line end"],
)
def test_what_it_prints_is_written_at_once(
    variables: dict[str, str], said: str, read: bytes, tmp_path: Path
) -> None:
    """Those of torchrun share a pipe, and write whole lines. In this pipe, each write is read by itself."""
    script = tmp_path / "says.py"
    script.write_text(f"import os; {said}; os._exit(0)")
    command = [sys.executable, "-m", "manygpus.jobs.inside.run_plain", "--plain", script]
    reads, writes = os.pipe2(os.O_DIRECT)
    with os.fdopen(reads, "rb", buffering=0) as output, os.fdopen(writes, "wb") as pipe:
        environment = ENVIRONMENT | {"PYTHONUNBUFFERED": "1"} | variables
        subprocess.run(command, stdout=pipe, env=environment, cwd=REPOSITORY, check=True, timeout=60)
        pipe.close()
        assert output.read(100) == read


# Rank 0 does nothing more when both have printed; a rank that is ended does not empty Python's buffer.
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""
BOTH_PRINTED = """
print("so far", rank)
job = os.environ["MANYGPUS_JOB_DIR"]
open(f"{job}/checkpoints/printed-{rank}", "w").close()
while len(os.listdir(job + "/checkpoints")) < 2:
    time.sleep(0.1)
if rank == 0:
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("launcher", "fate", "code", "reason"),
    [
        # As the kit's own errors end a rank, such as those of a Recorder.
        ("srun", BOTH_PRINTED + "from manygpus import errors; errors.fail('planted')", 1,
         "error on rank 1: planted"),
        ("torchrun", BOTH_PRINTED + "os._exit(7)", 7, "rank 1 on n1 ended with exit code 7"),
        # Once the group exists, PyTorch puts "[rank1]: " before each line. All ranks share the log.
        ("srun", GROUP + BOTH_PRINTED + "raise ValueError('planted')", 1,
         "rank 1 on n1 ended with exit code 1: ValueError: planted"),
        ("submitit", BOTH_PRINTED + "raise ValueError('planted')", 1,
         r"rank 1 on n1 ended with exit code 1: ValueError: planted \(in \d+_1_log.out\)"),
    ],
)  # fmt: skip
def test_its_exit_code_is_that_of_the_job_and_its_output_stays(
    launcher: str, fate: str, code: int, reason: str, on_cluster: Checkout
) -> None:
    """The code is that of the rank that failed first, not of the one that srun had to end.

    The log begins with what was run, and the script's own commit; a job of submit.py has its name.
    """
    script = write(on_cluster, FATES)
    commit = commit_of(script.parent)
    script.write_text(f"{FATES}\n")
    changes, frozen_in = "changes", ""
    if launcher == "submitit":
        done = on_cluster.submit_py("ddp", "--wait", "--plain", script, fate)
        assert done.returncode == 1
        assert re.search(f" failed: {reason}\n$", done.stderr), done.stderr
        job = int(done.stdout.split()[1])
        path = next(on_cluster.folder.rglob(f"{job}_0_log.out"))
        log = path.read_text()
        changes, frozen_in = "1 changed file", str(path.parent / "code")
        assert f"\nranks    ls '{path.parent}'/{job}_*_log.out\n" in done.stdout
    else:
        job = on_cluster.submit(launcher, "--plain", script, fate, sbatch=("--nodelist=n1",))
        on_cluster.cluster.wait(job)
        log = on_cluster.log(job)
    assert on_cluster.cluster.job(job)["ExitCode"] == f"{code}:0", log
    assert re.search(f"^why     {reason}$", log, re.MULTILINE) and "so far 0\n" in log, log
    head = log[: log.index("\n\n")]
    assert f"\nscript  '{script}' {fate!r}\npython  {Path(sys.executable).parent}/" in head, log
    assert f"\ncode    {commit} with {changes} in {script.parent}" in head, log
    kept = job_folder.read_script(on_cluster.folder / "results" / "jobs" / str(job))
    expected = job_folder.Script(
        str(script), [fate], f"{commit}-dirty", str(script.parent), frozen_in=frozen_in
    )
    assert replace(kept, python="", job_name="", log="") == expected
    assert Path(kept.python).parent == Path(sys.executable).parent
    if launcher == "submitit":
        assert on_cluster.cluster.job(job)["JobName"] == "train" and path.parent.name.startswith("train-")
    listed = on_cluster.python("slurm/jobs.py", str(job)).stdout
    assert f"the end of {kept.log}:" in listed and log.splitlines()[-1] in listed
    row = rf"^{job} +\S+ +.*/train\.py.* failed +\d+ s +0 +.*rank 1"
    assert re.search(row, listed, re.MULTILINE), listed
    (described,) = document(on_cluster.python("slurm/jobs.py", "--json", str(job)).stdout, "jobs")["jobs"]
    assert (described["job"], described["state"], described["exit_code"]) == (str(job), "failed", code)
    assert described["script"] == str(script) and described["arguments"] == [fate]
    assert re.search(reason, described["note"]) and described["end_of_log"][-1] == log.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "first_line", "mode", "printed"),
    [
        ("bash x.sh", "", 0o644, "x.sh not of a login shell: an argument"),
        ("x.sh", "# /bin/bash", 0o644, "{}/x.sh not of a login shell: an argument"),
        ("x.sh", "", 0o755, "{}/x.sh not of a login shell: an argument"),
        ("x.sh", "#!/bin/bash -l", 0o644, "{}/x.sh of a login shell: an argument"),
        ("installed", "#!/bin/bash", 0o755, "{}/env/bin/installed not of a login shell: an argument"),
    ],
)
def test_a_program_by_its_name_and_a_shell_script_that_does_not_start_by_itself(
    words: str, first_line: str, mode: int, printed: str, tmp_path: Path
) -> None:
    """The program is on PATH, or beside the Python of --python."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    for script in (tmp_path / "x.sh", tmp_path / "env" / "bin" / "installed"):
        script.write_text(
            f"{first_line}\nshopt -q login_shell || no='not '\necho $0 ${{no}}of a login shell: $*\n"
        )
        script.chmod(mode)
    python = ("--python", "env/bin/python")
    command = (sys.executable, "-m", "manygpus.jobs.inside.run_plain", *python, "--plain", *words.split())
    done = succeeded(ran(*command, "an", "argument", cwd=tmp_path))
    assert done.stdout == f"{printed.format(tmp_path)}\n"


# What its Python has of the kit, for a job that starts it as a module of a package.
IN_A_PACKAGE = """
import importlib.util, os, sys
from .words import GREETING
found = [name for name in ("submitit", "manygpus") if importlib.util.find_spec(name)]
words = (GREETING, os.environ["RANK"], sys.executable, found, os.environ["VIRTUAL_ENV"], *sys.argv[1:])
# In one piece: another rank writes to the same log.
sys.stdout.write(" ".join(map(str, words)) + "\\n")
"""
# A shell on each node, which starts a process that starts two.
SHELL = """#!/bin/bash
echo "node $SLURM_NODEID of $SLURM_NNODES with $(type -p python)"
exec python spawns.py "$@"
"""
SPAWNS = """
import os, sys
import torch.distributed as dist
from torch.multiprocessing import start_processes

def work(local_rank):
    rank = 2 * int(os.environ["NODE_RANK"]) + local_rank
    dist.init_process_group("gloo", rank=rank, world_size=4)
    words = ("rank", dist.get_rank(), "of", dist.get_world_size(), *sys.argv[1:])
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"}
    assert not names & os.environ.keys()
    start_processes(work, nprocs=2, start_method="fork")
"""


def test_other_ways_to_start(on_cluster: Checkout) -> None:
    """A module in an environment of its own, which has nothing of the kit; and a shell script on each node.

    submit.py is called with that environment's Python, too, by sbatch it is named.
    """
    folder = write(on_cluster, "").parent
    (folder / "package").mkdir()
    (folder / "package" / "words.py").write_text("GREETING = 'hello'")
    (folder / "package" / "train.py").write_text(IN_A_PACKAGE)
    (folder / "spawns.py").write_text(SPAWNS)
    (folder / "run.sh").write_text(SHELL)
    (folder / "run.sh").chmod(0o755)
    (on_cluster.folder / ".venv").symlink_to(sys.prefix)
    python = own_environment(folder / "env")
    module = ("--python", "env/bin/python", "--plain", "-m", "package.train", "--lr", "{folder}/{lr}")
    spawned = ("--one-process-per-node", "--plain", "run.sh", "--resume")
    submit_py = (python, on_cluster.folder / "03_multigpu_ddp" / "submit.py")
    sent = [
        on_cluster.run(*submit_py, *asked, cwd=folder)
        for asked in (module, ("--gpus", 4, "--nodes", 2, "--cpus-per-gpu", 1, *spawned))
    ]
    jobs = [int(succeeded(done).stdout.split()[1]) for done in sent]
    assert "note: it runs with the job's Python" not in sent[0].stdout
    sbatch = (f"--chdir={folder}", f"--output={on_cluster.folder}/module-%j.log", "--nodelist=n2")
    jobs.append(on_cluster.submit("srun", *module, sbatch=sbatch))
    ended = [on_cluster.cluster.wait(job, timeout=300)["JobState"] for job in jobs]
    by_submit_py, spawned_ranks = (
        "".join(path.read_text() for path in on_cluster.folder.rglob(f"{job}_*_log.out")) for job in jobs[:2]
    )
    by_sbatch = on_cluster.log(jobs[2])
    assert ended == ["COMPLETED"] * 3, by_submit_py + spawned_ranks + by_sbatch
    for log, job in ((by_submit_py, jobs[0]), (by_sbatch, jobs[2])):
        filled = f"{on_cluster.folder}/results/jobs/{job}/{{lr}}"
        greeting = f"hello 0 {python} [] {python.parents[1]} --lr {filled}\n"
        head = f"\nscript  -m package.train --lr '{filled}'\npython  {python}\n"
        assert greeting in log and head in log, log
    nodes = re.findall(r"^node (\d of 2) with (.*)/bin/python$", spawned_ranks, re.MULTILINE)
    assert sorted(nodes) == [("0 of 2", sys.prefix), ("1 of 2", sys.prefix)], spawned_ranks
    ranks = re.findall(r"^rank (\d) of 4 --resume$", spawned_ranks, re.MULTILINE)
    assert sorted(ranks) == ["0", "1", "2", "3"], spawned_ranks
    listed = on_cluster.run(python, on_cluster.folder / "slurm" / "jobs.py").stdout
    assert listed.count("package.train --lr ") == 2 and "run.sh' --resume" in listed, listed


WHERE = """
import os
names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_CPUS_PER_TASK"
os.write(1, " ".join(["place", *(os.environ[name] for name in names)]).encode() + b"\\n")
"""


def test_where_nodes_and_requests_are_uneven(on_cluster: Checkout) -> None:
    """Three ranks on two nodes; and cores by the GPU, of which each rank has its own two."""
    script = write(on_cluster, WHERE)
    job_script = on_cluster.folder / SCRIPTS["srun"]
    own_requests = "#SBATCH --(cpus-per-task|mem|ntasks-per-node|gpus-per-node)=.*\n"
    job_script.write_text(re.sub(own_requests, "", job_script.read_text()))
    per_gpu = ("--ntasks=2", "--gpus=2", "--cpus-per-gpu=2", "--mem-per-gpu=1G")
    expected = {
        ("--nodes=2", "--ntasks=3", "--mem=1G"): ["0 0 2 3 1", "1 1 2 3 1", "2 0 1 3 1"],
        per_gpu: ["0 0 2 2 2", "1 1 2 2 2"],
        ("--nodes=1", "--exclusive", "--mem=1G"): ["0 0 1 1 4"],
    }
    jobs = {asked: on_cluster.submit("srun", "--plain", script, sbatch=asked) for asked in expected}
    for asked, job in jobs.items():
        assert on_cluster.cluster.wait(job)["JobState"] == "COMPLETED", on_cluster.log(job)
        assert sorted(re.findall("^place (.*)", on_cluster.log(job), re.MULTILINE)) == expected[asked], asked


ARRAY = """
import signal
task, job = os.environ["SLURM_ARRAY_TASK_ID"], os.environ["MANYGPUS_JOB_DIR"]
print("began", file=open("starts-" + task, "a"), flush=True)
again = len(open("starts-" + task).readlines()) > 1
signal.signal(signal.SIGUSR2, lambda *_: (open(job + "/stopped", "w").close(), os._exit(0)))
time.sleep(0 if again or task == "1" else 600)"""


def test_one_job_of_an_array_comes_back_alone(on_cluster: Checkout) -> None:
    """Also the one that has the number of the array, by which Slurm means all of them."""
    script, cluster = write(on_cluster, FATES), on_cluster.cluster
    sbatch = ("--array=1-2", f"--output={on_cluster.folder}/array-%a.log", f"--chdir={script.parent}")
    job = on_cluster.submit("single", "--plain", script, ARRAY, sbatch=sbatch)
    first, second = (on_cluster.folder / f"array-{task}.log" for task in (1, 2))
    wait_until(
        lambda: (
            first.exists() and "exit code 0" in first.read_text() and (script.parent / "starts-2").exists()
        )
    )
    assert f"job     {job}_2 ({job}) " in second.read_text()  # the number of the array
    cluster.run(["scancel", "--signal=USR2", f"{job}_2"])
    wait_until(lambda: second.read_text().count("exit code 0") == 2)
    assert [(script.parent / f"starts-{task}").read_text().count("began") for task in (1, 2)] == [1, 2]


SAVES_AT_ONCE = """
import signal
job = os.environ["MANYGPUS_JOB_DIR"]
open(job + "/checkpoints/saved", "w").close()
signal.signal(signal.SIGTERM, lambda *_: (open(job + "/stopped", "w").close(), os._exit(0)))
ready = job + "/ready"
if rank == 0: open(ready, "w").close()
while not os.path.exists(ready): time.sleep(0.1)
time.sleep(600) if rank == 0 else os.kill(os.getpid(), 9)"""


def test_a_rank_that_fails_soon_does_not_come_back_for_ever(on_cluster: Checkout) -> None:
    """Though another one saves, since srun ends it as a preemption would."""
    job = on_cluster.submit("srun", "--plain", write(on_cluster, FATES), SAVES_AT_ONCE)
    state, log = on_cluster.cluster.wait(job, timeout=300), on_cluster.log(job)
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("FAILED", "0", "137:0"), log
    assert re.search(r"^why     rank 1 on n\d was killed", log, re.MULTILINE), log
    assert "does not come back" in log and f"scontrol requeue {job} " in log, log


@pytest.mark.parametrize(
    ("fate", "code", "printed"),
    [
        ("os._exit(0)", 0, "done: see "),
        ("time.sleep(600) if rank else sys.exit(7)", 1, "failed: rank 0 ended with exit code 7\n"),
        ("time.sleep(600) if rank else os.kill(os.getpid(), 9)", 1, "failed: rank 0 was killed "),
        (GROUP + BOTH_PRINTED + "raise ValueError('planted')", 1,
         "failed: rank 1 ended with exit code 1: ValueError: planted (in "),
        ("os.kill(os.getpid(), 12)", 0, "done: see "),  # USR2, of which it knows nothing
        ("open(os.environ['MANYGPUS_JOB_DIR'] + '/stopped', 'w').close()", 1, "to resume it, copy /"),
        ("open(f'once-{rank}', 'x'); sys.exit(144)", 1, " ended with exit code 144"),
    ],
)  # fmt: skip
def test_its_exit_codes_count_without_slurm(fate: str, code: int, printed: str, checkout: Checkout) -> None:
    checkout.site("SITE_MONITOR=on")
    done = checkout.submit_py("ddp", "--gpus", 2, "--wait", "--plain", write(checkout, FATES), fate)
    assert (done.returncode, printed in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr
    (log,) = (checkout.folder / "results" / "jobs").rglob("*_0_log.out")
    reason = f"why     {printed.removeprefix('failed: ')}"
    assert (reason in log.read_text()) == printed.startswith("failed: "), log.read_text()
    assert ("so far 0\n" in log.read_text()) == ("so far" in fate)


# Its child ends by SIGINT with it, as those of `mp.spawn` do, or would not end with it.
LEAVES_A_CHILD = """
import os, signal, sys, time
from pathlib import Path
from manygpus.process import end_with
rank = os.getpid()
if os.environ["RANK"] == "0" and not os.fork():
    if sys.argv[1] == "killed":
        end_with(rank, signal.SIGINT)
    Path("child.new").write_text(str(os.getpid()))
    try:
        Path("child.new").rename("child")
        time.sleep(400)
    except KeyboardInterrupt:
        Path("interrupted").touch()
    os._exit(0)
while not Path("child").exists():
    time.sleep(0.1)
time.sleep(0 if sys.argv[1] == "fails" or os.environ["RANK"] == "1" else 400)
sys.exit(7)
"""


@pytest.mark.parametrize("fate", ["killed", "fails", "peer fails"])
def test_what_it_has_started_ends_with_it_without_slurm(fate: str, checkout: Checkout) -> None:
    """submit.py returns at once though its output is a pipe, and ending the job as it says ends all of it."""
    folder = write(checkout, LEAVES_A_CHILD).parent
    options = ("--gpus", 2, "--wait") if fate == "peer fails" else ("--gpus", 1)
    submit_py = checkout.folder / "03_multigpu_ddp" / "submit.py"
    done = checkout.run(sys.executable, submit_py, *options, "--plain", "train.py", fate, cwd=folder)
    assert done.returncode == int(fate == "peer fails"), done.stderr
    wait_until((folder / "child").exists)
    child = int((folder / "child").read_text())
    if fate == "killed":
        ran("bash", "-c", re.search("^stop +(kill [0-9]+)$", done.stdout, re.MULTILINE)[1])
    wait_until(lambda: not psutil.pid_exists(child))
    assert (folder / "interrupted").exists() == (fate == "killed")


def test_it_runs_where_it_was_started_and_may_be_sent_nowhere(checkout: Checkout) -> None:
    script = write(checkout, VAE)
    checkout.fake("sbatch", "echo Submitted batch job 7")
    arguments = ("--local", "--wait", f"--plain={script.name}", "--epochs", 3)
    active = script.parent / "env" / "bin" / "python"
    active.parent.mkdir(parents=True)
    active.touch()
    environment = {"VIRTUAL_ENV": str(active.parents[1])}
    done = succeeded(checkout.submit_py("single", *arguments, cwd=script.parent, **environment))
    assert done.stdout.startswith("--local: running as 1 local process(es)\n")
    assert re.search(f"^note: it runs with the job's .* --python {active}$", done.stdout, re.MULTILINE)
    assert (script.parent / "results" / "sample_3_1").exists()
    assert "results  ls" not in done.stdout  # it records nothing there


# Its ranks are there while they are sampled a few times, and meet only if they are told to.
SAMPLED = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist

def count():
    samples = Path(os.environ["MANYGPUS_JOB_DIR"], "monitor").glob("*.csv")
    return sum(path.read_text().count(f",rank,{os.environ['RANK']},") for path in samples)

if "together" in sys.argv:
    dist.init_process_group("gloo")
began = count()
while count() < began + 4:
    time.sleep(0.1)
"""


def judge_early(checkout: Checkout) -> None:
    """After three samples instead of ten, in which a process only loads PyTorch."""
    checkout.site("SITE_MONITOR=on\n")
    rules = checkout.folder / "manygpus" / "monitor" / "sampled_job.py"
    patient = "SAMPLES_UNTIL_RANKS_MEET = 10\n"
    assert patient in rules.read_text()
    rules.write_text(rules.read_text().replace(patient, "SAMPLES_UNTIL_RANKS_MEET = 3\n"))


def test_ranks_that_never_met_are_told_in_the_last_lines(on_cluster: Checkout) -> None:
    judge_early(on_cluster)
    script, nodes = write(on_cluster, SAMPLED + "os._exit(0)"), ("--nodes=2", "--ntasks-per-node=1")
    ways = {"two nodes": nodes, "one node": (), "together": nodes}
    jobs = {way: on_cluster.submit("srun", "--plain", script, way, sbatch=ways[way]) for way in ways}
    for way, job in jobs.items():
        state, log = on_cluster.cluster.wait(job, timeout=300), on_cluster.log(job)
        assert state["JobState"] == "COMPLETED", log
        assert ("watch   the 2 ranks never met" in log) == (way != "together"), log


# On one rank it writes a record; on two it fails until there is a file `well`.
SWEPT = (
    """
from pathlib import Path
import os, sys
if os.environ["WORLD_SIZE"] == "2" and not Path("well").exists():
    sys.exit(3)
"""
    + SAMPLED
    + """
if os.environ["WORLD_SIZE"] == "2":
    os._exit(0)
from manygpus.training.recorder import Recorder
model = torch.nn.Linear(2, 1)
arguments = {"batch_size": 8, "epochs": 1, "dataset": " ".join(sys.argv[1:])}
recorder = Recorder("theirs", model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
recorder.epoch(samples=8, seconds=1, loss=1)
"""
)


def test_a_sweep_runs_it_on_each_number_of_gpus(checkout: Checkout) -> None:
    """What has ended well stays, what has failed runs again, and the records are compared.

    Of ranks that never met it says so.
    """
    judge_early(checkout)
    script, out = write(checkout, SWEPT), checkout.folder / "a sweep"
    arguments = ("slurm/sweep.py", "--local", "--gpus", "1,2", "--out", out)
    plain = ("--plain", script, "--gpus", 7)
    done = checkout.python(*arguments, *plain, cwd=script.parent)
    assert re.search("^resume .*", done.stdout, re.MULTILINE)[0].count("--out") == 1
    assert done.returncode == 1 and "[1/2] train-1gpu-r1 finished\n" in done.stdout, done.stdout
    assert "train-2gpu-r1 failed: rank" in done.stdout and "exit code 3" in done.stdout
    (record,) = out.glob("train-1gpu-r1/runs/*.csv")
    assert records.read(record)[0]["dataset"] == "--gpus 7" and (out / "comparison.md").exists()
    (script.parent / "well").touch()
    done = succeeded(checkout.python(*arguments, *plain, cwd=script.parent))
    assert (
        "2 runs, 1 of them finished" in done.stdout
        and "[2/2] train-2gpu-r1 finished; the 2 ranks never met" in done.stdout
    )
    assert "no run has written a record" not in done.stdout
    done = checkout.python(*arguments, "--batch-size", 64, *plain)
    assert f"--batch-size has no place in the arguments of {script}" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--plain", "argument --plain: "),
        ("--plain nowhere.py", "there is no script nowhere.py in "),
        ("--plain README.md", "chmod +x README.md and a first line"),
        ("--plain -m", "--plain -m takes the name of a module"),
        ("--python . --plain mnist_ddp.py", "--python . is not a program"),
        ("--python python3", "are for plain scripts"),
        ("--when-requeued '--it --plain resumable_ddp.py", '--when-requeued "\'--it": No closing quotation'),
        ("--one-process-per-node --epochs=2 --plain resumable_ddp.py", "--epochs=2 is not for plain scripts"),
        ("--one-process-per-node --plain resumable_ddp.py", "--ntasks-per-node=1"),
    ],
)
def test_a_job_script_without_the_script(words: str, message: str, checkout: Checkout) -> None:
    checkout.fake("scontrol", "echo 127.0.0.2")
    checkout.fake("python", f'exec "{sys.executable}" "$@"')
    checkout.fake("srun", "exit 1")
    place = checkout.folder / "03_multigpu_ddp"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": str(place)}
    job |= {"PATH": f"{checkout.commands}:/usr/bin:/bin", "SLURM_TASKS_PER_NODE": "2"}
    done = checkout.run("bash", "slurm_submit.sh", *words.split(" "), cwd=place, **job)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and message in done.stderr, done.stderr


def test_its_verdict_names_no_option_of_ours(tmp_path: Path) -> None:
    traces.write(tmp_path / "monitor", SyntheticJob([STARVED], facts=FROM_LOADERS))
    (sentence, *_) = wording.sentences(judge(tmp_path / "monitor"))
    assert "--num-workers" in sentence
    (tmp_path / "plain").touch()
    (sentence, *_) = wording.sentences(judge(tmp_path / "monitor"))
    assert "--num-workers" not in sentence and "keep the data in memory." in sentence


# The training of the page's launcher, as a module beside it.
COUNTS_EPOCHS = """
import time
from pathlib import Path

def train(rank, world_size):
    saved = Path(f"rank-{rank}.epochs")
    for epoch in range(int(saved.read_text()) if saved.exists() else 1, 4):
        print(f"rank {rank} of {world_size}, epoch {epoch}", flush=True)
        while epoch == 2 and not Path("go").exists():
            time.sleep(0.1)
        saved.write_text(str(epoch + 1))
"""


def test_jobs_of_a_submitit_launcher_are_jobs_of_the_kit(on_cluster: Checkout, tmp_path: Path) -> None:
    """That of YOUR_TRAINING.md: its checkpoint() brings it back, and the list of jobs has it."""
    page = (REPOSITORY / "YOUR_TRAINING.md").read_text()
    (launcher,) = re.findall(r"^```python\n(import shlex\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = write(on_cluster, f"from counting import train\n{launcher}")
    folder = script.parent
    (folder / "counting.py").write_text(COUNTS_EPOCHS)
    (tmp_path / "multi-gpu").symlink_to(on_cluster.folder)
    job = int(succeeded(on_cluster.run(sys.executable, script, cwd=folder, HOME=str(tmp_path))).stdout)

    def log() -> str:
        return "".join(path.read_text() for path in folder.glob(f"logs/{job}_*_log.*"))

    wait_until(lambda: log().count("of 2, epoch 2") == 2)
    on_cluster.cluster.run(["scancel", "--signal=USR2", job])
    wait_until(lambda: "restart 1" in log())
    (folder / "go").touch()
    state = on_cluster.cluster.wait(job, timeout=200)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), log()
    assert log().count("of 2, epoch 1") == 2 and log().count("of 2, epoch 3") == 2, log()
    listed = succeeded(on_cluster.python("slurm/jobs.py")).stdout
    assert re.search(rf"^ *{job} +mine +'my work/train.py' +done +.*s +1\b", listed, re.MULTILINE), listed
