"""slurm/doctor.py names every planted fault: on the login node, in the facts of a job, and in real jobs."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkout import copy_project
from cluster import RunningCluster
from conftest import ENVIRONMENT

from trainkit import machine
from trainkit.errors import UserError
from trainkit.jobs import checkup, checkup_job, doctor, judging, login_node, site, slurm
from trainkit.jobs.checkup import nccl_network
from trainkit.jobs.finding import FAULT, OK, WARNING, Finding, Ranks, read_facts
from trainkit.records import read_all_reduce

# For what does not come to the job's Python: it takes seconds to import torch.
NO_PYTHON = "activate_environment() { false; }\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project to plant faults in, with the environment and the data of this one."""
    root = tmp_path / "a checkout"
    copy_project(root)
    (root / ".venv").symlink_to(sys.prefix)
    return root


@pytest.fixture
def site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The slurm/site.sh that the checks within this process read, in a folder of its own."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    shutil.copy(site.REPOSITORY / "slurm" / "site_env.sh", folder)
    for module in (site, login_node):
        monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    return folder / "site.sh"


@pytest.fixture
def without_slurm(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has what the doctor needs of a Linux, and no Slurm."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "env", "df", "git", "timeout"):
        (programs / name).symlink_to(shutil.which(name))
    return {"PATH": str(programs)}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a program of Slurm out of shell code; the others are not there."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, code: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)

    return make


@pytest.fixture
def on_login_node(
    site_file: Path, without_slurm: dict[str, str], fake: Callable, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict, str], list[Finding]]:
    """What is found where the job's Python tells some facts, on a cluster whose nodes have four GPUs."""

    def check(facts: dict, cluster: str) -> list[Finding]:
        line = f"checkup {json.dumps(facts)}"
        site_file.write_text(f"SITE_CONTAINER=(bash -c 'echo \"$0\"' '{line}')\n")
        fake("sinfo", "echo 'gpu:4|64|512000'")
        fake("scontrol", f"echo 'ClusterName             = {cluster}'")
        monkeypatch.setenv("PATH", f"{site_file.parents[1]}:{without_slurm['PATH']}")
        return login_node.check_environment(site.read_site(), in_job_too=False)

    return check


def here(command: list[str], env: dict | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=ENVIRONMENT | (env or {}), capture_output=True, text=True, timeout=300)


def command(checkout: Path, *arguments: object) -> list[str]:
    return [sys.executable, str(checkout / "slurm" / "doctor.py"), *map(str, arguments)]


def diagnose(done: subprocess.CompletedProcess) -> dict:
    """What `doctor.py --json` told; its exit code has to fit the findings."""
    told = json.loads(done.stdout)
    levels = [finding["level"] for finding in told["findings"]]
    assert done.returncode == (1 if FAULT in levels else 0), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return told


def found(told: dict | list[Finding], check: str, level: str) -> str:
    """The messages and fixes of a check's findings of one level, on one line each."""
    findings = told["findings"] if isinstance(told, dict) else [finding._asdict() for finding in told]
    return "\n".join(
        f"{finding['message']} -> {finding['fix']}"
        for finding in findings
        if (finding["check"], finding["level"]) == (check, level)
    )


# --- what Slurm answers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:2", 2),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a100:2(S:0),gpu:v100:2", 4),
        ("shard:8,gpu:1", 1),
        ("(null)", 0),
    ],
)
def test_the_largest_nodes(gres: str, gpus: int, fake: Callable) -> None:
    """Of each kind the most, which may be of different nodes."""
    fake("sinfo", f"echo '{gres}|8|16000'; echo '(null)|128|2000'; echo \"$*\" >&2")
    assert slurm.largest_nodes() == {"GPUs": gpus, "CPUs": 128, "GB": 15}


def test_the_partition_that_jobs_go_to_by_default(fake: Callable) -> None:
    fake("sinfo", "echo debug; echo 'gpu*'")
    assert slurm.default_partition() == "gpu"
    fake("sinfo", "echo debug; echo slurm is down >&2; exit 1")
    assert slurm.default_partition() is None


def test_a_slurm_that_is_not_there_or_hangs(fake: Callable) -> None:
    assert slurm.ask("sinfo").returncode == 127
    assert slurm.largest_nodes() == {"GPUs": 0, "CPUs": 0, "GB": 0}
    assert slurm.job_facts("7") == {"JobState": "UNKNOWN", "Reason": "scontrol: No such file or directory"}
    fake("sinfo", "while :; do :; done")
    assert slurm.ask("sinfo", seconds=0.1).returncode == 124


def test_a_job_that_slurm_has_forgotten(fake: Callable) -> None:
    fake("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.job_facts("7") == {"JobState": "GONE"}
    fake("sacct", "echo 'CANCELLED by 0'")
    assert slurm.job_facts("7") == {"JobState": "CANCELLED"}


def test_what_sbatch_says_is_told_once() -> None:
    said = (
        "sbatch: error: invalid partition specified: x\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
        "/usr/bin/sbatch: error: Invalid partition name specified\n"
        "Try 'sbatch --help' for more information\n"
    )
    told = "invalid partition specified: x; Invalid partition name specified"
    assert slurm.told_by_sbatch(said) == told


@pytest.mark.parametrize(
    ("told", "fix"),
    [
        ("Invalid partition name specified", "to one of: debug, gpu"),
        ("Invalid account or account/partition combination specified", "SBATCH_ACCOUNT"),
        ("Job violates accounting/QOS policy (job submit limit)", "wait for other jobs of yours"),
        ("Requested node configuration is not available", "have 4 GPUs, 64 CPUs, 500 GB"),
        ("PartitionTimeLimit", "ask for less --time"),
        ("Memory specification can not be satisfied", "--mem"),
        ("Unable to contact slurm controller (connect failure)", "see if `sinfo` answers"),
        ("Something else", "man sbatch"),
    ],
)
def test_what_to_do_about_a_refusal(told: str, fix: str, fake: Callable) -> None:
    fake("sinfo", "[[ $* == *%R* ]] && echo 'gpu debug gpu' || echo 'gpu:4|64|512000'")
    assert fix in slurm.advice(told)


def test_advice_without_a_slurm_that_answers(fake: Callable) -> None:
    assert slurm.advice("invalid partition specified: x").endswith("to one of: those that `sinfo` lists")
    assert "`sinfo -o" in slurm.advice("Requested node configuration is not available")


# --- the login node -------------------------------------------------------------------------------


def test_without_slurm_the_rest_is_still_looked_at(checkout: Path, without_slurm: dict) -> None:
    told = diagnose(here(command(checkout, "--json", "--job"), without_slurm))
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
    """One line for the finding, one for the fix, and no colours in a file; from a Python without packages."""
    (checkout / "slurm" / "site.sh").write_text("export SBATCH_PARTITION=gpu\nif true; do\n")
    bare_python = f"{sys.base_prefix}/bin/python3"
    done = here([bare_python, *command(checkout)[1:]], without_slurm)
    lines = done.stdout.splitlines()
    assert re.match(r"fault    site         slurm/site.sh is not valid .*: line 2: syntax error", lines[0])
    assert lines[1].strip().startswith("fix: slurm/site.example.sh")
    assert lines[-1] == "2 fault(s), 0 warning(s), 0 OK"
    assert "\033" not in done.stdout
    assert done.returncode == 1


def test_missing_data_and_gpus_and_unwritable_results(checkout: Path, without_slurm: dict) -> None:
    """Below a file, where nobody can write, not even root; and GPUs that PyTorch does not see."""
    (checkout / "slurm" / "site.sh").write_text(
        "SITE_DATA_DIR=/nowhere\nSITE_RESULTS_DIR=/etc/passwd/results\n"
    )
    told = diagnose(here(command(checkout, "--json"), without_slurm | {"SLURM_GPUS_ON_NODE": "2"}))
    assert "Slurm gave this job 2 GPU(s)" in found(told, "gpus", WARNING)
    assert "no usable MNIST in /nowhere" in found(told, "data", FAULT)
    assert "-> get it once, on a machine with internet, with: python -m trainkit.data" in found(
        told, "data", FAULT
    )
    folders = found(told, "folders", FAULT)
    assert "results cannot be written to /etc/passwd/results (Not a directory) -> set SITE_RES" in folders
    assert "checkpoints cannot be written to /etc/passwd/results/jobs (Not a directory)" in folders


@pytest.mark.parametrize(("in_job_too", "level"), [(False, FAULT), (True, WARNING)])
def test_an_environment_without_torch(in_job_too: bool, level: str, site_file: Path) -> None:
    """As the job will have it, whatever the doctor itself runs in; a job may still find it."""
    site_file.write_text("activate_environment() { conda activate tutorial; }\n")
    told = login_node.check_environment(site.read_site(), in_job_too)
    assert "conda: command not found" in found(told, "environment", level)


SOFTWARE = {
    "version": "2.15.0+cu132",
    "build": "CUDA 13.2",
    "nccl": "NCCL 2.30.7",
    "driver": "driver 580.65.06",
}
FOR_CPU = {"version": "2.15.0+cpu", "build": "the CPU only", "nccl": ""}
FOR_ROCM = {"version": "2.15.0+rocm7.0", "build": "ROCm 7.0", "nccl": "RCCL 2.26.6", "driver": ""}


@pytest.mark.parametrize(
    ("python", "cluster", "check", "level", "words"),
    [
        ({}, "alpine", "environment", OK, "torch 2.15.0 for CUDA 13.2, NCCL 2.30.7; no GPU here, as usual"),
        (FOR_ROCM, "alpine", "environment", OK, "torch 2.15.0 for ROCm 7.0, RCCL 2.26.6; no GPU here"),
        ({"gpus": [{"name": "NVIDIA T4", "gib": 14.7}]}, "alpine", "environment", OK,
         "; 1 x NVIDIA T4, 15 GiB, driver 580.65.06 -> "),
        ({"unusable": "PyTorch cannot use the 1 GPU(s) of login (old): update."}, "alpine", "gpus", WARNING,
         "PyTorch cannot use the 1 GPU(s) of login (old) -> update."),
        (FOR_CPU, "alpine", "gpus", FAULT,
         "torch 2.15.0 for the CPU only, but nodes of this cluster have up to 4 GPUs -> install"),
        (FOR_CPU, "practice", "environment", OK, "torch 2.15.0 for the CPU only; no GPU here"),
    ],
)  # fmt: skip
def test_what_pytorch_can_do_on_the_login_node(
    python: dict, cluster: str, check: str, level: str, words: str, on_login_node: Callable
) -> None:
    """Only the practice cluster's GPUs need no PyTorch for GPUs."""
    told = on_login_node({"python": "/venv/bin/python", "gpus": []} | SOFTWARE | python, cluster)
    assert words in found(told, check, level), told
    assert [finding.level for finding in told].count(FAULT) == (level == FAULT)


def test_a_container_of_srun_is_seen_in_the_job_only(site_file: Path) -> None:
    site_file.write_text("SITE_SRUN_ARGS=(--container-image=tutorial.sqsh)\n")
    told = login_node.check_environment(site.read_site(), in_job_too=False)
    assert "seen from inside srun's container only" in found(told, "environment", WARNING)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes", "0"], "argument --nodes: 0 is too small, it must be 1"),
        (["--gpus", "two"], "argument --gpus: 'two' is not a whole number"),
        (["--nodes", "2", "--gpus", "3"], "3 GPUs do not divide among 2 nodes"),
        (["--", "--mem", "8G"], "'8G' is not an option"),
        (["--jobs"], "unrecognized arguments: --jobs"),
    ],
)
def test_bad_options_get_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor.py", *arguments])
    with pytest.raises(UserError, match=sentence):
        doctor.main()


def test_a_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"^error: the doctor needs Python 3\.10 or newer"):
        runpy.run_path(str(site.REPOSITORY / "slurm" / "doctor.py"), run_name="__main__")


def test_in_an_allocation_the_shape_is_given(checkout: Path) -> None:
    done = here(command(checkout, "--job", "--nodes", 2), {"SLURM_JOB_ID": "7"})
    assert "this shell is inside job 7, whose shape is given" in done.stderr
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)


# --- the facts of a job, judged -------------------------------------------------------------------

HOSTS = ["n1", "n2"]
ALL = range(4)
SIZES = [2**10, 2**14, 2**18, 2**22, 2**26]
SUMS = {"bytes": SIZES, "seconds": [1e-5, 2e-5, 1e-4, 1e-3, 1e-2], "device_name": "NVIDIA H200"}


def healthy() -> Ranks:
    """What four ranks on two nodes with two GPUs each tell if all is well."""
    ranks = {}
    for rank in range(4):
        node = HOSTS[rank // 2]
        ranks[rank] = {
            "place": {
                "size": 4,
                "job": "7",
                "node": node,
                "nodes": 2,
                "cluster": "alpine",
                "gpus_on_node": 2,
                "gpu_bind": "",
                "visible": "0,1",
            },
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
            "torch": {
                "import_s": 3,
                "version": "2.4.0",
                "build": "CUDA 12.1",
                "nccl": "NCCL 2.20.5",
                "driver": "driver 535.104.05",
                "commit": "abc1234",
                "devices": 2,
            },
            "shm": {"size_gb": 32, "free_gb": 30},
            "gpu": {"name": "NVIDIA H200", "gib": 140.4, "free": 0.99, "card": f"card {rank}"},
            "group": {"backend": "nccl", "network": "IB: mlx5_0:1/IB"},
            "all-reduce": SUMS,
            "end": {},
        }
        if rank % 2 == 0:
            ranks[rank] |= {
                "folders": {},
                "common-folders": {"results": [], "job": []},
                "data": {"images": 70_000},
            }
    return ranks


def test_a_healthy_job_has_nothing_but_ok() -> None:
    findings = judging.judge(healthy(), HOSTS, num_workers=4)
    assert {finding.level for finding in findings} == {OK}
    assert len({finding.check for finding in findings}) == 12
    assert len({finding[:4] for finding in findings}) == 12  # what nodes have in common is one line


def test_the_cards_of_every_kind_of_node_are_told() -> None:
    ranks = healthy()
    for rank in (2, 3):
        ranks[rank]["gpu"] |= {"name": "AMD Instinct MI210", "gib": 64}
        ranks[rank]["torch"] |= {"build": "ROCm 6.4", "nccl": "RCCL 2.22.3", "driver": ""}
    told = found(judging.judge(ranks, HOSTS, num_workers=4), "gpus", OK).splitlines()
    assert told == [
        "2 x NVIDIA H200, 140 GiB, driver 535.104.05, CUDA 12.1, NCCL 2.20.5 -> ",
        "2 x AMD Instinct MI210, 64 GiB, ROCm 6.4, RCCL 2.22.3 -> ",
    ]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """64 MB in 10 ms: 6.7 GB/s; on 4 ranks times 2 * 3 / 4."""
    row = judging.bandwidths(healthy())[-1]
    assert row["bytes"] == 2**26
    assert row["algorithm_gb_s"] == pytest.approx(6.7108864)
    assert row["bus_gb_s"] == pytest.approx(6.7108864 * 1.5)


def test_times_that_cannot_be_written_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    started = datetime(2025, 1, 31, 12, 0, 1, tzinfo=timezone.utc)
    kept = checkup_job._keep(judging.bandwidths(healthy()), tmp_path / "file" / "all_reduce", started)
    path = tmp_path / "file" / "all_reduce" / "20250131-120001-4x2.tsv"
    assert (kept.level, kept.message) == (WARNING, f"its times cannot be written to {path} (Not a directory)")
    assert kept.fix


LOOPBACK = ["127.0.1.1"]
NO_GROUP = {"group": {"error": "not done after 180 s"}, "all-reduce": None}
SAME_CARD = {"card": "card 2"}
SLICE = {"name": "NVIDIA H200 MIG 3g.71gb"} | SAME_CARD
ON_CPU = {"name": None}
OLD_DRIVER = "PyTorch cannot use the 2 GPU(s) of n1 (too old): install another"


@pytest.mark.parametrize(
    ("where", "told", "check", "level", "words"),
    [
        ([2, 3], {"gpu": SAME_CARD, "place": {"gpus_on_node": 1}}, "gpus", FAULT,
         "rank 3 on n2: has the same GPU as rank 2 -> one task per GPU"),
        ([2, 3], {"gpu": SAME_CARD, "place": {"gpu_bind": "gpu:closest"}}, "gpus", FAULT,
         "rank 3 on n2: has the same GPU as rank 2 -> leave out --gpu-bind=closest"),
        ([2, 3], {"gpu": SLICE, "torch": {"devices": 1}}, "gpus", FAULT,
         "rank 3 on n2: has a slice (MIG) of the card of rank 2: NCCL refuses"),
        ([0, 1], {"gpu": {"error": OLD_DRIVER}, "group": None, "all-reduce": None}, "gpus", FAULT,
         "rank 1 on n1: PyTorch cannot use the 2 GPU(s) of n1 (too old) -> install another"),
        (ALL, {"place": {"gpus_on_node": 4}}, "gpus", FAULT, "n1: 2 task(s) for 4 GPU(s)"),
        (ALL, {"place": {"gpus_on_node": 0}, "torch": {"devices": 0}}, "gpus", WARNING,
         "n1: the job has no GPU"),
        (ALL, {"place": {"cluster": "practice"}, "torch": {"devices": 0}, "gpu": ON_CPU}, "gpus", OK,
         "n1: 2 virtual GPU(s) of the practice cluster: the ranks train on the CPU"),
        (ALL, {"torch": {"devices": 1}, "place": {"gpu_bind": "gpu:per_task:1"}}, "gpus", WARNING,
         "n1: a task sees 1 of 2 GPUs, which stops them from copying to each other directly -> ask with"),
        (ALL, {"torch": {"devices": 1}}, "gpus", WARNING, "directly -> leave CUDA_VISIBLE_DEVICES to Slurm"),
        ([1], {"gpu": {"free": 0.25}}, "gpus", WARNING, "rank 1 on n1: 75% of its GPU's memory is taken"),
        (ALL, {"cores": {"mask": 1}}, "cores", FAULT, "n1: 2 ranks share 1 core(s)"),
        ([1], {"cores": {"mask": 0xFF}}, "cores", WARNING, "n1: 2 ranks asked for 16 cores and run on 8"),
        (ALL, {"cores": {"per_task": 1}}, "cores", FAULT,
         "n1: 1 CPU(s) per task for the training and 4 loader workers"),
        ([0, 1], {"memory": {"limit_gb": 3.0}, "gpu": ON_CPU}, "memory", WARNING,
         "n1: 3.0 GB for 2 rank(s), which take about 4.0 GB"),
        ([0, 1], {"memory": {"limit_gb": 3.0}}, "memory", FAULT,
         "n1: 3.0 GB for 2 rank(s), which take about 10.0 GB"),
        ([0, 1], {"memory": {"limit_gb": 9.0}}, "memory", WARNING, "n1: 9.0 GB for 2 rank(s)"),
        (ALL, {"shm": {"size_gb": 0.064, "free_gb": 0.064}}, "shm", WARNING,
         "n1: 0.06 of 0.06 GB free in /dev/shm"),
        ([0], {"shm": {"error": "a tensor of 17 MB does not fit"}}, "shm", FAULT,
         "rank 0 on n1: a tensor of 17 MB does not fit"),
        ([2, 3], {"names": {"addresses": []}}, "names", FAULT,
         "n2: the master's name n1 cannot be resolved here"),
        ([2, 3], {"names": {"addresses": LOOPBACK}}, "names", FAULT,
         "n2: the master's name n1 is 127.0.1.1 here"),
        (ALL, {"names": {"own_addresses": LOOPBACK}} | NO_GROUP, "names", FAULT,
         "n1: its own name n1, by which gloo finds its network, is"),
        (ALL, {"names": {"master_is_here": False}}, "names", FAULT,
         "n1: rank 0 runs here, but n1 is 10.0.0.1"),
        (ALL, {"names": {"master": "10.0.0.1"}}, "names", WARNING, "n1: the name n1 is not known there"),
        (ALL, {"names": {"wanted": "ib0"}}, "names", FAULT,
         "n1: there is no network interface ib0, only lo, eth0"),
        ([2], {"meeting": {"error": "n1:10007 cannot be reached (timed out)"}}, "meeting", FAULT,
         "rank 2 on n2: n1:10007 cannot be reached (timed out)"),
        ([0], {"meeting": {"error": "port 10007 is not free on n1 (in use): submit again"}}, "meeting", FAULT,
         "rank 0 on n1: port 10007 is not free"),
        ([0], {"meeting": {"absent": [2]}}, "meeting", FAULT, "rank 2 on n2: came too late"),
        ([2, 3], {"meeting": {"offset_s": -42.0}}, "clocks", WARNING, "n2: 42.0 s behind rank 0's node"),
        ([2], {"common-folders": {"results": ["n1"]}}, "folders", FAULT,
         "n2: a file that n1 wrote in the results folder is not seen here"),
        ([2], {"folders": {"error": "results cannot be written to /results (Read-only)"}}, "folders", FAULT,
         "rank 2 on n2: results cannot be written to /results"),
        ([2], {"data": {"error": "no usable MNIST in /data (x is missing): get it once"}}, "data", FAULT,
         "rank 2 on n2: no usable MNIST in /data"),
        ([2, 3], {"torch": {"version": "2.5.0"}}, "software", FAULT,
         "different torch on the nodes: n1 2.4.0, n2 2.5.0"),
        ([2, 3], {"torch": {"commit": "abc1234-dirty"}}, "software", FAULT,
         "different commits of this checkout on the nodes"),
        ([0, 1], {"torch": {"error": "no libnccl.so.2"}}, "software", FAULT, "rank 1 on n1: no libnccl.so.2"),
        ([2], {"torch": {"import_s": 95}}, "software", WARNING, "n2: import torch took 95 s"),
        ([3], {"all-reduce": {"wrong": 7, "of": 256, "at_bytes": 1024}}, "all-reduce", FAULT,
         "rank 3 on n2: 7 of 256 sums over all ranks are wrong"),
        (ALL, {"all-reduce": {"seconds": [1e-5, 2e-5, 1e-4, 1e-3, 2.0]}}, "all-reduce", WARNING,
         "slower than gigabit Ethernet"),
        (ALL, NO_GROUP, "all-reduce", FAULT, "rank 1 on n1: not done after 180 s"),
        (ALL, {"group": None, "all-reduce": None}, "all-reduce", FAULT, "not tried"),
        ([3], {"place": None}, "ranks", FAULT, "rank 3 on n2: never reported"),
        ([3], {"shm": {"begun": True}, "end": None}, "ranks", FAULT,
         "rank 3 on n2: ended without a word in its check of shm"),
    ],
)  # fmt: skip
def test_a_fault_in_the_facts(where: list[int], told: dict, check: str, level: str, words: str) -> None:
    """What the ranks of `where` tell instead; None for a topic about which they tell nothing."""
    ranks = healthy()
    for rank in where:
        ranks[rank] |= {topic: facts and ranks[rank][topic] | facts for topic, facts in told.items()}
        ranks[rank] = {topic: facts for topic, facts in ranks[rank].items() if facts is not None}
    ranks = {rank: facts for rank, facts in ranks.items() if "place" in facts}
    findings = [f for f in judging.judge(ranks, HOSTS, num_workers=4) if (f.check, f.level) == (check, level)]
    lines = [
        (f"rank {f.rank} on " if f.rank is not None else "")
        + (f"{f.node}: " if f.node else "")
        + f"{f.message} -> {f.fix}"
        for f in findings
    ]
    assert any(words in line for line in lines), lines
    assert level == OK or all(finding.fix for finding in findings)


def test_a_slice_alone_on_its_card_is_no_fault() -> None:
    """Slices never copy to each other directly, so there is no need to see the others."""
    ranks = healthy()
    for told in ranks.values():
        told["gpu"]["name"] = "NVIDIA H200 MIG 3g.71gb"
        told["torch"]["devices"] = 1
    assert {finding.level for finding in judging.judge(ranks, HOSTS, num_workers=4)} == {OK}


def test_a_slow_rank_has_its_time_and_a_hanging_one_an_end() -> None:
    """srun waits for all steps of the slowest rank, and the job's time limit is behind that."""
    assert min(checkup.LIMITS[step] for step in ("gpu", "group", "all-reduce")) > 60
    assert checkup.LIMITS["group"] > checkup.LIMITS["gpu"]  # the ranks may come that far apart
    (wait,) = re.findall(r"^srun .* --wait=(\d+)", checkup_job._script(), re.MULTILINE)
    told = here([sys.executable, str(site.REPOSITORY / "slurm" / "doctor.py"), "--help"]).stdout
    (minutes,) = re.findall(r"--time MIN\s.*?\(default:\s(\d+)\)", told, re.DOTALL)
    assert sum(checkup.LIMITS.values()) <= int(wait) < int(minutes) * 60


def test_ranks_that_were_killed_at_once() -> None:
    ranks = {rank: {"place": told["place"], "cores": {"begun": True}} for rank, told in healthy().items()}
    findings = judging.judge(ranks, HOSTS, num_workers=4)
    assert len([finding for finding in findings if finding.check == "ranks"]) == 4
    assert not judging.bandwidths(ranks)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that PyTorch tells of, and that computes."""
    properties = SimpleNamespace(
        name="NVIDIA H200", total_memory=140 * 2**30, pci_domain_id=0, pci_bus_id=27, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (120 * 2**30, 140 * 2**30))
    monkeypatch.setattr(machine, "try_gpu", lambda device: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # restored afterwards


def test_what_a_rank_tells_of_its_gpu(a_gpu: None) -> None:
    told = checkup._gpu()
    assert {name: told[name] for name in ("name", "gib")} == {"name": "NVIDIA H200", "gib": 140}
    assert told["free"] == pytest.approx(6 / 7)
    assert "27" in told["card"]
    assert json.dumps(told)


def test_more_ranks_than_gpus_are_told_with_their_numbers(
    a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"NUM_TASKS": "2", "NUM_NODES": "1"}
    place = {"PROCID": "1", "LOCALID": "1", "GPUS_ON_NODE": "1"}
    variables = {f"SLURM_STEP_{name}": value for name, value in step.items()}
    variables |= {f"SLURM_{name}": value for name, value in place.items()}
    for name, value in ({"MASTER_ADDR": "n1", "MASTER_PORT": "10007"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"2 processes on .*, 1 visible GPU\(s\), .* 1 given by Slurm"):
        checkup._gpu()


def test_a_step_that_hangs_is_told_and_ends_its_rank() -> None:
    program = "from trainkit.jobs import checkup; import time; checkup.LIMITS['gpu'] = 0.1; "
    program += "checkup._step('gpu', time.sleep, 200); print('went on')"
    done = here([sys.executable, "-c", program], {"SLURM_PROCID": "1"})
    told = "".join(done.stdout.splitlines()[1:])
    assert (done.returncode, done.stderr) == (0, "")
    assert told == 'checkup {"rank": 1, "topic": "gpu", "error": "not done after 0.1 s"}'


def test_what_the_login_nodes_gpus_and_software_are(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for ROCm has no version of CUDA."""
    told = checkup.seen_from_login_node()
    assert (told["version"], told["gpus"]) == (torch.__version__, [{"name": "NVIDIA H200", "gib": 140}])
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    told = checkup.software()
    assert told["build"].startswith("ROCm 6.4")
    assert told["driver"] == "" and told["nccl"].startswith("RCCL ") == torch.distributed.is_nccl_available()


def test_facts_survive_a_torn_and_a_labelled_log() -> None:
    log = (
        "some program's words\n"
        'checkup {"rank": 0, "topic": "place", "size": 2}\n'
        '1: checkup {"rank": 1, "topic": "place", "size": 2}\n'
        'checkup {"rank": 1, "topic": "cores", "mas'
    )
    assert read_facts(log) == {0: {"place": {"size": 2}}, 1: {"place": {"size": 2}}}


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
    assert nccl_network(log) == network


# --- jobs on a practice cluster -------------------------------------------------------------------


@pytest.fixture
def on_cluster(checkout: Path, cluster: RunningCluster) -> Callable[..., dict]:
    """Runs the doctor on the login host and returns what it told."""

    def run(*arguments: object) -> dict:
        return diagnose(cluster.run(command(checkout, "--json", *arguments)))

    return run


def left_in_queue(cluster: RunningCluster) -> str:
    """The doctor's jobs, but for those that are ending."""
    states = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
    queue = cluster.run(["squeue", "--noheader", "--format=%j %T", states]).stdout
    return "".join(line for line in queue.splitlines() if line.startswith("doctor-"))


def test_a_healthy_cluster_has_no_fault(on_cluster: Callable, checkout: Path) -> None:
    told = on_cluster("--job", "--nodes", 2, "--gpus", 4)
    assert not [finding for finding in told["findings"] if finding["level"] == FAULT]
    virtual, _ = (f for f in told["findings"] if (f["check"], f["level"]) == ("gpus", OK))
    readme = (site.REPOSITORY / "slurm" / "README.md").read_text()
    assert f"\nOK       gpus         n1, n2: {virtual['message']}\n" in readme
    asked = "Slurm would take the job (nothing was submitted): it would start at 20"
    assert found(told, "submission", OK).startswith(asked)
    assert "4 on 2 node(s), all of them reported" in found(told, "ranks", OK)
    # On a busy machine it may be slower than gigabit Ethernet, which is a warning.
    sums = found(told, "all-reduce", OK) + found(told, "all-reduce", WARNING)
    assert "correct, by gloo; bus bandwidth" in sums
    sizes = [row["bytes"] for row in told["all_reduce"]]
    assert 2**22 in sizes  # 4 MB; on a busy machine it may leave out larger ones
    assert sizes == list(checkup.SIZES[: len(sizes)])
    for row in told["all_reduce"]:
        assert row["bus_gb_s"] == pytest.approx(1.5 * row["bytes"] / row["seconds"] / 1e9)
    (kept,) = (checkout / "results" / "all_reduce").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-4x2\.tsv", kept.name)
    assert str(kept) in found(told, "all-reduce", OK)
    for row, shown in zip(read_all_reduce(kept), told["all_reduce"], strict=True):
        assert row["seconds"] == pytest.approx(shown["seconds"], rel=1e-5)
        assert (row["bytes"], row["ranks"], row["nodes"], row["backend"]) == (shown["bytes"], 4, 2, "gloo")
        assert row["device_name"] == machine.device_name(torch.device("cpu"))
    assert not list((checkout / "results" / "jobs").iterdir())


def test_slurm_refuses(on_cluster: Callable, checkout: Path) -> None:
    """What the site file and the options ask for, by Slurm's own word."""
    (checkout / "slurm" / "site.sh").write_text(f"{NO_PYTHON}export SBATCH_PARTITION=nowhere\n")
    told = found(on_cluster("--job"), "submission", FAULT)
    assert "Invalid partition name specified" in told
    assert "to one of: debug, practice" in told
    told = found(on_cluster("--partition", "debug", "--gpus", 64), "submission", FAULT)
    assert "64 GPUs per node, but no node has more than 2" in told


def test_a_controller_that_is_down(checkout: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    """The cluster's configuration, with a port on which nobody answers."""
    (checkout / "slurm" / "site.sh").write_text(NO_PYTHON)
    edit = 'sed "s/^SlurmctldPort=.*/SlurmctldPort=9/" "$SLURM_CONF" > "$1"'
    script = f'{edit}; export SLURM_CONF=$1; shift; exec "$@"'
    in_the_shell = ["bash", "-c", script, "down", str(tmp_path / "slurm.conf")]
    told = diagnose(cluster.run([*in_the_shell, *command(checkout, "--json")]))
    assert "Slurm's controller does not answer (Slurmctld(primary) at" in found(told, "slurm", FAULT)


def test_an_allocation_with_three_faults(checkout: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    """One node cannot resolve the master, PyTorch sees no GPU, and tasks have one CPU, as salloc gives."""
    names = cluster.run(["srun", "--nodes=2", "hostname"]).stdout.split()
    if len(set(names)) == 1:
        pytest.skip("the nodes of this cluster are one host, with one list of names")
    # A cluster of another name has real GPUs.
    (checkout / "slurm" / "site.sh").write_text("SITE_CONTAINER=(env SLURM_CLUSTER_NAME=alpine)\n")
    # The rank that is never going to come need not be waited for long.
    checkup = checkout / "trainkit" / "jobs" / "checkup.py"
    text = checkup.read_text()
    assert "MEETING_SECONDS = 20" in text
    checkup.write_text(text.replace("MEETING_SECONDS = 20", "MEETING_SECONDS = 2"))
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    on_n2 = ["srun", "--nodes=1", "--nodelist=n2"]
    allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--mem=4G"]
    assert cluster.run([*on_n2, "mount", "--bind", hosts, "/etc/hosts"]).returncode == 0
    try:
        told = diagnose(cluster.run([*allocation, *command(checkout, "--json", "--job")]))
    finally:
        cluster.run([*on_n2, "umount", "/etc/hosts"])
    assert "the master's name n1 cannot be resolved here" in found(told, "names", FAULT)
    assert {finding["node"] for finding in told["findings"] if finding["check"] == "names"} == {"n2"}
    assert "1 CPU(s) per task for the training and 4 loader workers" in found(told, "cores", FAULT)
    assert "sbatch --cpus-per-task=5" in found(told, "cores", FAULT)
    assert "2 on 2 node(s), all of them reported" in found(told, "ranks", OK)
    for node in ("n1", "n2"):
        assert f"Slurm gave this job 1 GPU(s) on {node}, but PyTorch sees none" in found(told, "gpus", FAULT)
    assert "not all ranks met" in found(told, "all-reduce", FAULT)


def test_a_job_that_does_not_start_is_cancelled(
    on_cluster: Callable, checkout: Path, cluster: RunningCluster
) -> None:
    """It is sent although its Python does not work on the login node: it may on the others."""
    (checkout / "slurm" / "site.sh").write_text(NO_PYTHON)
    told = on_cluster("--job", "--wait", 0, "--", "--begin=now+1hour")
    assert "the job's Python does not work here" in found(told, "environment", WARNING)
    assert "did not start within 0 s, Slurm's reason: BeginTime" in found(told, "job", FAULT)
    assert not left_in_queue(cluster)


def test_ctrl_c_leaves_no_job(checkout: Path, cluster: RunningCluster) -> None:
    (checkout / "slurm" / "site.sh").write_text(NO_PYTHON)
    # With `set -m` the shell lets a process in the background have Ctrl-C.
    queued = "until squeue --noheader --format=%j | grep -q ^doctor-; do sleep 0.1; done"
    script = f'set -m; "$@" & {queued}; kill -INT $!; wait $!'
    waits = command(checkout, "--job", "--", "--begin=now+1hour")
    done = cluster.run(["bash", "-c", script, "interrupt", *waits])
    assert done.returncode == 130, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not left_in_queue(cluster)
