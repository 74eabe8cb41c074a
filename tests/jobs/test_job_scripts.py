"""The job scripts, submitted to a real Slurm: the practice cluster with two nodes and virtual GPUs.

Every test works on a copy of the on_cluster, so that it can have a site file of its own, and a fault
planted in a stage script. The job scripts are always submitted as they are.
"""

import ast
import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from checkout import FOLDERS, SCRIPTS, Checkout, wait_until
from cluster import RunningCluster
from conftest import rows_of, succeeded

TORCH = tuple(map(int, version("torch").split(".")[:2]))
NODES = ("n1", "n2")
SIZES = ("--train-size", 600, "--test-size", 200)
SMALL = ("--epochs", 2, *SIZES, "--batch-size", 100, "--width", 4, "--precision", "fp32")
TWO_NODES = {
    # As users ask who count GPUs of the whole job. A step on one node cannot have that number.
    "srun": ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--gpus=2"),
    "torchrun": ("--nodes=2", "--gpus-per-node=1", "--gpus=2"),
}

# As on Debian: each node has its hostname, here another than Slurm's, at an address that means itself.
AS_ON_DEBIAN = """SITE_CONTAINER=(unshare --uts --mount bash -c '
    hostname "host-$SLURMD_NODENAME"
    hosts=$(mktemp --tmpdir="$MANYGPUS_JOB_DIR")
    cat /etc/hosts - <<<"127.0.1.1 host-$SLURMD_NODENAME" >"$hosts"
    mount --bind "$hosts" /etc/hosts
    exec "$@"' bash)
"""


@pytest.fixture
def checkouts(tmp_path: Path, cluster: RunningCluster) -> Callable[[str], Checkout]:
    return lambda name: Checkout(tmp_path / name, cluster)


@pytest.fixture
def separate_hosts(cluster: RunningCluster) -> bool:
    """Whether the nodes are hosts of their own, with names of their own."""
    return len({*cluster.run(["srun", "--nodes=2", "hostname"]).stdout.split()}) == 2


@pytest.mark.parametrize("launcher", [pytest.param("srun", marks=pytest.mark.quick), "dp"])
def test_a_job_script_as_it_is(launcher: str, on_cluster: Checkout) -> None:
    rows = on_cluster.train(launcher, *SMALL)
    ranks, stage = {"srun": (2, "ddp"), "dp": (1, "dp")}[launcher]
    assert [row["epoch"] for row in rows] == [1, 2]
    (log,) = on_cluster.folder.glob("0*/mnist-*.log")
    for row in rows:
        assert (row["stage"], row["launcher"]) == (stage, "srun")
        assert (row["world_size"], row["nodes"], row["devices"]) == (ranks, 1, ranks)
        assert log.stem.endswith(f"-{row['job_id']}")
        assert row["node_list"] in NODES
    text = log.read_text()
    expected = ("job  ", "nodes  ", "GPUs  ", "code  ", "meet at", "exit code 0")
    assert [word for word in expected if word not in text] == []
    assert f"results: {on_cluster.folder / 'results' / 'runs'}" in text


def test_a_script_of_ones_own(on_cluster: Checkout) -> None:
    """Every job script starts it in the place of its stage's, and passes the rest on."""
    own_script = """
import os, sys
from pathlib import Path
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
Path(os.environ["MANYGPUS_JOB_DIR"], f"own-{rank}").write_text(" ".join(sys.argv[-4:]))
"""
    for folder in FOLDERS.values():
        (on_cluster.folder / folder / "mine.py").write_text(own_script)
    jobs = {on_cluster.submit(launcher, "mine.py", "--width", 64): launcher for launcher in SCRIPTS}
    lost = on_cluster.submit("srun", "nowhere.py")
    for job, launcher in jobs.items():
        assert on_cluster.cluster.wait(job)["JobState"] == "COMPLETED", on_cluster.log(job)
        written = sorted((on_cluster.folder / "results" / "jobs" / str(job)).glob("own-*"))
        assert len(written) == (2 if launcher in TWO_NODES else 1)
        assert {text.read_text() for text in written} == {"--resume auto --width 64"}
    assert on_cluster.cluster.wait(lost)["JobState"] == "FAILED"
    sentence = rf"error: there is no script nowhere.py in \S.*{FOLDERS['ddp']}: correct its name."
    assert re.search(sentence, on_cluster.log(lost)), on_cluster.log(lost)


def test_two_nodes_by_every_launcher(checkouts: Callable[[str], Checkout], separate_hosts: bool) -> None:
    """Two ranks on two nodes train the same, whatever started them. On one core each has one thread.

    With --debug, of which each rank leaves a file in the folder of the job. The nodes have other hostnames
    than in Slurm, and the site its own port, where the user's shell had another.
    """
    core = min(os.sched_getaffinity(0))
    site = "export OMP_NUM_THREADS=4 MASTER_PORT=12345\nSITE_CONTAINER=()\n"
    # To torchrun's ranks PyTorch before 2.5 names the hostname of the first node, whatever --local-addr says.
    if separate_hosts and TORCH >= (2, 5):
        site += f"{AS_ON_DEBIAN}SITE_NETWORK_INTERFACE=eth0\n"
    site += f"SITE_CONTAINER+=(taskset --cpu-list {core})\n"
    losses, threads = {}, set()
    for launcher, sbatch in TWO_NODES.items():
        place = checkouts(launcher)
        place.site(site)
        rows = place.train(launcher, *SMALL, "--debug", sbatch=sbatch)
        threads |= {row["threads_per_worker"] for row in rows}
        assert {(row["world_size"], row["nodes"], row["launcher"]) for row in rows} == {(2, 2, launcher)}
        losses[launcher] = [(row["train_loss"], row["test_loss"]) for row in rows]
        job, log = rows[0]["job_id"], place.log(rows[0]["job_id"])
        assert "\nmeet at n1:12345;" in log
        for rank in (0, 1):
            assert re.search(rf"^rank {rank} on n{rank + 1}: cpu CPU: .*, gloo$", log, re.MULTILINE), log
        written = sorted(place.folder.rglob("debug-*"))
        folder = place.folder / "results" / "jobs" / job
        assert written == [folder / f"debug-rank-{rank}.txt" for rank in (0, 1)]
        assert "SLURM_LOCALID=0" in written[1].read_text()
    place = checkouts("submitit")
    place.site(site)
    succeeded(place.submit_py("ddp", "--nodes", 2, "--gpus", 2, "--wait", *SMALL))
    rows = rows_of(place.folder / "results")
    assert {(row["world_size"], row["nodes"], row["launcher"]) for row in rows} == {(2, 2, "submitit")}
    losses["submitit"] = [(row["train_loss"], row["test_loss"]) for row in rows]
    assert losses["torchrun"] == losses["srun"] == losses["submitit"]
    assert threads | {row["threads_per_worker"] for row in rows} == {1}


def test_a_rank_for_each_gpu_on_nodes_that_differ(on_cluster: Checkout) -> None:
    """Of three GPUs, one node has two, and the other one. (Seen: four ranks.)"""
    gpus = ("--nodes=2", "--gpus-per-node=0", "--gpus=3")
    (*_, row) = on_cluster.train("torchrun", *SMALL, "--batch-size", 99, sbatch=gpus)
    assert (row["world_size"], row["devices"], row["nodes"]) == (3, 3, 2)


HANGS = "SITE_CONTAINER=(bash -c '((SLURM_PROCID)) && sleep 300; exec \"$@\"' bash)\n"
APART = {
    "no such interface": (
        "SITE_NETWORK_INTERFACE=nope0\n",
        r"n\d has no network interface nope0 .*SITE_NETWORK_INTERFACE",
    ),
    "a rank is missing": (HANGS, "not all came.* rank 1 has not started"),
}


@pytest.mark.parametrize(("site", "reason"), APART.values(), ids=APART)
def test_why_the_ranks_of_a_job_cannot_meet(site: str, reason: str, on_cluster: Checkout) -> None:
    on_cluster.site(site)
    log = on_cluster.fail("srun", *SMALL, "--timeout", 10, sbatch=TWO_NODES["srun"])
    assert re.search(rf"^why .*{reason}", log, re.MULTILINE), log


def test_a_hostname_that_means_nothing_to_other_nodes(on_cluster: Checkout, separate_hosts: bool) -> None:
    if not separate_hosts:
        pytest.skip("the nodes of this cluster are one host, with one list of names")
    on_cluster.site(AS_ON_DEBIAN)
    log = on_cluster.fail("srun", *SMALL, "--timeout", 10, sbatch=TWO_NODES["srun"])
    (why,) = re.findall(r"^why .*", log, re.MULTILINE)
    assert re.search(r"host-n\d is 127\.0\.1\.1.*SITE_NETWORK_INTERFACE", why), log


def test_the_site_file_chooses_partition_and_folders(on_cluster: Checkout) -> None:
    other = on_cluster.folder.parent / "scratch"
    on_cluster.site(
        f"export SBATCH_PARTITION=debug\nSITE_SCRATCH_DIR='{other}'\nSITE_RESULTS_DIR='{other}/results'\n"
        'activate_environment() {\n    echo "activated $UNSET_VARIABLE"\n}\n'
    )
    (on_cluster.folder / FOLDERS["single"] / "mine.py").touch()
    command = ". ../slurm/site.sh && sbatch --parsable --time=5 slurm_submit.sh mine.py"
    done = succeeded(on_cluster.run("bash", "-c", command, cwd=on_cluster.folder / "01_singlegpu"))
    job = int(done.stdout)
    state = on_cluster.cluster.wait(job)
    assert (state["JobState"], state["Partition"]) == ("COMPLETED", "debug"), on_cluster.log(job)
    assert "activated" in on_cluster.log(job)
    assert (other / str(job)).is_dir()


@pytest.mark.parametrize(
    ("site", "sentence"),
    [
        ("activate_environment() { false; }\n", "activate_environment of slurm/site.sh failed"),
        (
            "SITE_CONTAINER=(no-such-container-tool exec)\n",
            "no rank could start",
        ),
        ("SITE_SCRATCH_DIR=/proc/nowhere\n", "/proc/nowhere/"),
        ("export MASTER_ADDR=login\n", "MASTER_ADDR=login of slurm/site.sh is "),
        ("SITE_SRUN_ARGS=(--gpus=9)\n", "srun starts nothing in this job (Unable to create step for job"),
        # A Python without the packages, which -S hides.
        ("SITE_CONTAINER=(bash -c 'shift 4; exec python -S \"$@\"' bash)\n", "has no "),
        (
            "SITE_CONTAINER=(env --unset=SLURM_PROCID)\n",
            "the container does not pass on the variables of Slurm",
        ),
    ],
)
def test_a_site_file_that_cannot_work(site: str, sentence: str, on_cluster: Checkout) -> None:
    on_cluster.site(site)
    log = on_cluster.fail("single", *SMALL)
    assert re.search(rf"^(error|why).*{re.escape(sentence)}", log, re.MULTILINE), log
    assert "epoch 1" not in log


def test_what_the_users_shell_has_left(on_cluster: Checkout) -> None:
    """It was started by srun, in a job of an array that had been requeued, by hand, and by torchrun."""
    on_cluster.site(
        "export SLURM_GPU_BIND=none\nactivate_environment() { export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0; }\n"
    )
    dump = "Path(os.environ['MANYGPUS_JOB_DIR'], 'environment').write_text(str(dict(os.environ)))"
    on_cluster.plant("ddp", f"from pathlib import Path; {dump}")
    left = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "SLURM_RESTART_COUNT": 2,
        "OMP_NUM_THREADS": "1,2",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "PET_NNODES": 3,
        "OMPI_COMM_WORLD_SIZE": 2,
        "PMI_SIZE": 2,
        # With the first, all ranks are on one core where Slurm binds them; srun refuses most of the others.
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_NTASKS_PER_GPU": 1,
        "SLURM_EXCLUSIVE": 1,
        "SLURM_GPUS": 1,
        "SLURM_MEM_PER_CPU": 10,
        "SLURM_DISTRIBUTION": "plane=7",
        "SLURM_TRES_BIND": "gres/gpu:per_task:1",
        "SLURM_GPU_BIND": "per_task:1",
        "SLURM_ARRAY_JOB_ID": 67000000,
        "SLURM_ARRAY_TASK_ID": 3,
        "SLURM_TIME_FORMAT": "%s",
    }
    shell = ["srun", "--ntasks=1", "env", *(f"{name}={value}" for name, value in left.items())]
    shape = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1")
    sbatch = ["sbatch", "--parsable", *shape, "slurm_submit.sh", *SMALL, "--timeout", 20]
    done = succeeded(on_cluster.run(*shell, *sbatch, cwd=on_cluster.folder / FOLDERS["ddp"]))
    job = int(done.stdout)
    assert on_cluster.cluster.wait(job)["JobState"] == "COMPLETED", on_cluster.log(job)
    assert "mnist-ddp, restart 0, " in on_cluster.log(job)
    assert {row["world_size"] for row in rows_of(on_cluster.folder / "results")} == {2}
    seen = ast.literal_eval((on_cluster.folder / "results" / "jobs" / str(job) / "environment").read_text())
    assert (seen["SLURM_GPUS_PER_NODE"], seen["SLURM_MEM_PER_NODE"]) == ("1", str(16 * 1024))  # of this job
    theirs = ("TORCHELASTIC_", "PET_", "OMPI_COMM_", "PMI_", "SLURM_NTASKS_PER_GPU", "SLURM_EX")
    theirs += ("SLURM_GPUS=", "SLURM_MEM_PER_CPU")
    assert [f"{name}=" for name in seen if f"{name}=".startswith(theirs)] == []
    assert seen["SLURM_GPU_BIND"] == "none"  # of the site file
    # Newer srun (seen: 24.11) tells the same in this variable, too.
    assert seen.get("SLURM_TRES_BIND", "gres/gpu:none") == "gres/gpu:none"
    assert "mask_cpu" not in seen.get("SLURM_CPU_BIND", "")
    assert "plane" not in seen.get("SLURM_DISTRIBUTION", "")


def test_a_job_of_an_array(on_cluster: Checkout) -> None:
    log = on_cluster.fail("single", sbatch=("--array=3",))
    assert log.startswith("error: this is a job of an array")


def test_a_time_limit_that_leaves_no_time_to_train(on_cluster: Checkout) -> None:
    """It would come back without end, and train a step each time."""
    script = on_cluster.folder / SCRIPTS["single"]
    for signal_time in (60, 120):
        script.write_text(re.sub("USR2@[0-9]+", f"USR2@{signal_time}", script.read_text()))
        log = on_cluster.fail("single", sbatch=(f"--time={signal_time // 60}",))
        assert log.startswith("error: ") and f"stop {signal_time} s before its time limit" in log, log


def test_submitted_from_another_folder(on_cluster: Checkout) -> None:
    job = on_cluster.cluster.submit(SCRIPTS["srun"], cwd=on_cluster.folder)
    assert on_cluster.cluster.wait(job)["JobState"] == "FAILED"
    assert on_cluster.log(job).strip() == "error: submit it with sbatch from its folder: cd 03_multigpu_ddp"


def test_a_rank_that_fails_ends_the_job_and_is_named(on_cluster: Checkout) -> None:
    fault = "faults.at_end_of_epoch(2, lambda: faults.fail(ValueError('planted')))"
    on_cluster.plant("ddp", f"if faults.rank() == 1: {fault}")
    log = on_cluster.fail("srun", *SMALL)
    last = log.strip().splitlines()[-4:]
    assert "error on rank 1: ValueError: planted" in "\n".join(last), log
    assert [row["epoch"] for row in rows_of(on_cluster.folder / "results")] == [1]


def test_a_cut_link_ends_the_job_within_the_timeout(on_cluster: Checkout) -> None:
    on_cluster.site("SITE_RESTARTS_IN_JOB=0\n")
    job = on_cluster.submit(
        "srun", "--epochs", 1000, *SMALL[2:], "--timeout", 10, sbatch=("--nodes=2", "--ntasks-per-node=1")
    )
    on_cluster.wait_for("epoch 1/", job)
    on_cluster.cluster.link(NODES[1], up=False)
    try:
        notes = on_cluster.folder / "results" / "jobs" / str(job)
        wait_until(lambda: len([*notes.glob("rank-*.lost")]) == 2)
    finally:
        on_cluster.cluster.link(NODES[1], up=True)
    assert on_cluster.cluster.wait(job)["JobState"] == "FAILED", on_cluster.log(job)
    assert "lost the other ranks" in on_cluster.log(job)
    assert "the ranks lost contact: the network failed" in on_cluster.log(job)
