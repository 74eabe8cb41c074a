"""How a job begins, decided from what Slurm says of it and from the variables of its shell.

What Slurm says was recorded on the practice cluster, by three releases.
"""

import re
import subprocess
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ran

from manygpus import job_folder
from manygpus.errors import UserError
from manygpus.job_folder import Script
from manygpus.jobs import slurm
from manygpus.jobs.inside import start_plan
from manygpus.jobs.inside.start_plan import JobStart, StartPlan
from manygpus.jobs.stages import JOB_ENV
from manygpus.jobs.user_program import Program
from manygpus.monitor import samples

RECORDED = Path(__file__).parent / "scontrol"
RELEASES = ("22.05", "24.11", "26.05")
NOW = datetime(2026, 11, 26, 18, 0, tzinfo=timezone.utc)
NAMES = {"n1": "10.0.0.1", "10.0.0.7": "10.0.0.7", "fast": "10.1.0.1", "login": "10.0.0.9"}
VARIABLES = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "mnist-ddp",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_CPUS_PER_TASK": "2",
    "SITE_PORTS": "10000-29999",
}
PROGRAM = Program(Path("/home/me/train.py"))
JOB = JobStart(
    variables=VARIABLES,
    first_node="n1",
    first_node_record="NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=n1",
    addresses=("10.0.0.1", "10.1.0.1"),
)
# What is left of a shell within another job.
LEFT = {
    "SLURM_GPUS": "1",
    "SLURM_GPUS_PER_NODE": "2",
    "SLURM_MEM_PER_NODE": "16384",
    "SLURM_MEM_PER_GPU": "1024",
    "SLURM_CPUS_PER_GPU": "3",
    "SLURM_NTASKS_PER_GPU": "1",
    "SLURM_TRES_BIND": "gres/gpu:per_task:1",
    "SLURM_DISTRIBUTION": "plane=7",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_EXPORT_ENV": "NONE",
    "SRUN_CPUS_PER_TASK": "9",
}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """A release of Slurm."""
    return request.param


def record(release: str, situation: str) -> str:
    return (RECORDED / release / f"{situation}.txt").read_text()


def decide(job: JobStart = JOB, /, **variables: str) -> StartPlan:
    job = replace(job, variables={**job.variables, **variables})
    return start_plan.decide(job, NAMES.get, NOW)


def refusal(job: JobStart = JOB, /, **variables: str) -> str:
    with pytest.raises(UserError) as refused:
        decide(job, **variables)
    return str(refused.value)


def test_a_job_of_one_node(release: str) -> None:
    job = replace(
        JOB,
        record=record(release, "ended_well"),
        gpu_names="NVIDIA A100\nNVIDIA A100\n",
        version="1a2b3c",
        repository="/home/me/kit",
        folder=Path("/jobs/7"),
    )
    plan = decide(job)
    assert plan.exports == {"OMP_NUM_THREADS": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "10007"}
    assert not plan.assigns and plan.unset == ["SLURM_RESTART_COUNT"]
    assert plan.header == [
        "job     7 mnist-ddp, restart 0, 2026-11-26T18:00:00+0000",
        "nodes   n[1-2], tasks per node 2(x2), CPUs per task 2",
        "GPUs    2 on n1: 2 NVIDIA A100",
        "code    1a2b3c in /home/me/kit",
        "meet at n1:10007; checkpoints and notes in /jobs/7",
    ]
    assert plan.asked == (2, 2, 0, True)
    assert not decide(job, SLURM_CLUSTER_NAME="practice").asked.exclusive_helps
    assert "no nvidia-smi" in decide().header[2] and "not a git checkout" in decide().header[3]


def test_what_the_job_runs_and_the_code_of_it() -> None:
    """The commit of the kit is in the log already; a script elsewhere has its own, or is in no repository."""
    kit = "/home/me/kit"
    script = Script("/home/me/work/train.py", ["--name", "a b", "x\ny"], "1a2b3c-dirty", "/home/me/work")
    assert start_plan.script_lines(script, kit) == [
        "script  /home/me/work/train.py --name 'a b' 'x\\ny'",
        "code    1a2b3c with changes in /home/me/work",
    ]
    assert start_plan.script_lines(Script("/home/me/train.py", []), kit) == [
        "script  /home/me/train.py",
        "code    not a git checkout in /home/me",
    ]
    for repository in ("", kit):
        of_the_kit = Script(f"{kit}/03_multigpu_ddp/mnist_ddp.py", [], "c93d982", repository)
        assert len(start_plan.script_lines(of_the_kit, kit)) == 1
    nested = Script(f"{kit}/mine/train.py", [], "1a2b3c", f"{kit}/mine")
    assert start_plan.script_lines(nested, kit)[1:] == [f"code    1a2b3c in {kit}/mine"]


def test_slurm_still_names_its_fields_so(release: str) -> None:
    """Without a word nothing would be checked, or all options would count as another job's."""
    asked = slurm.fields(record(release, "ended_well")).keys()
    assert {"Restarts", "TimeLimit", "RunTime", "MinMemoryNode", "TresPerNode"} <= asked
    assert {"TresPerJob", "CpusPerTres", "MemPerTres", "NtasksPerTRES", "TresBind"} <= slurm.fields(
        record(release, "gpus_in_all")
    ).keys()
    assert "ArrayTaskId" in slurm.fields(record(release, "array"))
    # This one job_env.sh itself reads.
    script = JOB_ENV.read_text()
    assert set(re.findall(r'\$facts (?:==|!=|=~) [*"\\]*\ (\w+)=', script)) == {"Reason"} <= asked


def test_options_of_another_job_are_left_out(release: str) -> None:
    job = replace(JOB, record=record(release, "ended_well"), set_aside=LEFT)
    plan = decide(job)
    of_the_job = {"SLURM_GPUS_PER_NODE": "2", "SLURM_MEM_PER_NODE": "16384", "SLURM_DISTRIBUTION": "plane=7"}
    assert plan.exports.items() >= of_the_job.items()
    assert {*plan.unset} - {"SLURM_RESTART_COUNT"} == {*LEFT} - {*of_the_job}
    assert plan.asked.mb_per_node == 16384
    # No record tells of a distribution, but srun has started the shell that has sent this job.
    within_a_step = replace(job, set_aside=LEFT | {"SLURM_STEP_NODELIST": "n2"})
    assert {"SLURM_DISTRIBUTION", "SLURM_STEP_NODELIST"} <= {*decide(within_a_step).unset}


def test_options_that_count_by_the_gpu(release: str) -> None:
    plan = decide(replace(JOB, record=record(release, "gpus_in_all"), set_aside=LEFT))
    of_the_job = ("SLURM_MEM_PER_GPU", "SLURM_CPUS_PER_GPU", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_BIND")
    assert {*of_the_job} <= plan.exports.keys()
    assert {"SLURM_MEM_PER_NODE", "SLURM_GPUS_PER_NODE"} <= {*plan.unset}
    assert plan.asked.mb_per_node == 0


@pytest.mark.parametrize("printed", ["", "words of a wrapper\n"])
def test_slurm_gives_no_record(printed: str) -> None:
    """Then its options count as this job's, but for those that are srun's alone."""
    plan = decide(replace(JOB, record=printed, set_aside=LEFT), SLURM_RESTART_COUNT="2")
    srun = {"SLURM_CPU_BIND", "SLURM_EXPORT_ENV", "SRUN_CPUS_PER_TASK"}
    assert {*plan.unset} == srun
    assert ", restart 2, " in plan.header[0]


def test_what_a_launcher_has_left() -> None:
    names = ("PATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "TORCHELASTIC_RUN_ID", "FRANK")
    unset = decide(replace(JOB, exported=names)).unset
    assert [name for name in names if name not in unset] == ["PATH", "FRANK"]


def test_which_start_it_is(release: str) -> None:
    """A job that is sent by another has the other's number in its environment."""
    first = decide(replace(JOB, record=record(release, "ended_well")), SLURM_RESTART_COUNT="2")
    assert "SLURM_RESTART_COUNT" in first.unset and ", restart 0, " in first.header[0]
    second = decide(replace(JOB, record=record(release, "requeued")))
    assert second.exports["SLURM_RESTART_COUNT"] == "1" and ", restart 1, " in second.header[0]


def test_a_job_of_an_array(release: str) -> None:
    job = replace(JOB, record=record(release, "array"))
    assert "array" in refusal(job)
    decide(replace(job, program=PROGRAM))


@pytest.mark.parametrize(
    ("limit", "ran", "signal", "trains"),
    [
        ("00:30:00", "00:00:01", "60", True),
        ("00:01:00", "00:00:01", "60", False),
        ("00:02:00", "00:00:59", "60", True),
        ("00:02:00", "00:01:00", "60", False),
        ("1-00:00:00", "00:00:00", "86399", True),
        ("00:01:00", "00:00:01", "", True),
        ("UNLIMITED", "00:00:01", "60", True),
    ],
)
def test_a_limit_that_leaves_no_time_to_train(limit: str, ran: str, signal: str, trains: bool) -> None:
    """It would come back without end, and train a step each time."""
    lines = f"#SBATCH --signal=USR2@{signal}          # a minute\n" if signal else ""
    job = replace(JOB, record=f"JobId=7 RunTime={ran} TimeLimit={limit} CPUs/Task=2 ", signal_lines=lines)
    if trains:
        decide(job)
    else:
        assert f"{signal} s before its time limit" in refusal(job)
    decide(replace(job, program=PROGRAM))


@pytest.mark.parametrize(
    ("asked", "on_node", "nodes", "per_node"),
    [("4", "2", "2", "2"), ("a100:2", "2", "1", "2"), ("3", "2", "2", None)],
)
def test_a_number_of_gpus_for_the_whole_job(asked: str, on_node: str, nodes: str, per_node: str) -> None:
    """It would be that of each step, also of one that is on one node."""
    job = replace(JOB, set_aside={"SLURM_GPUS": asked})
    plan = decide(job, SLURM_GPUS_ON_NODE=on_node, SLURM_JOB_NUM_NODES=nodes)
    assert plan.exports.get("SLURM_GPUS_PER_NODE") == per_node
    assert ("SLURM_GPUS" in plan.unset, "SLURM_GPUS" in plan.exports) == (bool(per_node), not per_node)


@pytest.mark.parametrize(
    ("cpus", "tasks", "count", "share"),
    [
        ("4", "2", "2", "2"),
        ("4(x2),2", "2(x2),1", "5", "1"),
        ("8(x2)", "3(x2)", "6", "2"),
        ("1", "2", "2", "1"),
        ("6", "2", "", "6"),  # without a number of tasks
    ],
)
def test_without_cpus_per_task_a_task_has_its_share(cpus: str, tasks: str, count: str, share: str) -> None:
    uneven = {"SLURM_JOB_CPUS_PER_NODE": cpus, "SLURM_TASKS_PER_NODE": tasks, "SLURM_NTASKS": count}
    plan = decide(JOB, **uneven, SLURM_CPUS_PER_TASK="")
    assert plan.assigns == {"SLURM_CPUS_PER_TASK": share}
    assert plan.exports["OMP_NUM_THREADS"] == share


def test_another_jobs_cpus_per_task(release: str) -> None:
    """srun gets the number by the launch line, and not by the environment beside --cpus-per-gpu."""
    plan = decide(replace(JOB, record=record(release, "rank_failed")), SLURM_CPUS_PER_TASK="3")
    assert plan.assigns == {"SLURM_CPUS_PER_TASK": "2"} and "SLURM_CPUS_PER_TASK" in plan.unset
    plan = decide(replace(JOB, record=record(release, "ended_well")), SLURM_CPUS_PER_TASK="2")
    assert not plan.assigns


def test_threads() -> None:
    assert decide(JOB, OMP_NUM_THREADS="3,2").exports["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS is 'many'" in refusal(JOB, OMP_NUM_THREADS="many")


def test_a_program_that_starts_its_ranks_itself() -> None:
    """They share the threads of its one process on each node."""
    job = replace(JOB, program=replace(PROGRAM, one_process_per_node=True))
    variables = {"SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS_ON_NODE": "4"}
    assert decide(job, SLURM_TASKS_PER_NODE="1(x2)", **variables).exports["OMP_NUM_THREADS"] == "2"
    assert "--ntasks-per-node=1" in refusal(job, SLURM_TASKS_PER_NODE="2", **variables)


def test_where_the_ranks_meet() -> None:
    plan = decide(JOB, SITE_PORTS="20000-20004", SITE_NETWORK_INTERFACE="ib0", SLURM_JOB_ID="13")
    assert (plan.exports["MASTER_ADDR"], plan.exports["MASTER_PORT"]) == ("n1", "20003")
    assert plan.exports["NCCL_SOCKET_IFNAME"] == plan.exports["GLOO_SOCKET_IFNAME"] == "ib0"
    of_the_site = decide(JOB, MASTER_ADDR="fast", MASTER_PORT="1234")
    assert (of_the_site.exports["MASTER_ADDR"], of_the_site.exports["MASTER_PORT"]) == ("fast", "1234")
    for wrong, reason in {"login": "is 10.0.0.9, no address of", "nowhere": "is unknown"}.items():
        assert reason in refusal(JOB, MASTER_ADDR=wrong)
    unknown = replace(JOB, first_node="n9")  # its name is not known here, but its address in Slurm
    assert decide(unknown).exports["MASTER_ADDR"] == "10.0.0.7"
    assert "neither n9 nor its address" in refusal(replace(unknown, first_node_record="NodeAddr=n9"))
    assert "does not name the nodes" in refusal(replace(JOB, first_node=""))


def test_bash_carries_out_the_plan() -> None:
    """With what may stand in a value."""
    value = 'it\'s "$HOME" `x` \\ é\ntwo lines'
    plan = StartPlan(
        ["OLD"],
        {"NEW": value},
        {"OWN": value},
        ["job  x", "", value],
        samples.RequestedResources(1, 1, 0, exclusive_helps=True),
    )
    shell = f"{start_plan.as_shell(plan)}\nenv -0 | grep -zE '^(OLD|NEW|OWN)='; printf %s \"$OWN$begun\""
    done = ran("bash", "-euc", shell, env=ENVIRONMENT | {"OLD": "1"})
    assert done.stdout == f"job  x\n\n{value}\nNEW={value}\0{value}1", done.stderr


def test_a_job_with_spare_nodes(release: str) -> None:
    """Its ranks are on as many nodes as they need, whichever are left; Slurm's variables keep all."""
    asked = {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "6", start_plan.SPARE_NODES: "1"}
    one_left = record(release, "node_failed")
    two_left = replace(JOB, record=one_left.replace(" NumNodes=1 ", " NumNodes=2 "))
    plan = decide(two_left, **asked)
    assert [plan.exports[name] for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")] == ["2", "2"]
    assert plan.exports["SLURM_NTASKS"] == "4" and start_plan.SPARE_NODES in plan.unset
    with pytest.raises(UserError, match="nodes"):
        decide(replace(JOB, record=one_left), **asked)
    for spare in ("2", "3", "one"):
        with pytest.raises(UserError, match="nodes"):
            decide(two_left, **asked | {start_plan.SPARE_NODES: spare})


def begin(folder: Path, job: JobStart = JOB, monitored: bool = True) -> str:
    return start_plan.begin(replace(job, folder=folder), None, NAMES.get, monitored)


def left_by_a_start(folder: Path) -> list[str]:
    """Fill the folder of a job as a start leaves it; return what the next one keeps."""
    kept = ["checkpoints/1.pt", "monitor/n1.csv", "debug-rank-0.txt", "rank-0.pt"]
    for name in ("checkpoints", "monitor"):
        (folder / name).mkdir(parents=True)
    gone = ["rank-0.failed", "rank-1.lost", "stopped", "resumed-from", "newest-checkpoint"]
    gone += ["monitor/told", "monitor/verdict.json"]
    for name in (*kept, *gone):
        (folder / name).write_text("7 7 7\n")
    (folder / job_folder.FIRST_FAILED).symlink_to("rank-0.failed")
    return kept


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_the_folder_of_a_start_that_comes_back(release: str, tmp_path: Path) -> None:
    folder = tmp_path / "7"
    kept = left_by_a_start(folder)
    begin(folder, replace(JOB, record=record(release, "requeued")))
    assert files(folder) == sorted([*kept, "monitor/asked"])
    assert (folder / "monitor" / "asked").read_text() == "2 2 0 1\n"


def test_the_folder_of_an_older_job_with_the_same_number(tmp_path: Path) -> None:
    """As after each new start of the practice cluster. Its checkpoints are not those of this job."""
    folder = tmp_path / "7"
    left_by_a_start(folder)
    (folder / job_folder.ENDED_FOR_GOOD).touch()
    before = files(folder)
    begin(folder, replace(JOB, program=PROGRAM), monitored=False)
    assert files(folder) == ["plain"] and (folder / "checkpoints").is_dir()
    (aside,) = tmp_path.glob("7-*")
    assert files(aside) == before


def test_a_start_after_the_end_does_nothing(release: str, tmp_path: Path) -> None:
    left_by_a_start(tmp_path)
    (tmp_path / job_folder.ENDED_FOR_GOOD).touch()
    before = files(tmp_path)
    answer = begin(tmp_path, replace(JOB, record=record(release, "requeued")))
    done = subprocess.run(["bash", "-c", f"{answer}\necho goes on"], capture_output=True, text=True)
    assert "already ended well" in done.stdout and "goes on" not in done.stdout
    assert files(tmp_path) == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be created .*SITE_SCRATCH_DIR"):
        begin(tmp_path / "file" / "7")
