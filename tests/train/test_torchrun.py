"""Several ranks of stage 03 without Slurm, as LAUNCHING.md shows it."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, STAGES, ran, rows_of, succeeded
from forking import free_port

from manygpus.signals import STOP_SIGNALS

PAGE = STAGES["ddp"].with_name("LAUNCHING.md")
SMALL = "--train-size 300 --test-size 100 --epochs 1 --batch-size 60 --precision fp32 --no-cuda --timeout 60"
TORCHRUN = (sys.executable, "-m", "manygpus.distributed.torchrun", "--standalone", "--nproc-per-node=2")


def commands(beginning: str) -> str:
    """The block of the page that begins so."""
    (block,) = re.findall(rf"^```\n({beginning}.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return block


def start(text: str, folder: Path) -> subprocess.CompletedProcess:
    """Run the lines of a shell, with fewer images and a port that is free."""
    text = text.replace("--epochs 2", f"{SMALL} --results-dir '{folder}'").replace("29500", free_port())
    path = f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
    return ran("bash", "-c", text, cwd=PAGE.parent, env=ENVIRONMENT | {"PATH": path})


def test_by_hand_and_by_torchrun_on_several_machines(tmp_path: Path) -> None:
    """Both machines are this one; what comes out is the same to the last digit."""
    succeeded(start(commands("place="), tmp_path / "hand"))
    first, second = commands("torchrun --nnodes").replace("=first ", "=localhost ").splitlines()
    succeeded(start(f"export OMP_NUM_THREADS=1\n{second} &\n{first}", tmp_path / "torchrun"))
    (hand,), (torchrun,) = rows_of(tmp_path / "hand"), rows_of(tmp_path / "torchrun")
    assert (hand["launcher"], hand["world_size"], hand["nodes"]) == ("env", 2, 1)
    assert (torchrun["launcher"], torchrun["world_size"], torchrun["nodes"]) == ("torchrun", 2, 2)
    assert (hand["train_loss"], hand["test_loss"]) == (torchrun["train_loss"], torchrun["test_loss"])


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGTERM, "at once"), (signal.SIGUSR2, "epoch 1/")],
    ids=["SIGTERM at once", "USR2 in training"],
)
def test_our_torchrun_hands_signals_on_to_its_ranks(number: int, moment: str, tmp_path: Path) -> None:
    """Sent to it alone, as where Slurm signals only what srun has started; not all its children are ranks."""
    other_child = "import subprocess; subprocess.Popen(['sleep', '20'])"
    patient = "torchrun.PATIENCE_SECONDS = 300"  # imports take their time on a busy machine
    main = f"{other_child}; from manygpus.distributed import torchrun; {patient}; torchrun.main()"
    launcher = [sys.executable, "-c", main, "--standalone", "--nproc-per-node=2"]
    folders = ("--results-dir", tmp_path, "--checkpoint-dir", tmp_path / "checkpoints")
    command = [*launcher, STAGES["ddp"], *SMALL.split(), "--epochs", 999, *folders]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])  # as a job starts it
    process = subprocess.Popen(list(map(str, command)), env=ENVIRONMENT, **pipes)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if moment != "at once":
        next(line for line in process.stdout if line.startswith(moment))
    process.send_signal(number)
    output, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint
    assert re.search(r"^stopped after .* by a signal", output, re.MULTILINE), output
    assert "Traceback" not in complaint
    assert list((tmp_path / "checkpoints").glob("epoch-*.pt"))


def test_a_rank_that_has_obeyed_gets_no_second_signal(tmp_path: Path) -> None:
    """Where Slurm signals the ranks and our torchrun. Both go back to the default first, as Python does."""
    script = tmp_path / "obeys.py"
    script.write_text(f"""
import os, signal, time
from pathlib import Path

signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
folder = Path({str(tmp_path)!r})
(folder / f"rank-{{os.environ['RANK']}}").touch()
while len([*folder.glob("rank-*")]) < 2:
    time.sleep(0.1)
os.kill(os.getppid(), signal.SIGUSR2)
time.sleep(2)
""")
    done = ran(*TORCHRUN, script)
    assert done.returncode == 0, done.stderr


def test_a_rank_hears_whatever_it_is_called(tmp_path: Path) -> None:
    """Without its variables, as titles of processes overwrite them, and with a name that is no UTF-8."""
    (tmp_path / "named.py").write_text("""
import ctypes, os, signal, sys, time
if len(sys.argv) == 1:
    os.execve(sys.executable, [sys.executable, __file__, "again"], {})
ctypes.CDLL(None).prctl(15, b"\\xff", 0, 0, 0)
signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
os.kill(os.getppid(), signal.SIGUSR2)
time.sleep(60)
sys.exit(3)
""")
    done = ran(*TORCHRUN, tmp_path / "named.py")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_ctrl_c_of_our_torchrun_is_no_traceback(tmp_path: Path) -> None:
    command = [*TORCHRUN, STAGES["ddp"], *SMALL.split(), "--epochs", 999, "--results-dir", tmp_path]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(list(map(str, command)), env=ENVIRONMENT, **pipes)
    next(line for line in process.stdout if line.startswith("epoch 1/"))
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in complaint) == (130, False), complaint


def test_our_torchrun_ends_while_it_waits_for_another_machine(tmp_path: Path) -> None:
    """USR2 before the time limit, then SIGTERM; no rank is there to hear them."""
    launcher = [sys.executable, "-m", "manygpus.distributed.torchrun", "--nnodes=2", "--rdzv-backend=c10d"]
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as a job starts it
    process = subprocess.Popen([*launcher, endpoint, STAGES["ddp"]], env=ENVIRONMENT, stderr=subprocess.PIPE)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    time.sleep(3)
    for number in STOP_SIGNALS:
        process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM


def test_the_torchruns_of_a_job_meet_whatever_slurm_calls_its_nodes(tmp_path: Path) -> None:
    """A node's name has no address, and comes before that of the first, by which torchrun numbers them.

    The first node has two GPUs, the other one, and each has as many ranks, which share four threads.
    Then a rank of the first node fails; the other node does not fill the log with frames of C++.
    """
    script = tmp_path / "met.py"
    script.write_text("""
import os, sys, time
from pathlib import Path

names = ("GROUP_RANK", "MASTER_ADDR", "TORCH_CPP_LOG_LEVEL", "WORLD_SIZE", "OMP_NUM_THREADS")
# In one write: torchrun starts Python unbuffered, and its ranks share a pipe.
sys.stdout.write(" ".join(str(os.environ.get(name)) for name in names) + "\\n")
folder = Path(__file__).parent
(folder / f"rank-{os.environ['RANK']}").touch()
# The torchrun of the first node has the store, and ends with its ranks.
while len([*folder.glob("rank-*")]) < 3:
    time.sleep(0.1)
time.sleep(10 * int(os.environ["SLURM_NODEID"]))
sys.exit(3)
""")
    endpoint = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}")
    command = [sys.executable, "-m", "manygpus.distributed.torchrun", "--nnodes=2", *endpoint, script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = []
    for number, gpus in enumerate((2, 1)):
        of_job = {"MASTER_ADDR": "localhost", "SLURM_NODEID": str(number), "SLURMD_NODENAME": f"a{number}"}
        of_job |= {"SLURM_GPUS_ON_NODE": str(gpus), "OMP_NUM_THREADS": "4"}
        nodes.append(subprocess.Popen(command, env=ENVIRONMENT | of_job, **pipes))
    for number, (node, ranks) in enumerate(zip(nodes, (2, 1), strict=True)):
        output, complaint = node.communicate(timeout=300)
        assert output == f"{number} localhost None 3 {4 // ranks}\n" * ranks, complaint
        assert "frame #0" not in complaint


def test_a_torchrun_that_a_container_tells_nothing_starts_no_rank(tmp_path: Path) -> None:
    """It would start one on each node, whatever GPUs the job has."""
    launcher = [sys.executable, "-m", "manygpus.distributed.torchrun", tmp_path / "none.py"]
    done = ran(*launcher, env=ENVIRONMENT | {"MANYGPUS_STARTED_BY": "srun"})
    assert done.returncode == 1
    assert "error: " in done.stderr and "SITE_CONTAINER" in done.stderr
