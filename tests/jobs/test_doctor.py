"""slurm/doctor.py names every planted fault: on the login node, in the facts of a job, and in real jobs."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkout import Checkout, own_environment
from cluster import RunningCluster
from conftest import REPOSITORY, ran
from json_documents import document

from manygpus import devices as device
from manygpus.distributed import process_group
from manygpus.errors import UserError
from manygpus.jobs import site, slurm
from manygpus.jobs.doctor import checkup, checkup_torch, cli, login_node, script_imports
from manygpus.jobs.doctor.findings import FAULT, OK, WARNING, Finding, findings_in, fix_of, read_messages
from manygpus.record.records import read_all_reduce

# For what does not come to the job's Python: it takes seconds to import torch.
NO_PYTHON = "activate_environment() { false; }\n"


@pytest.fixture
def checkout(checkout: Checkout) -> Checkout:
    """With the environment of this one."""
    (checkout.folder / ".venv").symlink_to(sys.prefix)
    return checkout


@pytest.fixture
def site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The slurm/site.sh that the checks within this process read, in a folder of its own."""
    scripts = tmp_path / "manygpus" / "jobs" / "scripts"
    shutil.copytree(site.SCRIPTS, scripts)
    for module in (site, login_node):
        monkeypatch.setattr(module, "SCRIPTS", scripts)
    monkeypatch.setattr(login_node, "REPOSITORY", tmp_path)
    (tmp_path / "slurm").mkdir()
    return tmp_path / "slurm" / "site.sh"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a program of Slurm out of shell code; the others are not there."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, code: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)

    return make


@pytest.fixture
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process rank 2 of four, the first one on the second of two nodes."""

    def place(**variables: str) -> None:
        usual = {"PROCID": "2", "LOCALID": "0", "JOB_ID": "7", "CPUS_PER_TASK": "8"}
        usual |= {"STEP_NUM_TASKS": "4", "STEP_NUM_NODES": "2"}
        values = {f"SLURM_{name}": value for name, value in usual.items()}
        values |= {"SLURMD_NODENAME": "n2", "MASTER_ADDR": "n1", "MASTER_PORT": "10007"}
        for name, value in (values | variables).items():
            monkeypatch.setenv(name, value)

    place()
    return place


def command(checkout: Checkout, *arguments: object) -> list[str]:
    return [sys.executable, str(checkout.folder / "slurm" / "doctor.py"), *map(str, arguments)]


def diagnose(done: subprocess.CompletedProcess) -> dict:
    """Return the output of `doctor.py --json`; its exit code has to fit the findings."""
    report = document(done.stdout, "doctor")
    levels = [finding["level"] for finding in report["findings"]]
    assert done.returncode == (1 if FAULT in levels else 0), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return report


def found(report: dict | list[Finding], check: str, level: str) -> str:
    """The messages and fixes of a check's findings of one level, on one line each."""
    findings = report["findings"] if isinstance(report, dict) else [finding._asdict() for finding in report]
    return "\n".join(
        f"{finding['message']} -> {finding['fix']}"
        for finding in findings
        if (finding["check"], finding["level"]) == (check, level)
    )


# --- what Slurm answers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("gpu:2", 2), ("gpu:a100:2(S:0-1),gpu:v100:2", 4), ("shard:8,gpu:1", 1), ("(null)", 0)],
)
def test_the_most_gpus_of_a_node(gres: str, gpus: int, fake: Callable) -> None:
    fake("sinfo", f"echo '{gres}'; echo '(null)'")
    assert slurm.most_gpus() == gpus


def test_a_slurm_that_is_not_there_or_hangs(fake: Callable) -> None:
    assert slurm.ask("sinfo").returncode == 127
    assert (slurm.most_gpus(), slurm.default_partition()) == (0, None)
    assert slurm.job_status(["7", "8"])["8"].state == slurm.UNKNOWN
    fake("sinfo", "echo debug; echo 'gpu*'")
    assert slurm.default_partition() == "gpu"
    fake("sinfo", "while :; do :; done")
    assert slurm.ask("sinfo", seconds=0.1).returncode == 124


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("Invalid account or account/partition combination specified", "SBATCH_ACCOUNT"),
        ("Job violates accounting/QOS policy (job submit limit)", "wait for other jobs of yours"),
        ("Unable to contact slurm controller (connect failure)", "see if `sinfo` answers"),
        # Slurm 26.05, and 24.11.
        ("fatal: --gpus-per-node and --gres=gpu are mutually exclusive.", "remove SBATCH_GRES"),
        ("Invalid GRES specification (with and without type identification)", "#SBATCH --gpus-per-node"),
        ("Something else", "man sbatch"),
    ],
)
def test_what_to_do_about_a_refusal(message: str, fix: str) -> None:
    assert fix in slurm.advice(message)


# --- the login node -------------------------------------------------------------------------------


def test_a_controller_that_is_down(fake: Callable) -> None:
    fake("sbatch", "")
    fake("srun", "")
    fake("scontrol", "echo 'Slurmctld(primary) at here is DOWN'")
    assert "is DOWN" in found(login_node.check_slurm(), "slurm", FAULT)


def test_without_slurm_the_rest_is_still_looked_at(checkout: Checkout) -> None:
    checkout.site("export SBATCH_MEM_PER_GPU=2G\n")
    report = diagnose(checkout.run(*command(checkout, "--json", "--job")))
    assert "SBATCH_MEM_PER_GPU" in found(report, "site", WARNING)
    assert "sbatch is not on PATH" in found(report, "slurm", FAULT)
    assert found(report, "job", FAULT)
    assert "make cluster-up" in found(report, "slurm", FAULT)
    fine = {finding["check"] for finding in report["findings"] if finding["level"] == OK}
    assert fine == {"site", "environment", "data", "folders"}


def test_the_report_for_people(checkout: Checkout) -> None:
    """One line for the finding, and one for the fix; from a Python without packages."""
    checkout.site("export SBATCH_PARTITION=gpu\nif true; do\n")
    done = checkout.run(f"{sys.base_prefix}/bin/python3", *command(checkout)[1:], PYTHONPATH="")
    lines = done.stdout.splitlines()
    assert re.match(r"fault    site         slurm/site.sh is not valid .*: line 2: syntax error", lines[0])
    assert "fix: " in lines[1] and "slurm/site.example.sh" in lines[1]
    assert lines[-1] == "2 fault(s), 0 warning(s), 0 OK"
    assert done.returncode == 1


def test_what_a_script_of_its_own_environment_imports(checkout: Checkout) -> None:
    """Each problem is a fault; what a script may do without is none, and the script itself is not run."""
    folder = checkout.folder / "mine"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "words.py").write_text("GREETING = 'hello'")
    (folder / "package" / "train.py").write_text(
        "import os.path, nothing\nfrom nothing.of import that\nfrom .words import GREETING, PARTING\n"
        "from manygpus.training.recorder import Recorder\n"
        "try:\n    import apex\nexcept ImportError:\n    pass\nopen('it was run', 'w')\n"
    )
    own_environment(folder / "env")
    words = ("--json", "--python", "env/bin/python", "--plain", "-m", "package.train", "--lr", 1)
    report = diagnose(checkout.run(*command(checkout, *words), cwd=folder))
    python = str(folder / "env" / "bin" / "python")
    faults = found(report, "script", FAULT).splitlines()
    expected = (("line 1", f"{python}' -m pip install nothing"), ("line 3", "PARTING"),
                ("line 4", f"{python}' -m pip install --no-deps -e '{checkout.folder}'"))  # fmt: skip
    for fault, key_words in zip(faults, expected, strict=True):
        assert all(words in fault for words in key_words), faults
    assert f"{python} has no PyTorch" in found(report, "environment", FAULT)
    assert not (folder / "it was run").exists() and not found(report, "data", OK)
    script = folder / "package" / "train.py"
    script.write_text("import torch:\n")
    (message,) = read_messages(ran(python, script_imports.__file__, folder, script, "").stdout)
    (problem,) = message["script"]["problems"]
    assert problem["line"] == 1 and "invalid syntax" in problem["error"]
    main = folder / "package" / "__main__.py"
    main.write_text("from .words import GREETING\n")
    (message,) = read_messages(ran(python, script_imports.__file__, folder, main, "package").stdout)
    assert not message["script"]["problems"]
    (folder / "package" / "words.py").write_text("import os\n\nimport package.lost\n")
    (message,) = read_messages(ran(python, script_imports.__file__, folder, main, "package").stdout)
    (problem,) = message["script"]["problems"]
    fault = login_node._of_problem(problem, python, "train.py")
    assert f"line 1 of train.py, through line 3 of {folder}/package/words.py: " in fault.message
    assert "package has no such module" in fault.fix


def test_missing_data_and_unwritable_results(checkout: Checkout) -> None:
    """Below a file, where not even root can write."""
    checkout.site("SITE_DATA_DIR=/nowhere\nSITE_RESULTS_DIR=/etc/passwd/results\n")
    report = diagnose(checkout.run(*command(checkout, "--json")))
    data = found(report, "data", FAULT)
    assert "/nowhere" in data
    assert "python -m manygpus.data.datasets" in data.partition(" -> ")[2]
    folders = found(report, "folders", FAULT)
    assert re.search("results .*/etc/passwd/results .* -> .*SITE_RESULTS_DIR", folders)
    assert re.search("checkpoints .*/etc/passwd/results/jobs ", folders)


@pytest.mark.parametrize(("in_job_too", "level"), [(False, FAULT), (True, WARNING)])
def test_an_environment_without_torch(in_job_too: bool, level: str, site_file: Path) -> None:
    """The job's environment is looked at, whatever the doctor itself runs in; a job may still find it."""
    site_file.write_text("activate_environment() { conda activate tutorial; }\n")
    findings = login_node.check_environment(site.read_site(), in_job_too)
    assert "conda: command not found" in found(findings, "environment", level)


def test_packages_that_come_before_those_of_the_environment(
    site_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a loaded module leaves them (easybuild-easyblocks#2887): to make .venv once more changes nothing."""
    (tmp_path / "torch.py").write_text("from typing import deprecated_name\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    findings = login_node.check_environment(site.read_site(), in_job_too=False)
    fault = found(findings, "environment", FAULT)
    assert str(tmp_path) in fault and "unset PYTHONPATH" in fault


@pytest.mark.usefixtures("mnist_dir")
@pytest.mark.parametrize(
    ("build", "most_gpus", "check", "level", "words"),
    [
        ("CUDA 13.2", 4, "environment", OK, r"torch \S+ for CUDA 13\.2"),
        ("the CPU only", 4, "gpus", FAULT, "PyTorch is for the CPU only, but .* 4 GPUs -> install"),
        ("the CPU only", 0, "environment", OK, "for the CPU only"),  # of the practice cluster
    ],
)
def test_what_pytorch_can_do_on_the_login_node(
    build: str, most_gpus: int, check: str, level: str, words: str,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(device, "build", lambda: build)
    checkup_torch.look_from_login_node(REPOSITORY / "data", most_gpus)
    findings = findings_in(read_messages(capfd.readouterr().out))
    assert re.search(words, found(findings, check, level)), findings
    assert [finding.level for finding in findings].count(FAULT) == (level == FAULT)
    assert found(findings, "data", OK)


def test_a_container_of_srun_is_seen_in_the_job_only(site_file: Path) -> None:
    site_file.write_text("SITE_SRUN_ARGS=(--container-image=tutorial.sqsh)\n")
    findings = login_node.check_environment(site.read_site(), in_job_too=False)
    assert "container" in found(findings, "environment", WARNING)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes", "0"], "--nodes: 0 is too small"),
        (["--gpus", "two"], "--gpus: 'two'"),
        (["--nodes", "2", "--gpus", "3"], "divide evenly among 2 nodes"),
        (["--", "--mem", "8G"], "'8G' is not an option"),
        (["--jobs"], "unrecognized arguments: --jobs"),
    ],
)
def test_the_doctor_refuses_bad_options_in_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor.py", *arguments])
    with pytest.raises(UserError, match=sentence):
        cli.main.__wrapped__()


# --- what a rank finds ------------------------------------------------------------------------------


@pytest.fixture
def node(in_a_job: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A node with so much, and GPUs (of so much `free` memory) that compute."""

    def make(gpus: int = 0, free: int = 140, cores: int = 8, **env: int) -> None:
        in_a_job(**{name: str(value) for name, value in env.items()})
        place = {"pci_domain_id": 0, "pci_bus_id": 27, "pci_device_id": 0}
        gpu = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30, **place)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 140 * 2**30))
        monkeypatch.setattr(device, "try_gpu", lambda device: None)
        monkeypatch.setattr(device, "driver", lambda: "driver 535.104.05")
        monkeypatch.setattr(device, "build", lambda: "CUDA 12.1")
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # restored afterwards
        monkeypatch.setattr(checkup.os, "sched_getaffinity", lambda _: set(range(cores)))

    return make


def given(gpus: int, seen: int) -> dict[str, object]:
    return {"SLURM_GPUS_ON_NODE": gpus, "SLURM_CLUSTER_NAME": "practice", "gpus": seen}


CORES = (checkup._cores,)
GPUS = (checkup_torch.gpus, 2)  # of two tasks


@pytest.mark.parametrize(
    ("facts", "check", "level", "key_words"),
    [
        ({}, CORES, OK, "8 per rank"),
        ({"cores": 1}, CORES, FAULT, "only 1 -> give srun --cpus-per-task"),
        ({"SLURM_CPUS_PER_TASK": 16}, CORES, WARNING, "only 8"),
        ({"MASTER_ADDR": "127.0.0.1"}, (checkup._names,), OK, "127.0.0.1"),
        (given(2, 2), GPUS, OK, "2 x NVIDIA H200, 140 GiB, driver 535.104.05, CUDA 12.1"),
        (given(4, 4), GPUS, FAULT, "--ntasks-per-node=4"),
        (given(0, 0), GPUS, WARNING, "no GPU"),
        (given(2, 0), GPUS, OK, "2 virtual GPU(s)"),
        (given(2, 1), GPUS, WARNING, "1 of 2 GPUs"),
        ({"gpus": 2, "free": 35}, (checkup_torch.gpus, None), WARNING, "75%"),
    ],
)
def test_a_fault_of_a_node_is_found(
    facts: dict, check: tuple, level: str, key_words: str, node: Callable
) -> None:
    node(**facts)
    function, *arguments = check
    findings = list(function(*arguments))
    texts = [f"{finding.message} -> {finding.fix}" for finding in findings if finding.level == level]
    assert any(key_words in text for text in texts), findings
    if level == OK:
        assert not [finding for finding in findings if finding.level != OK]


def test_a_folder_that_is_not_shared(
    in_a_job: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "NOTES_SECONDS", 0)
    folders = {name: tmp_path / name for name in ("results", "job")}
    for node in ("n1", "n2"):
        in_a_job(SLURMD_NODENAME=node)
        checkup._leave_notes(folders)
    assert [finding.level for finding in checkup._look_for_notes(folders, 2)] == [OK]
    (tmp_path / "results" / ".doctor-7-n1").unlink()
    fault, _ = checkup._look_for_notes(folders, 2)
    assert fault.level == FAULT and "1 of 2 nodes" in fault.message
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="results folder"):
        checkup._leave_notes({"results": tmp_path / "file" / "results"})


@pytest.mark.parametrize(
    ("raised", "reported"),
    [
        ("UserError('no usable MNIST in /data (x is missing): get it once')",
         {"message": "no usable MNIST in /data (x is missing)", "fix": "get it once"}),
        ("ImportError('no libnccl.so.2')", {"message": "no libnccl.so.2", "fix": fix_of("software")}),
        ("RuntimeError()", {"message": "RuntimeError()"}),
    ],
)  # fmt: skip
def test_a_step_that_fails_is_told(
    raised: str, reported: dict, in_a_job: Callable, capfd: pytest.CaptureFixture
) -> None:
    def fail() -> None:
        raise eval(raised)

    assert not checkup._step("software", fail)
    _, line = read_messages(capfd.readouterr().out)
    expected = {"check": "software", "level": FAULT, "node": "n2", "rank": 2} | reported
    assert line["finding"] == line["finding"] | expected


def test_wrong_sums_of_an_all_reduce_are_a_fault(in_a_job: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    wrong = torch.arange(7)
    monkeypatch.setattr(process_group, "sum_in_place", lambda values: values.index_fill(0, wrong, -1))
    (fault,) = checkup_torch.all_reduce(1)
    assert (fault.check, fault.level) == ("all-reduce", FAULT)
    assert fault.message.startswith("7 of the sums")


def test_what_ranks_cannot_tell_of_themselves() -> None:
    """From a log that was torn, and labelled by srun: rank 1 was killed, and rank 2 never came."""

    def software(rank: int, version: str) -> dict:
        finding = {"check": "software", "level": OK, "message": f"torch {version}", "node": f"n{rank}"}
        return {"rank": rank, "finding": finding}

    lines = [{"rank": 0, "size": 3}, {"rank": 1, "begun": "data"}, software(1, "2.5"), software(0, "2.4")]
    log = "some program's words\n" + "".join(f"1: checkup {json.dumps(line)}\n" for line in lines)
    log += 'checkup {"rank": 0, "ended": true}\ncheckup {"rank": 1, "end'
    judged = cli.findings_of_ranks(list(read_messages(log)), Path("x.log"))
    killed, silent = found(judged, "ranks", FAULT).splitlines()
    assert "rank 1 was killed" in killed and "data" in killed and "--mem=32G" in killed
    assert "rank 2 never reported" in silent and "see x.log" in silent
    assert "not the same on every node" in found(judged, "software", FAULT)
    assert [finding.node for finding in judged if finding.level == OK] == ["n0", "n1"]


def test_a_slow_rank_has_its_time_and_a_hanging_one_an_end(checkout: Checkout) -> None:
    """srun waits for all steps of the slowest rank, and the job's time limit is behind that."""
    assert checkup.STEP_SECONDS > 60
    (wait,) = re.findall(r"^srun .* --wait=(\d+)", cli.JOB_SCRIPT.read_text(), re.MULTILINE)
    help_text = checkout.run(*command(checkout, "--help")).stdout
    (minutes,) = re.findall(r"--time MIN\s.*?\(default:\s+(\d+)", help_text, re.DOTALL)
    assert 2 * checkup.STEP_SECONDS <= int(wait) < int(minutes) * 60


def test_a_step_that_hangs_is_told_and_ends_its_rank(checkout: Checkout) -> None:
    program = "from manygpus.jobs.doctor import checkup; import time; checkup.STEP_SECONDS = 0.1; "
    program += "checkup._step('gpus', time.sleep, 200); print('went on')"
    done = checkout.run(sys.executable, "-c", program, SLURM_PROCID="1", SLURM_LOCALID="1")
    begun, failure, ended = read_messages(done.stdout)
    assert (done.returncode, done.stderr, begun["begun"], ended["ended"]) == (0, "", "gpus", True)
    assert (failure["finding"]["message"], failure["finding"]["rank"]) == ("not finished after 0.1 s", 1)


# --- jobs on a practice cluster -------------------------------------------------------------------


@pytest.fixture
def on_cluster(checkout: Checkout, cluster: RunningCluster) -> Callable[..., dict]:
    """Run the doctor on the login host and return its output."""

    def run(*arguments: object) -> dict:
        return diagnose(cluster.run(command(checkout, "--json", *arguments)))

    return run


def left_in_queue(cluster: RunningCluster) -> str:
    """The doctor's jobs, but for those that are ending."""
    states = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
    queue = cluster.run(["squeue", "--noheader", "--format=%j %T", states]).stdout
    return "".join(line for line in queue.splitlines() if line.startswith("doctor-"))


def test_a_healthy_cluster_has_no_fault(on_cluster: Callable, checkout: Checkout) -> None:
    """Nor has the environment of a script, in which the ranks find PyTorch and no package of the kit."""
    script = checkout.folder / "train.py"
    script.write_text("import torch\nprint('it was run')\n")
    python = own_environment(checkout.folder / "env", with_torch=True)
    report = on_cluster("--job", "--nodes", 2, "--gpus", 4, "--python", python, "--plain", script)
    assert f"for the script: {python}, torch " in found(report, "environment", OK) and found(
        report, "script", OK
    )
    assert not [finding for finding in report["findings"] if finding["level"] == FAULT]
    virtual, _ = (f for f in report["findings"] if (f["check"], f["level"]) == ("gpus", OK))
    assert (
        found(report, "group", OK) == "all ranks met at n1, with gloo -> \nall ranks met at n1, with gloo -> "
    )
    readme = (REPOSITORY / "slurm" / "SITE.md").read_text()
    assert f"\nOK       gpus         n1, n2: {virtual['message']}\n" in readme
    asked = "Slurm would accept the job (nothing was submitted): it would start at 20"
    assert found(report, "submission", OK).startswith(asked)
    assert "4 ranks reported" in found(report, "ranks", OK)
    # On a busy machine it may be slower than gigabit Ethernet, which is a warning.
    sums = found(report, "all-reduce", OK) + found(report, "all-reduce", WARNING)
    assert re.search("correct; bus bandwidth .* (this says nothing about GPUs|slower than gigabit)", sums)
    sizes = [row["bytes"] for row in report["all_reduce"]]
    assert 2**22 in sizes  # 4 MB; on a busy machine it may leave out larger ones
    assert sizes == list(checkup_torch.SIZES_BYTES[: len(sizes)])
    for row in report["all_reduce"]:
        assert row["bus_gb_s"] == pytest.approx(1.5 * row["bytes"] / row["seconds"] / 1e9)
    (kept,) = (checkout.folder / "results" / "all_reduce").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-4x2\.tsv", kept.name)
    assert str(kept) in found(report, "all-reduce", OK)
    for row, shown in zip(read_all_reduce(kept), report["all_reduce"], strict=True):
        assert row["seconds"] == pytest.approx(shown["seconds"], rel=1e-5)
        assert (row["bytes"], row["ranks"], row["nodes"], row["backend"]) == (shown["bytes"], 4, 2, "gloo")
        assert row["device_name"] == device.device_name(torch.device("cpu"))
    assert not list((checkout.folder / "results" / "jobs").iterdir())


def test_a_job_that_slurm_refuses_is_a_fault(on_cluster: Callable, checkout: Checkout) -> None:
    """What the site file and the options ask for, by Slurm's own word."""
    checkout.site(f"{NO_PYTHON}export SBATCH_PARTITION=nowhere\n")
    fault = found(on_cluster("--job"), "submission", FAULT)
    assert "Invalid partition name specified" in fault
    assert "SBATCH_PARTITION" in fault.partition(" -> ")[2]
    fault = found(on_cluster("--gpus", 64, "--", "--partition=debug"), "submission", FAULT)
    assert "fewer --gpus" in fault.partition(" -> ")[2]
    checkout.site(NO_PYTHON)
    script = checkout.folder / "03_multigpu_ddp" / "slurm_submit.sh"
    script.write_text(script.read_text().replace("--gpus-per-node=2", "--gpus-per-node=64"))
    report = on_cluster()
    assert found(report, "submission", OK)
    assert "job script of stage 03" in found(report, "submission", WARNING)


def test_data_that_only_the_login_node_sees(
    on_cluster: Callable, checkout: Checkout, cluster: RunningCluster
) -> None:
    """To get them once more would change nothing."""
    if cluster.run(["hostname"]).stdout != "login\n":
        pytest.skip("the nodes of this cluster are one host, and share all folders")
    of_login = f"/dev/shm/{checkout.folder.parent.name}"
    cluster.run(["cp", "--recursive", "--dereference", checkout.folder / "data", of_login])
    try:
        checkout.site(f"SITE_DATA_DIR={of_login}\n")
        report = on_cluster("--job")
    finally:
        cluster.run(["rm", "--recursive", of_login])
    fix = found(report, "data", FAULT).partition(" -> ")[2]
    assert "SITE_DATA_DIR" in fix and "manygpus.data.datasets" not in fix


@pytest.mark.parametrize(
    ("names_on_n2", "fault"),
    [
        ("127.0.0.1 localhost\n", "the master's name n1 cannot be resolved on n2"),
        ("127.0.1.1 n1\n", "the master's name means n2 itself on n2 (n1 is 127.0.1.1)"),
    ],
)
def test_a_job_with_three_faults(
    names_on_n2: str, fault: str, checkout: Checkout, cluster: RunningCluster, tmp_path: Path
) -> None:
    """One node does not know the master's name, PyTorch sees no GPU, and tasks have one CPU."""
    names = cluster.run(["srun", "--nodes=2", "hostname"]).stdout.split()
    if len(set(names)) == 1:
        pytest.skip("the nodes of this cluster are one host, with one list of names")
    # A cluster of another name has real GPUs.
    checkout.site("SITE_CONTAINER=(env SLURM_CLUSTER_NAME=alpine)\n")
    hosts = tmp_path / "hosts"
    hosts.write_text(names_on_n2)
    on_n2 = ["srun", "--nodes=1", "--nodelist=n2"]
    shape = ("--nodes", 2, "--gpus", 2, "--", "--cpus-per-task=1")
    assert cluster.run([*on_n2, "mount", "--bind", hosts, "/etc/hosts"]).returncode == 0
    try:
        report = diagnose(cluster.run(command(checkout, "--json", "--job", *shape)))
    finally:
        cluster.run([*on_n2, "umount", "/etc/hosts"])
    assert fault in found(report, "names", FAULT)
    assert [f["node"] for f in report["findings"] if (f["check"], f["level"]) == ("names", FAULT)] == ["n2"]
    assert "2 ranks reported" in found(report, "ranks", OK)
    for node in ("n1", "n2"):
        assert f"PyTorch cannot use the 1 GPU(s) of {node}" in found(report, "gpus", FAULT)
    assert not report["all_reduce"]


def test_a_job_that_does_not_start_is_cancelled(
    on_cluster: Callable, checkout: Checkout, cluster: RunningCluster
) -> None:
    """It is sent although its Python does not work on the login node: it may on the others."""
    checkout.site(NO_PYTHON)
    report = on_cluster("--job", "--wait", 0, "--", "--begin=now+1hour")
    assert found(report, "environment", WARNING)
    assert "BeginTime" in found(report, "job", FAULT)
    assert not left_in_queue(cluster)


def test_ctrl_c_leaves_no_job(checkout: Checkout, cluster: RunningCluster) -> None:
    checkout.site(NO_PYTHON)
    # With `set -m` the shell lets a process in the background have Ctrl-C.
    queued = "until squeue --noheader --format=%j | grep -q ^doctor-; do sleep 0.1; done"
    script = f'set -m; "$@" & {queued}; kill -INT $!; wait $!'
    waits = command(checkout, "--job", "--", "--begin=now+1hour")
    done = cluster.run(["bash", "-c", script, "interrupt", *waits])
    assert done.returncode == 130, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not left_in_queue(cluster)
