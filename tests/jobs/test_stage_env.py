"""SITE_STAGE_ENV: the environment of a job on each node's own disk, which is here /dev/shm."""

import re
from pathlib import Path

import psutil
from checkout import Checkout, own_environment
from conftest import ran, succeeded

# It waits in the first start, until the job is sent back to the queue.
TELLS_ITS_PYTHON = """
import os, sys, time
print("rank of", os.uname().nodename, "uses", sys.prefix, flush=True)
assert os.environ["VIRTUAL_ENV"] == sys.prefix
time.sleep(0 if int(os.environ.get("SLURM_RESTART_COUNT", 0)) else 300)
"""
ON_TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--mem=1G")


def packed_environment(folder: Path) -> Path:
    """An archive of an environment with what a plain script needs, and without PyTorch."""
    python = own_environment(folder / "environment")
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "psutil").symlink_to(Path(psutil.__file__).parent)
    succeeded(ran("tar", "--create", "--file", folder / "env.tar", "--directory", python.parents[1], "."))
    return folder / "env.tar"


LEAVE_ONE = "mkdir -p /dev/shm/mine/manygpus-env-1-0-0/bin && touch /dev/shm/mine/manygpus-env-1-0-0.lock"


def test_each_node_has_the_environment_in_every_start_and_keeps_none(on_cluster: Checkout) -> None:
    """All ranks use it, and it is removed when a job ends or goes back to the queue.

    What a killed job has left is removed as well, but not the environment of a job that runs beside this one.
    """
    archive = packed_environment(on_cluster.folder)
    on_cluster.site(
        f"SITE_STAGE_ENV='{archive}'\nSITE_STAGE_DIR=/dev/shm/mine\nSITE_MONITOR=off\n"
        "export VIRTUAL_ENV=/that/of/the/shell\n"
    )
    script = on_cluster.folder / "train.py"
    script.write_text(TELLS_ITS_PYTHON)
    succeeded(on_cluster.cluster.run(["srun", "--nodes=2", "--mem=100M", "sh", "-c", LEAVE_ONE]))
    job = on_cluster.submit("srun", "--plain", script, sbatch=ON_TWO_NODES)
    for node in ("n1", "n2"):
        on_cluster.wait_for(f"rank of {node}", job)
    beside = on_cluster.submit("srun", "--plain", "/bin/true", sbatch=ON_TWO_NODES)
    assert on_cluster.cluster.wait(beside)["JobState"] == "COMPLETED", on_cluster.log(beside)
    first = f"/dev/shm/mine/manygpus-env-{job}-0-0"
    succeeded(on_cluster.cluster.run(["srun", "--nodes=2", "--mem=100M", "ls", f"{first}/bin/python"]))
    on_cluster.cluster.run(["scontrol", "requeue", job])
    state = on_cluster.cluster.wait(job, timeout=200)
    log = on_cluster.log(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), log
    used = set(re.findall("rank of (n.) uses (.*)", log))
    starts = [f"/dev/shm/mine/manygpus-env-{job}-{restart}-0" for restart in (0, 1)]
    assert used == {(node, folder) for node in ("n1", "n2") for folder in starts}
    assert len(re.findall("^env .* unpacked to .* in", log, re.MULTILINE)) == 2
    left = succeeded(on_cluster.cluster.run(["srun", "--nodes=2", "--mem=100M", "ls", "/dev/shm/mine"]))
    assert left.stdout == ""


CRASHES_ONCE = """
import os, signal, sys
print("rank uses", sys.prefix, flush=True)
if "--resume" not in sys.argv:
    open("saved.txt", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_that_starts_again_in_its_nodes_unpacks_it_anew(on_cluster: Checkout) -> None:
    archive = packed_environment(on_cluster.folder)
    on_cluster.site(f"SITE_STAGE_ENV='{archive}'\nSITE_STAGE_DIR=/dev/shm/mine\nSITE_MONITOR=off\n")
    script = on_cluster.folder / "train.py"
    script.write_text(CRASHES_ONCE)
    words = ("--when-requeued", "--resume saved*.txt", "--plain", script)
    job = on_cluster.submit("srun", *words, sbatch=("--ntasks-per-node=1", "--gpus-per-node=1", "--mem=1G"))
    state, log = on_cluster.cluster.wait(job), on_cluster.log(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), log
    folders = [f"/dev/shm/mine/manygpus-env-{job}-0-{restart}" for restart in (0, 1)]
    assert re.findall("rank uses (.*)", log) == folders


def test_a_node_that_cannot_have_it_ends_the_job_with_a_sentence(on_cluster: Checkout) -> None:
    """A disk that the nodes share, and an archive that is none, or not there, which no job is needed for."""
    archive = packed_environment(on_cluster.folder)
    broken = on_cluster.folder / "broken.tar"
    broken.write_text("nothing")
    for path, folder, word in ((archive, on_cluster.folder, "mkdir:"), (broken, "/dev/shm", "tar:")):
        on_cluster.site(f"SITE_STAGE_ENV='{path}'\nSITE_STAGE_DIR='{folder}'\n")
        log = on_cluster.fail("srun", sbatch=ON_TWO_NODES)
        (error,) = re.findall("^error: .*", log, re.MULTILINE)
        assert "SITE_STAGE_DIR" in error and word in error, log
    assert not [*on_cluster.folder.glob("manygpus-env*")]
    on_cluster.site("SITE_STAGE_ENV=/nowhere/env.tar\n")
    refused = on_cluster.submit_py("ddp", "--dry-run")
    assert refused.returncode != 0 and "SITE_STAGE_ENV=/nowhere/env.tar" in refused.stderr
