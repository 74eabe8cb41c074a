"""slurm/doctor.py names every planted fault: on the login node, in the facts of a job, and in real jobs."""

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkout import copy_project
from cluster import RunningCluster, running_cluster
from conftest import ENVIRONMENT

from trainkit import checkup
from trainkit.checkup import FAULT, OK, WARNING

SYNTAX_ERROR = "export SBATCH_PARTITION=gpu\nif true; do\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project to plant faults in, with the environment and the data of this one."""
    root = tmp_path / "a checkout"
    copy_project(root)
    (root / ".venv").symlink_to(sys.prefix)
    return root


@pytest.fixture
def without_slurm(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has what the doctor needs of a Linux, and no Slurm."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "env", "df", "git"):
        (programs / name).symlink_to(shutil.which(name))
    return {"PATH": str(programs)}


def here(command: list[str], env: dict | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=ENVIRONMENT | (env or {}), capture_output=True, text=True, timeout=300)


def doctor(checkout: Path, *arguments: object) -> list[str]:
    return [sys.executable, str(checkout / "slurm" / "doctor.py"), *map(str, arguments)]


def diagnose(done: subprocess.CompletedProcess) -> dict:
    """What `doctor.py --json` told; its exit code has to fit the findings."""
    told = json.loads(done.stdout)
    levels = [finding["level"] for finding in told["findings"]]
    assert done.returncode == (1 if FAULT in levels else 0), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return told


def found(told: dict, check: str, level: str) -> str:
    """The messages and fixes of a check's findings of one level, on one line each."""
    return "\n".join(
        f"{finding['message']} -> {finding['fix']}"
        for finding in told["findings"]
        if (finding["check"], finding["level"]) == (check, level)
    )


# --- the login node -------------------------------------------------------------------------------


def test_without_slurm_the_rest_is_still_looked_at(checkout: Path, without_slurm: dict) -> None:
    told = diagnose(here(doctor(checkout, "--json", "--job"), without_slurm))
    assert "there is no Slurm here: sbatch, srun" in found(told, "slurm", FAULT)
    assert "not started" in found(told, "job", FAULT)
    assert "make cluster-up" in found(told, "slurm", FAULT)
    assert {f["check"] for f in told["findings"] if f["level"] == OK} == {
        "site",
        "environment",
        "data",
        "folders",
    }
    assert set(told["findings"][0]) == {"check", "level", "message", "fix", "node", "rank"}


def test_the_report_for_people(checkout: Path, without_slurm: dict) -> None:
    """One line for the finding, one for the fix, and no colours in a file."""
    (checkout / "slurm" / "site.sh").write_text(SYNTAX_ERROR)
    done = here(doctor(checkout), without_slurm)
    lines = done.stdout.splitlines()
    assert re.match(r"fault    site         slurm/site.sh is not valid .*: line 2: syntax error", lines[0])
    assert lines[1].strip().startswith("fix: slurm/site.example.sh")
    assert lines[-1] == "2 fault(s), 0 warning(s), 0 OK"
    assert "\033" not in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize("line", ["echo $NOT_SET_ANYWHERE", "false", "exit 3", "module load cuda"])
def test_a_site_file_that_would_end_the_job(line: str, checkout: Path, without_slurm: dict) -> None:
    (checkout / "slurm" / "site.sh").write_text(f"{line}\n")
    told = diagnose(here(doctor(checkout, "--json"), without_slurm))
    assert "slurm/site.sh fails, correct it" in found(told, "site", FAULT)


def test_missing_data_and_unwritable_results(checkout: Path, without_slurm: dict) -> None:
    """Below a file, where nobody can write, not even root."""
    (checkout / "slurm" / "site.sh").write_text(
        "SITE_DATA_DIR=/nowhere\nSITE_RESULTS_DIR=/etc/passwd/results\n"
    )
    told = diagnose(here(doctor(checkout, "--json"), without_slurm))
    assert "no usable MNIST in /nowhere" in found(told, "data", FAULT)
    assert "-> get it once, on a machine with internet, with: python -m trainkit.data" in found(
        told, "data", FAULT
    )
    assert "/etc/passwd/results cannot be written to (Not a directory)" in found(told, "folders", FAULT)


def test_an_environment_without_torch(checkout: Path, without_slurm: dict) -> None:
    """As the job will have it, whatever the doctor itself runs in."""
    (checkout / "slurm" / "site.sh").write_text("activate_environment() { conda activate tutorial; }\n")
    told = diagnose(here(doctor(checkout, "--json"), without_slurm))
    assert "conda: command not found" in found(told, "environment", FAULT)


def test_a_container_of_srun_is_seen_in_the_job_only(checkout: Path, without_slurm: dict) -> None:
    (checkout / "slurm" / "site.sh").write_text("SITE_SRUN_ARGS=(--container-image=tutorial.sqsh)\n")
    told = diagnose(here(doctor(checkout, "--json"), without_slurm))
    assert "seen from inside srun's container only" in found(told, "environment", WARNING)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes", "0"], "--nodes 0 is too small, it must be 1 or more"),
        (["--gpus", "two"], "argument --gpus: invalid int value: 'two'"),
        (["--nodes", "2", "--gpus", "3"], "3 GPUs do not divide among 2 nodes"),
        (["--", "--mem", "8G"], "'8G' is not an option"),
        (["--jobs"], "unrecognized arguments: --jobs"),
    ],
)
def test_bad_options_get_one_sentence(arguments: list[str], sentence: str, checkout: Path) -> None:
    done = here(doctor(checkout, *arguments))
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_in_an_allocation_the_shape_is_given(checkout: Path) -> None:
    done = here(doctor(checkout, "--job", "--nodes", 2), {"SLURM_JOB_ID": "7"})
    assert "this shell is inside job 7, whose shape is given" in done.stderr


# --- the facts of a job, judged -------------------------------------------------------------------

HOSTS = ["n1", "n2"]


def healthy() -> checkup.Ranks:
    """What four ranks on two nodes with two GPUs each tell if all is well."""
    ranks = {}
    for rank in range(4):
        node = HOSTS[rank // 2]
        ranks[rank] = {
            "place": {"size": 4, "node": node, "nodes": 2, "gpus_on_node": 2, "visible": "0,1"},
            "cores": {"mask": 0xFF << 8 * (rank % 2), "per_task": 8},
            "memory": {"available_gb": 100, "limit_gb": 16},
            "names": {
                "master": "n1",
                "addresses": ["10.0.0.1"],
                "master_is_here": node == "n1",
                "own": node,
                "own_addresses": [f"10.0.0.{rank // 2 + 1}"],
                "wanted": None,
                "interfaces": ["lo", "eth0"],
            },
            "meeting": {"absent": [], "nodes": HOSTS, "interface": "eth0", "offset_s": 0.001},
            "torch": {"import_s": 3, "version": "2.4.0", "commit": "abc1234", "devices": 2},
            "shm": {"size_gb": 32, "free_gb": 30},
            "group": {
                "backend": "nccl",
                "network": "IB: mlx5_0:1/IB",
                "device": "H200",
                "uuid": f"{rank}",
                "free": 0.99,
            },
            "all-reduce": {"seconds": [1e-5, 2e-5, 1e-4, 1e-3, 1e-2]},
            "end": {},
        }
        if rank % 2 == 0:
            ranks[rank] |= {"folders": {}, "sharing": {"results": [], "job": []}, "data": {"images": 70_000}}
    return ranks


def test_a_healthy_job_has_nothing_but_ok() -> None:
    findings = checkup.judge(healthy(), HOSTS, num_workers=4)
    assert {finding.level for finding in findings} == {OK}
    assert len({finding.check for finding in findings}) == len(findings) == 12


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """64 MB in 10 ms: 6.7 GB/s; on 4 ranks times 2 * 3 / 4."""
    row = checkup.bandwidths(healthy())[-1]
    assert row["bytes"] == 2**26
    assert row["algorithm_gb_s"] == pytest.approx(6.7108864)
    assert row["bus_gb_s"] == pytest.approx(6.7108864 * 1.5)


def one_gpu_for_two(ranks: checkup.Ranks) -> None:
    ranks[3]["group"]["uuid"] = ranks[2]["group"]["uuid"]


def more_gpus_than_tasks(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["place"]["gpus_on_node"] = 4


def no_gpu(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["place"]["gpus_on_node"] = told["torch"]["devices"] = 0


def torch_without_cuda(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["torch"]["devices"] = 0


def gpus_per_task(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["torch"]["devices"] = 1


def gpu_in_use(ranks: checkup.Ranks) -> None:
    ranks[1]["group"]["free"] = 0.25


def one_core(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["cores"]["mask"] = 1


def cores_in_common(ranks: checkup.Ranks) -> None:
    ranks[1]["cores"]["mask"] = ranks[0]["cores"]["mask"]


def one_cpu_per_task(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["cores"]["per_task"] = 1


def little_memory(ranks: checkup.Ranks) -> None:
    ranks[0]["memory"]["limit_gb"] = ranks[1]["memory"]["limit_gb"] = 1.5


def memory_without_workers_only(ranks: checkup.Ranks) -> None:
    ranks[0]["memory"]["limit_gb"] = ranks[1]["memory"]["limit_gb"] = 3.0


def small_shm(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["shm"] = {"size_gb": 0.064, "free_gb": 0.064}


def full_shm(ranks: checkup.Ranks) -> None:
    ranks[0]["shm"] = {"error": "a tensor of 17 MB does not fit into /dev/shm"}


def unresolvable(ranks: checkup.Ranks) -> None:
    for rank in (2, 3):
        ranks[rank]["names"]["addresses"] = []


def loopback(ranks: checkup.Ranks) -> None:
    for rank in (2, 3):
        ranks[rank]["names"]["addresses"] = ["127.0.1.1"]


def own_name_is_loopback(ranks: checkup.Ranks) -> None:
    no_group(ranks)
    for rank in (0, 1):
        ranks[rank]["names"]["own_addresses"] = ["127.0.1.1"]


def another_master(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["names"]["master_is_here"] = False


def address_for_a_name(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["names"]["master"] = "10.0.0.1"


def no_such_interface(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["names"]["wanted"] = "ib0"


def firewall(ranks: checkup.Ranks) -> None:
    ranks[0]["meeting"]["absent"] = [2]
    ranks[2]["meeting"] = {"error": "n1:10007 cannot be reached (timed out)"}
    for told in ranks.values():
        del told["group"], told["all-reduce"]


def port_in_use(ranks: checkup.Ranks) -> None:
    ranks[0]["meeting"] = {"error": "port 10007 is not free on n1 (Address already in use): submit again"}


def wrong_clock(ranks: checkup.Ranks) -> None:
    for rank in (2, 3):
        ranks[rank]["meeting"]["offset_s"] = -42.0


def not_shared(ranks: checkup.Ranks) -> None:
    ranks[2]["sharing"]["results"] = ["n1"]


def read_only(ranks: checkup.Ranks) -> None:
    ranks[2]["folders"] = {"error": "/results cannot be written to (Read-only file system)"}


def no_data(ranks: checkup.Ranks) -> None:
    ranks[2]["data"] = {"error": "no usable MNIST in /data (x is missing): get it once"}


def other_torch(ranks: checkup.Ranks) -> None:
    ranks[2]["torch"]["version"] = ranks[3]["torch"]["version"] = "2.5.0"


def other_commit(ranks: checkup.Ranks) -> None:
    ranks[2]["torch"]["commit"] = ranks[3]["torch"]["commit"] = "abc1234-dirty"


def slow_disk(ranks: checkup.Ranks) -> None:
    ranks[2]["torch"]["import_s"] = 95


def wrong_sum(ranks: checkup.Ranks) -> None:
    ranks[3]["all-reduce"] = {"wrong": 7, "of": 256, "bytes": 1024}


def slow_network(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["all-reduce"]["seconds"][-1] = 2.0


def no_group(ranks: checkup.Ranks) -> None:
    for told in ranks.values():
        told["group"] = {"error": "not done after 45 s"}
        del told["all-reduce"]


def silent(ranks: checkup.Ranks) -> None:
    del ranks[3]


def killed(ranks: checkup.Ranks) -> None:
    ranks[3] = {"place": ranks[3]["place"], "shm": {"begun": True}}


@pytest.mark.parametrize(
    ("plant", "check", "level", "words"),
    [
        (one_gpu_for_two, "gpus", FAULT, "rank 3 on n2: has the same GPU as rank 2"),
        (more_gpus_than_tasks, "gpus", FAULT, "n1: 2 task(s) for 4 GPU(s)"),
        (no_gpu, "gpus", WARNING, "n1: the job has no GPU"),
        (torch_without_cuda, "gpus", WARNING, "n1: Slurm gives GPUs but PyTorch sees none"),
        (gpus_per_task, "gpus", WARNING, "n1: every task sees its own GPU only"),
        (gpu_in_use, "gpus", WARNING, "rank 1 on n1: 75% of its GPU's memory is taken"),
        (one_core, "cores", FAULT, "n1: 2 ranks share 1 core(s)"),
        (cores_in_common, "cores", WARNING, "n1: 2 ranks asked for 16 cores and run on 8"),
        (one_cpu_per_task, "cores", FAULT, "n1: 1 CPU(s) per task for the training and 4 loader workers"),
        (little_memory, "memory", FAULT, "n1: 1.5 GB for 2 rank(s)"),
        (memory_without_workers_only, "memory", WARNING, "n1: 3.0 GB for 2 rank(s), which take about 4.0 GB"),
        (small_shm, "shm", WARNING, "n1: 0.06 of 0.06 GB free in /dev/shm"),
        (full_shm, "shm", FAULT, "rank 0 on n1: a tensor of 17 MB does not fit"),
        (unresolvable, "names", FAULT, "n2: the master's name n1 cannot be resolved here"),
        (loopback, "names", FAULT, "n2: the master's name n1 is 127.0.1.1 here"),
        (own_name_is_loopback, "names", FAULT, "n1: its own name n1, by which gloo finds its network, is"),
        (another_master, "names", FAULT, "n1: rank 0 runs here, but n1 is 10.0.0.1"),
        (address_for_a_name, "names", WARNING, "n1: the name n1 is not known there"),
        (no_such_interface, "names", FAULT, "n1: there is no network interface ib0, only lo, eth0"),
        (firewall, "meeting", FAULT, "rank 2 on n2: n1:10007 cannot be reached (timed out)"),
        (firewall, "all-reduce", FAULT, "not tried"),
        (port_in_use, "meeting", FAULT, "rank 0 on n1: port 10007 is not free"),
        (wrong_clock, "clocks", WARNING, "n2: 42.0 s behind rank 0's node"),
        (not_shared, "folders", FAULT, "n2: a file that n1 wrote in the results folder is not seen here"),
        (read_only, "folders", FAULT, "rank 2 on n2: /results cannot be written to"),
        (no_data, "data", FAULT, "rank 2 on n2: no usable MNIST in /data"),
        (other_torch, "software", FAULT, "different torch on the nodes: n1 2.4.0, n2 2.5.0"),
        (other_commit, "software", FAULT, "different commits of this checkout on the nodes"),
        (slow_disk, "software", WARNING, "n2: import torch took 95 s"),
        (wrong_sum, "all-reduce", FAULT, "rank 3 on n2: 7 of 256 sums over all ranks are wrong"),
        (slow_network, "all-reduce", WARNING, "slower than gigabit Ethernet"),
        (no_group, "all-reduce", FAULT, "rank 1 on n1: not done after 45 s"),
        (silent, "ranks", FAULT, "rank 3 on n2: never reported"),
        (killed, "ranks", FAULT, "rank 3 on n2: ended without a word in its check of shm"),
    ],
)  # fmt: skip
def test_a_fault_in_the_facts(plant: Callable, check: str, level: str, words: str) -> None:
    ranks = copy.deepcopy(healthy())
    plant(ranks)
    findings = [f for f in checkup.judge(ranks, HOSTS, num_workers=4) if (f.check, f.level) == (check, level)]
    told = [
        (f"rank {f.rank} on " if f.rank is not None else "") + (f"{f.node}: " if f.node else "") + f.message
        for f in findings
    ]
    assert any(words in line for line in told), told
    assert all(finding.fix for finding in findings)


def test_facts_survive_a_torn_and_a_labelled_log() -> None:
    log = (
        "some program's words\n"
        'checkup {"rank": 0, "topic": "place", "size": 2}\n'
        '1: checkup {"rank": 1, "topic": "place", "size": 2}\n'
        'checkup {"rank": 1, "topic": "cores", "mas'
    )
    assert checkup.facts(log) == {0: {"place": {"size": 2}}, 1: {"place": {"size": 2}}}


@pytest.mark.parametrize(
    ("log", "network"),
    [
        (
            "n1:7:7 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>\n"
            "n1:7:7 [0] NCCL INFO Using network IB\n",
            "IB: mlx5_0:1/IB, mlx5_1:1/RoCE",
        ),
        (
            "n1:7:7 [0] NCCL INFO NET/IB : No device found.\n"
            "n1:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n"
            "n1:7:7 [0] NCCL INFO Using network Socket\n",
            "Socket: eth0",
        ),
        ("n1:7:7 [0] NCCL INFO Using network AWS Libfabric\n", "AWS"),
        ("n1:7:7 [0] NCCL INFO comm 0x1 rank 0 nranks 1\n", None),
    ],
)
def test_the_network_is_read_from_the_log_of_nccl(log: str, network: str | None) -> None:
    assert checkup.nccl_network(log) == network


# --- jobs on a practice cluster -------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster() as running:
        yield running


@pytest.fixture
def on_cluster(checkout: Path, cluster: RunningCluster) -> Callable[..., dict]:
    """Runs the doctor on the login host and returns what it told."""

    def run(*arguments: object) -> dict:
        return diagnose(cluster.run(doctor(checkout, "--json", *arguments)))

    return run


def left_in_queue(cluster: RunningCluster) -> str:
    """The doctor's jobs, but for those that are ending."""
    states = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
    queue = cluster.run(["squeue", "--noheader", "--format=%j %T", states]).stdout
    return "".join(line for line in queue.splitlines() if line.startswith("doctor-"))


def test_a_healthy_cluster_has_no_fault(on_cluster: Callable, checkout: Path) -> None:
    told = on_cluster("--job", "--nodes", 2, "--gpus", 4)
    assert not [finding for finding in told["findings"] if finding["level"] == FAULT]
    assert "virtual" in found(told, "gpus", WARNING)
    assert "4 on 2 node(s), all of them reported" in found(told, "ranks", OK)
    # On a busy machine it may be slower than gigabit Ethernet, which is a warning.
    sums = found(told, "all-reduce", OK) + found(told, "all-reduce", WARNING)
    assert "correct, by gloo; bus bandwidth" in sums
    assert [row["bytes"] for row in told["all_reduce"]] == [2**10, 2**14, 2**18, 2**22, 2**26]
    for row in told["all_reduce"]:
        assert row["bus_gb_s"] == pytest.approx(1.5 * row["bytes"] / row["seconds"] / 1e9)
    assert not list((checkout / "results" / "jobs").iterdir())


def test_slurm_refuses(on_cluster: Callable, checkout: Path) -> None:
    """What the site file and the options ask for, by Slurm's own word."""
    (checkout / "slurm" / "site.sh").write_text("export SBATCH_PARTITION=nowhere\n")
    told = found(on_cluster("--job"), "submission", FAULT)
    assert "Invalid partition name specified" in told
    assert "to one of: debug, practice" in told
    told = found(on_cluster("--partition", "debug", "--gpus", 64), "submission", FAULT)
    assert "64 GPUs per node, but no node has more than 2" in told


def test_a_controller_that_is_down(checkout: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    """The cluster's configuration, with a port on which nobody answers."""
    edit = 'sed "s/^SlurmctldPort=.*/SlurmctldPort=9/" "$SLURM_CONF" > "$1"'
    script = f'{edit}; export SLURM_CONF=$1; shift; exec "$@"'
    command = ["bash", "-c", script, "down", str(tmp_path / "slurm.conf"), *doctor(checkout, "--json")]
    told = diagnose(cluster.run(command))
    assert "Slurm's controller does not answer (Slurmctld(primary) at" in found(told, "slurm", FAULT)


def test_an_allocation_with_two_faults(checkout: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    """One node cannot resolve the master, and tasks have one CPU, as salloc gives by default."""
    names = cluster.run(["srun", "--nodes=2", "hostname"]).stdout.split()
    if len(set(names)) == 1:
        pytest.skip("the nodes of this cluster are one host, with one list of names")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    on_n2 = ["srun", "--nodes=1", "--nodelist=n2"]
    allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--mem=4G"]
    assert cluster.run([*on_n2, "mount", "--bind", hosts, "/etc/hosts"]).returncode == 0
    try:
        told = diagnose(cluster.run([*allocation, *doctor(checkout, "--json", "--job")]))
    finally:
        cluster.run([*on_n2, "umount", "/etc/hosts"])
    assert "the master's name n1 cannot be resolved here" in found(told, "names", FAULT)
    assert {finding["node"] for finding in told["findings"] if finding["check"] == "names"} == {"n2"}
    assert "1 CPU(s) per task for the training and 4 loader workers" in found(told, "cores", FAULT)
    assert "sbatch --cpus-per-task=5" in found(told, "cores", FAULT)
    assert "2 on 2 node(s), all of them reported" in found(told, "ranks", OK)
    assert "not all ranks met" in found(told, "all-reduce", FAULT)


def test_a_job_that_does_not_start_is_cancelled(on_cluster: Callable, cluster: RunningCluster) -> None:
    told = on_cluster("--job", "--wait", 0, "--", "--begin=now+1hour")
    assert "did not start within 0 s, Slurm's reason: BeginTime" in found(told, "job", FAULT)
    assert not left_in_queue(cluster)


def test_ctrl_c_leaves_no_job(checkout: Path, cluster: RunningCluster) -> None:
    # With `set -m` the shell lets a process in the background have Ctrl-C.
    queued = "until squeue --noheader --format=%j | grep -q ^doctor-; do sleep 0.1; done"
    script = f'set -m; "$@" & {queued}; kill -INT $!; wait $!'
    command = doctor(checkout, "--job", "--", "--begin=now+1hour")
    done = cluster.run(["bash", "-c", script, "interrupt", *command])
    assert done.returncode == 130, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not left_in_queue(cluster)
