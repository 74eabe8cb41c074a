"""submit.py: jobs by submitit, as local processes and on a real Slurm, the practice cluster.

Every test works on a copy of the checkout, so that it can have a site file of its own, and another
stage script. There is a space in its path.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import submitit
import torch
from checkout import copy_project
from cluster import RunningCluster, running_cluster
from conftest import ENVIRONMENT, rows_of

from trainkit import jobs, site, submission, world
from trainkit.errors import UserError
from trainkit.jobs import State

SMALL = ("--train-size", 600, "--epochs", 1, "--precision", "fp32", "--no-cuda")
# A stage that only tells how it was started.
FACTS = """
import json, os, signal, sys
from pathlib import Path
from trainkit import errors

def main():
    facts = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "signals": {str(n): str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGUSR2)},
    }
    Path(os.environ["TRAINKIT_JOB_DIR"], f"facts-{os.environ['RANK']}.json").write_text(json.dumps(facts))

if __name__ == "__main__":
    errors.run(main)
"""


class Checkout:
    """A copy of the checkout on a machine without Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_project(folder)
        # Some commands and no others: there may be a Slurm on the PATH of whoever runs the tests.
        self.commands = folder / "commands"
        self.commands.mkdir()
        for name in ("bash", "env", "git"):
            (self.commands / name).symlink_to(shutil.which(name))
        self.environment = {
            name: value for name, value in ENVIRONMENT.items() if not name.startswith("SBATCH_")
        }
        self.environment |= {"PATH": str(self.commands), "PYTHONPATH": str(folder)}

    def command(self, stage: str, *arguments: object) -> list[str]:
        (script,) = self.folder.glob(f"{stage}_*/submit.py")
        return [sys.executable, str(script), *map(str, arguments)]

    def submit(self, stage: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(stage, *arguments),
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def replace_stage(self, stage: str, text: str) -> None:
        (script,) = self.folder.glob(f"{stage}_*/mnist_*.py")
        script.write_text(text)

    def plant(self, stage: str, fault: str) -> None:
        """Put a line in front of the first one of a stage's main()."""
        (script,) = self.folder.glob(f"{stage}_*/mnist_*.py")
        text, first = script.read_text(), "    opts = options.parse"
        assert text.count(first) == 1
        script.write_text(text.replace(first, f"    import os, signal, sys\n    {fault}\n{first}"))

    def fake(self, command: str, script: str) -> None:
        """A command of Slurm that does what the shell script says."""
        path = self.commands / command
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def site(self, text: str) -> None:
        (self.folder / "slurm" / "site.sh").write_text(text)

    def job_folders(self) -> list[Path]:
        return sorted((self.folder / "results" / "jobs" / "submitit").glob("*"))

    def facts(self, folder: Path) -> list[dict]:
        """What the ranks of the stage `FACTS` told, in the order of their ranks."""
        return [json.loads(path.read_text()) for path in sorted(folder.glob("facts-*.json"))]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout")


# --- local processes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "name", "arguments", "world_size"),
    [("01", "single", (), 1), ("02", "dp", (), 1), ("03", "ddp", ("--gpus", 2), 2)],
)
def test_a_stage_without_slurm(
    stage: str, name: str, arguments: tuple, world_size: int, checkout: Checkout
) -> None:
    done = checkout.submit(stage, *arguments, "--wait", *SMALL)
    assert done.returncode == 0, done.stderr
    assert f"no Slurm here: running as {world_size} local process(es)" in done.stdout
    (row,) = rows_of(checkout.folder / "results")
    assert (row["stage"], row["launcher"], row["world_size"]) == (name, "submitit", world_size)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("done: results: ")
    assert last.endswith(f"{row['run_id']}.csv")


def test_the_environment_of_local_processes(checkout: Checkout) -> None:
    """What the user's shell has set for something else does not count, except the choice of GPUs."""
    checkout.replace_stage("03", FACTS)
    done = checkout.submit(
        "03", "--gpus", 2, "--wait", "--seed", 5,
        RANK="7", WORLD_SIZE="9", LOCAL_RANK="7", MASTER_ADDR="elsewhere", MASTER_PORT="1",
        CUDA_VISIBLE_DEVICES="4,6,7",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = checkout.job_folders()
    for rank, facts in enumerate(checkout.facts(folder)):
        environment = facts["environment"]
        names = (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "CUDA_VISIBLE_DEVICES",
        )
        assert [environment[name] for name in names] == [str(rank), str(rank), "2", "2", "localhost", "4,6"]
        assert 1024 < int(environment["MASTER_PORT"]) < 32768
        assert set(facts["signals"].values()) == {str(signal.SIG_DFL)}
        given = {"data": checkout.folder / "data", "results": checkout.folder / "results"}
        given["checkpoint"] = folder / "checkpoints"
        before = [word for name, place in given.items() for word in (f"--{name}-dir", str(place))]
        assert facts["arguments"] == [*before, "--resume", "auto", "--seed", "5"]


def test_without_gpus_none_is_shown(checkout: Checkout) -> None:
    checkout.replace_stage("01", FACTS)
    assert checkout.submit("01", "--gpus", 0, "--wait", CUDA_VISIBLE_DEVICES="3").returncode == 0
    (facts,) = checkout.facts(*checkout.job_folders())
    assert facts["environment"]["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("executor", "device"), [("slurm", "cuda:0"), ("local", None)])
def test_a_rank_that_sees_one_gpu(executor: str, device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job it is the rank's own (srun --gpus-per-task); two local ranks would share it."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", executor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    place = {"rank": 1, "local_rank": 1, "size": 2, "local_size": 2, "nodes": 1, "launcher": "submitit"}
    if device:
        assert str(world._device(place, use_cuda=True)) == device
    else:
        with pytest.raises(UserError, match="has no GPU of its own"):
            world._device(place, use_cuda=True)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        # Rank 0 waits for the other: for minutes, were it not ended.
        ("raise errors.UserError('planted')", "error on rank 1: planted"),
        # They have met, so rank 0 fails too, and must not be taken for the reason.
        (
            "world.join(False, 60); os.kill(os.getpid(), signal.SIGKILL)",
            "rank 1 ended without a word: killed",
        ),
    ],
    ids=["raises", "is killed"],
)
def test_the_rank_that_failed_tells_why(fault: str, error: str, checkout: Checkout) -> None:
    checkout.plant("03", f"if os.environ['RANK'] == '1': {fault}")
    done = checkout.submit("03", "--gpus", 2, "--wait", *SMALL)
    assert done.returncode == 1
    assert re.fullmatch(rf"job \d+ failed: {re.escape(error)}.*\n", done.stderr), done.stderr


def test_a_stage_that_cannot_even_start_tells_why(checkout: Checkout) -> None:
    checkout.replace_stage("01", "import nothing_of_that_name")
    done = checkout.submit("01", "--wait")
    assert done.returncode == 1
    assert "failed: ModuleNotFoundError: No module named 'nothing_of_that_name'" in done.stderr


def test_ctrl_c_ends_local_processes(checkout: Checkout) -> None:
    """By SIGTERM, which submitit's processes would survive."""
    process = subprocess.Popen(
        checkout.command("03", "--gpus", 2, "--wait", "--epochs", 999, "--no-cuda"),
        env=checkout.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    next(line for line in process.stdout if line.startswith("running: "))
    _wait_for(lambda: any("stage ddp" in log.read_text() for log in checkout.folder.rglob("*_0_log.out")))
    ours = psutil.Process(process.pid).children(recursive=True)
    assert len(ours) == 3  # submitit's controller and two ranks
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to all of them
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint == ""
    assert psutil.wait_procs(ours, timeout=60)[1] == []


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.2)


# --- a real Slurm -----------------------------------------------------------------------------------


class OnCluster(Checkout):
    """A copy of the checkout, whose submit.py runs on the login host of the practice cluster."""

    def __init__(self, folder: Path, cluster: RunningCluster) -> None:
        super().__init__(folder)
        self.cluster = cluster

    def submit(self, stage: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
        # Set behind the cluster's own settings; the commands of `fake` come before those of the cluster.
        first = f"{self.commands}:{Path(sys.executable).parent}"
        settings = {"PYTHONPATH": str(self.folder)} | environment
        command = ["bash", "-c", f'PATH={shlex.quote(first)}:$PATH exec env "$@"', "bash"]
        command += [f"{name}={value}" for name, value in settings.items()]
        return self.cluster.run([*command, *self.command(stage, *arguments)], cwd=self.folder, timeout=300)

    def job(self) -> str:
        """The number of the only job, once it is submitted."""
        (script,) = self.folder.rglob("*_submission.sh")
        return script.name.partition("_")[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster(accounting=True) as running:
        yield running


@pytest.fixture
def on_cluster(tmp_path: Path, cluster: RunningCluster) -> OnCluster:
    return OnCluster(tmp_path / "a checkout", cluster)


def test_the_environment_of_the_ranks_of_a_job(on_cluster: OnCluster) -> None:
    scratch = on_cluster.folder / "scratch space"
    on_cluster.site(
        f"SITE_SCRATCH_DIR='{scratch}'\n"
        "SITE_SRUN_ARGS=(--comment='two words')\n"
        "SITE_CONTAINER=(env 'INSIDE=a container')  # as good as one\n"
    )
    on_cluster.replace_stage("03", FACTS)
    done = on_cluster.submit(
        "03", "--gpus", 4, "--nodes", 2, "--wait", RANK="7", MASTER_ADDR="elsewhere", MASTER_PORT="1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = on_cluster.job()
    ranks = on_cluster.facts(scratch / job)
    assert len(ranks) == 4
    for rank, facts in enumerate(ranks):
        environment = facts["environment"]
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_CPUS_PER_TASK")
        assert [environment[name] for name in names] == [str(rank), str(rank % 2), "4", "2", "2"]
        assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"  # both: each process picks its own
        assert environment["INSIDE"] == "a container"
        assert environment["MASTER_PORT"] == str(10_000 + int(job) % 20_000)
        assert environment["MASTER_ADDR"] not in ("elsewhere", "localhost")
        assert set(facts["signals"].values()) == {str(signal.SIG_DFL)}


@pytest.mark.parametrize("accounting", [True, False], ids=["sacct", "no sacct"])
def test_the_rank_of_a_job_that_failed_tells_why(accounting: bool, on_cluster: OnCluster) -> None:
    """Rank 3 fails on the second node; the others would wait for it."""
    fault = "raise errors.UserError('planted') if os.environ['RANK'] == '3' else time.sleep(600)"
    on_cluster.replace_stage("03", FACTS.replace("def main():", f"def main():\n    import time\n    {fault}"))
    if not accounting:
        on_cluster.fake("sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    done = on_cluster.submit("03", "--gpus", 4, "--nodes", 2, "--wait")
    assert done.returncode == 1
    assert done.stderr == f"job {on_cluster.job()} failed: error on rank 3: planted\n"


def test_a_stopped_job_goes_back_to_the_queue_and_on(on_cluster: OnCluster) -> None:
    """The signal before the time limit is the stage's own business, whatever submitit would do at it."""
    with ThreadPoolExecutor() as background:
        arguments = ("--epochs", 4, "--train-size", 1000, "--precision", "fp32", "--no-cuda")
        waiting = background.submit(on_cluster.submit, "01", "--wait", *arguments)
        _wait_for(lambda: any("epoch 1/" in log.read_text() for log in on_cluster.folder.rglob("*_log.out")))
        job = on_cluster.job()
        on_cluster.cluster.run(["scancel", "--signal=USR2", job])
        _wait_for(lambda: "Restarts=1" in on_cluster.cluster.run(["scontrol", "show", "job", job]).stdout)
        # Slurm lets a job that came back wait for two minutes; in the same second it would be refused.
        on_cluster.cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now+3"])
        done = waiting.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("done: results: ")
    assert [row["epoch"] for row in rows_of(on_cluster.folder / "results")] == [1, 2, 3, 4]
    (log,) = on_cluster.folder.rglob(f"{job}_0_log.out")
    assert "resumed from" in log.read_text()
    assert not list(on_cluster.folder.rglob("*_result.pkl"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--partition nowhere", r"did not take the job \(.*invalid partition specified: nowhere"),
        # One of the two, by what is lacking: Slurm accepts much that it can never start.
        ("--gpus 64", r"(did not take the job .*node configuration|would never start the job \(Part)"),
    ],
)
def test_what_slurm_refuses(arguments: str, sentence: str, on_cluster: OnCluster) -> None:
    done = on_cluster.submit("03", *arguments.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"error: Slurm {sentence}.*\n", done.stderr), done.stderr
    assert not on_cluster.job_folders()
    assert str(on_cluster.folder) not in on_cluster.cluster.run(["squeue", "--format=%Z"]).stdout


def test_a_slurm_whose_daemon_is_down(on_cluster: OnCluster) -> None:
    """The same configuration, but nobody answers at the port."""
    other = on_cluster.folder / "slurm.conf"
    script = f"sed 's/^SlurmctldPort=.*/SlurmctldPort=9/' \"$SLURM_CONF\" >'{other}'"
    assert on_cluster.cluster.run(["bash", "-c", script], cwd=on_cluster.folder).returncode == 0
    done = on_cluster.submit("01", SLURM_CONF=str(other))
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: Slurm did not take the job \(.*ontact.*\): see if `sinfo` answers.*\n", done.stderr
    )


# --- what sbatch gets -------------------------------------------------------------------------------


def test_dry_run_shows_the_batch_script_and_sends_nothing(checkout: Checkout) -> None:
    checkout.fake("sbatch", "touch sent")
    checkout.fake("srun", "")
    checkout.site("export SBATCH_ACCOUNT=physics")
    done = checkout.submit(
        "03", "--gpus", 4, "--nodes", 2, "--partition", "gpu", "--time", "1:30:00", "--dry-run", "--epochs", 3
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    asked = ("nodes=2", "ntasks-per-node=2", "gpus-per-node=2", "cpus-per-task=2", "mem=8GB", "time=90")
    for option in (*asked, "partition=gpu", "job-name=mnist-ddp", "signal=USR2@60", "requeue"):
        assert f"#SBATCH --{option}" in lines
    assert f"source '{checkout.folder}/slurm/job_env.sh'" in lines
    (srun,) = [line for line in lines if line.startswith("srun ")]
    # srun does not take the job's --cpus-per-task over by itself, and submitit does not give it.
    for option in ("--cpus-per-task=2", "--kill-on-bad-exit=1", "--wait=60"):
        assert option in shlex.split(srun)
    assert '"${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" python -u -m submitit' in srun
    overruling = "SBATCH_ACCOUNT=physics SBATCH_PARTITION=gpu SBATCH_TIMELIMIT=90"
    assert lines[-1].endswith(f"overrules the lines above: {overruling}")
    assert not (checkout.folder / "results" / "jobs").exists()
    assert not list(checkout.folder.rglob("sent"))


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
    told = checkout.folder / "told"
    variables = "$SBATCH_PARTITION,$SBATCH_TIMELIMIT,$SLURM_NTASKS,$SLURM_CONF"
    checkout.fake("sbatch", f"echo {variables} >{shlex.quote(str(told))}; echo Submitted batch job 7")
    checkout.fake("srun", "")
    checkout.site("export SBATCH_PARTITION=site")
    done = checkout.submit("01", *arguments, SBATCH_PARTITION="shell", **environment)
    assert done.returncode == 0, done.stderr
    assert told.read_text().strip() == sent
    (folder,) = checkout.job_folders()
    for line in ("squeue --jobs=7", "scancel 7", f"tail -n +1 -F '{folder}/7_0_log.out'"):
        assert line in done.stdout


# --- how a job is doing -----------------------------------------------------------------------------

FORGOTTEN = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"


def _show(state: str) -> str:
    return f"echo JobId=7 JobName=x JobState={state}"


@pytest.mark.parametrize(
    ("scontrol", "sacct", "notes", "state"),
    [
        (_show("PENDING Reason=Priority"), None, {}, "queued: Priority"),
        (_show("PENDING Reason=None"), None, {}, "queued: no reason yet"),
        (_show("PENDING Reason=BeginTime Restarts=2"), None, {}, "queued: BeginTime, restart 2"),
        (_show("RUNNING"), None, {}, "running: epoch 2/3: so far"),
        (_show("COMPLETING"), None, {}, "running: epoch 2/3: so far"),
        (_show("COMPLETED"), None, {}, "done: results: somewhere"),
        (_show("TIMEOUT"), None, {"0.started": ""}, "failed: it reached its time limit"),
        (
            _show("FAILED"),
            None,
            {"0.lost": "", "1.failed": "error on rank 1: x"},
            "failed: error on rank 1: x",
        ),
        (_show("FAILED"), None, {"0.lost": "", "1.started": ""}, "failed: rank 1 ended without a word"),
        (_show("FAILED"), None, {}, "failed: srun: error: cannot start"),
        ("echo cannot reach it >&2; exit 1", None, {}, "unknown: cannot reach it"),
        (FORGOTTEN, "echo FAILED", {"1.failed": "error on rank 1: x"}, "failed: error on rank 1: x"),
        (FORGOTTEN, "echo CANCELLED by 0", {}, "failed: it was cancelled"),
        (FORGOTTEN, "echo COMPLETED", {}, "done: results: somewhere"),
        (FORGOTTEN, "echo disabled >&2; exit 1", {}, "failed: Slurm does not know this job"),
        (FORGOTTEN, None, {"0.finished": "", "1.finished": ""}, "done: results: somewhere"),
        (FORGOTTEN, None, {"0.finished": "", "1.failed": "x"}, "failed: x"),
    ],
)
def test_the_state_of_a_job(
    scontrol: str,
    sacct: str | None,
    notes: dict,
    state: str,
    checkout: Checkout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what Slurm says, with accounting and without it, and by the notes of the two ranks."""
    checkout.fake("scontrol", scontrol)
    if sacct:
        checkout.fake("sacct", sacct)
    monkeypatch.setenv("PATH", str(checkout.commands))
    job = submitit.SlurmJob(checkout.folder, "7", tasks=[0, 1])
    # A result of submitit, as a rank may leave it before its job goes back to the queue.
    submitit.core.utils.cloudpickle_dump(("success", None), job.paths.result_pickle)
    job.paths.submitted_pickle.touch()
    job.paths.stdout.write_text("epoch 1/3: so far\nepoch 2/3: so far\nresults: somewhere\n")
    job.task(1).paths.stdout.write_text("srun: error: cannot start\n")
    for name, text in notes.items():
        (checkout.folder / f"rank-{name}").write_text(text)
    now = jobs.SlurmHandle(job, checkout.folder, checkout.folder).state()
    assert f"{now.name}: {now.detail}".startswith(state)


def test_a_run_that_only_stopped_is_not_done(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.fake("scontrol", FORGOTTEN)
    monkeypatch.setenv("PATH", str(checkout.commands))
    job = submitit.SlurmJob(checkout.folder, "7")
    job.paths.submitted_pickle.touch()
    for name in ("rank-0.finished", "stopped"):
        (checkout.folder / name).touch()
    assert jobs.SlurmHandle(job, checkout.folder, checkout.folder).state().name == "failed"


def test_an_older_job_of_the_same_number_does_not_count(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers begin again at 1 with every new cluster, and a job that never ran has cleared nothing away."""
    checkout.fake("scontrol", _show("CANCELLED"))
    monkeypatch.setenv("PATH", str(checkout.commands))
    job = submitit.SlurmJob(checkout.folder, "7")
    job.paths.submitted_pickle.touch()
    note = checkout.folder / "rank-0.failed"
    note.write_text("error on rank 0: of long ago")
    os.utime(note, (1, 1))
    state = jobs.SlurmHandle(job, checkout.folder, checkout.folder).state()
    assert state == State("failed", "it was cancelled")


class Script(jobs.SlurmHandle):
    """A job whose states are known beforehand."""

    def __init__(self, *states: State | type[BaseException]) -> None:
        super().__init__(submitit.SlurmJob("/nowhere", "7"), Path("/nowhere"), Path("/nowhere"))
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


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0)


@pytest.mark.usefixtures("at_once")
def test_following_writes_every_change_into_a_log(capsys: pytest.CaptureFixture) -> None:
    assert jobs.follow(Script(WAITING, WAITING, RUNNING, WAITING, RUNNING, DONE)) == 0
    seen = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in seen] == ["queued", "running", "queued", "running", "done"]


@pytest.mark.usefixtures("at_once")
def test_following_keeps_one_line_on_a_terminal(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert jobs.follow(Script(WAITING, RUNNING, DONE)) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.usefixtures("at_once")
def test_ctrl_c_leaves_a_job_of_slurm_alone(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt):
        jobs.follow(Script(WAITING, KeyboardInterrupt))
    told = capsys.readouterr().err
    assert "job 7 goes on" in told
    assert "scancel 7" in told


@pytest.mark.usefixtures("at_once")
def test_patience_with_a_slurm_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = State("unknown", "connect failure")
    assert jobs.follow(Script(silent, silent, RUNNING, silent, DONE)) == 0
    monkeypatch.setattr(jobs, "PATIENCE_SECONDS", 0)
    with pytest.raises(UserError, match=r"Slurm does not answer \(connect failure\).*squeue --jobs=7"):
        jobs.follow(Script(silent, silent))


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "arguments", "sentence"),
    [
        ("ddp", "--gpus 3 --nodes 2", "--gpus 3 does not divide among 2 nodes: the nearest is 2 or 4"),
        ("ddp", "--gpus 1 --nodes 2", "--gpus 1 does not divide among 2 nodes: the nearest is 2"),
        ("ddp", "--gpus 2 --nodes 2", "no Slurm here .* one node, not 2"),
        ("dp", "--nodes 2", "cannot leave its node: leave out --nodes 2, or use stage 03"),
        ("single", "--gpus 2", "stage single uses 1 GPU, not 2"),
        ("ddp", "--gpus -1", "argument --gpus: -1 is too small"),
        ("ddp", "--time soon", "argument --time: 'soon' is neither HH:MM:SS nor a number of minutes"),
        ("ddp", "--time 0", "argument --time: it must be at least a minute"),
        ("ddp", "--partition", "argument --partition: expected one argument"),
        ("ddp", "--epoch 2", "unrecognized arguments: --epoch 2"),
        ("ddp", "--gpus 3", "--batch-size 64 does not divide among 3 processes"),
        ("dp", "--gpus 3", "--batch-size 64 does not divide among 3 GPUs"),
        ("ddp", "--data-dir /nowhere", "no usable MNIST in /nowhere .* python -m trainkit.data"),
        ("ddp", "--results-dir /proc/nowhere", "/proc/nowhere/runs cannot be written to"),
    ],
)
def test_a_mistake_is_told_before_anything_is_sent(
    stage: str, arguments: str, sentence: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=sentence):
        _main(stage, arguments, checkout, monkeypatch)
    assert not checkout.job_folders()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("invalid partition specified: x", r"specified: x\): give one of those that `sinfo` lists"),
        ("Requested node configuration is not available", "not available.*: ask for fewer --gpus"),
        ("Unable to contact slurm controller", "slurm controller.*: see if `sinfo` answers"),
        ("Invalid account or account/partition combination specified", "give one of"),
        ("Something else", r"Slurm did not take the job \(Something else\): see man sbatch"),
    ],
)
def test_what_sbatch_refuses(
    said: str,
    sentence: str,
    checkout: Checkout,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    checkout.fake("sbatch", f"echo 'sbatch: error: {said}' >&2; exit 1")
    checkout.fake("srun", "")
    with pytest.raises(UserError, match=sentence):
        _main("ddp", "", checkout, monkeypatch)
    assert capfd.readouterr().err == ""
    assert not checkout.job_folders()


def test_a_job_that_could_never_start_is_cancelled(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = checkout.folder / "told"
    checkout.fake("sbatch", "echo Submitted batch job 7")
    checkout.fake("srun", "")
    checkout.fake("scontrol", _show("PENDING Reason=PartitionTimeLimit"))
    checkout.fake("scancel", f"echo $1 >{shlex.quote(str(told))}")
    with pytest.raises(UserError, match=r"never start the job \(PartitionTimeLimit\), so it was cancelled"):
        _main("ddp", "", checkout, monkeypatch)
    assert told.read_text() == "7\n"
    assert not checkout.job_folders()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("if [[ ", "is not valid shell code, correct it: .*: line 2: "),
        ("exit 4", "fails, correct it: .* code 4"),
    ],
)
def test_a_site_file_that_is_not_shell_code(
    text: str, problem: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.site(text)
    with pytest.raises(UserError, match=f"slurm/site.sh {problem}"):
        _main("ddp", "", checkout, monkeypatch)


def test_a_mistake_is_one_sentence(checkout: Checkout) -> None:
    done = checkout.submit("03", "--gpus", "many")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: argument --gpus: 'many' is not a whole number. See --help.\n"


def test_the_dry_run_of_the_stage_stands_behind_two_dashes(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert _main("ddp", "--dry-run --epochs 2 -- --dry-run", checkout, monkeypatch) == 0
    told = capsys.readouterr().out
    assert told.startswith("no Slurm here: would run as 2 local process(es)")
    assert "mnist_ddp.py" in told
    assert told.endswith(" --epochs 2 --dry-run\n")


def _main(stage: str, arguments: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> int:
    """submit.py within this process."""
    monkeypatch.setattr(sys, "argv", ["submit.py", *arguments.split()])
    for module in (submission, site):
        monkeypatch.setattr(module, "REPOSITORY", checkout.folder)
    for name, value in checkout.environment.items():
        monkeypatch.setenv(name, value)
    return submission.main(stage, "")
