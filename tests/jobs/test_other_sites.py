"""Sites of other kinds: each a practice cluster of its own, whose site.sh tells how it wants to be asked.

What preemption does on a site that cancels preempted jobs, test_submission.py shows.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import Checkout
from cluster import running_cluster
from conftest import succeeded

from manygpus.monitor import samples

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("mnist_dir")]

# A plugin that refuses what its condition describes, as the administrators of many sites have one.
PLUGIN = """
function slurm_job_submit(job, partitions, user)
    if {condition} then
        slurm.log_user("{refusal}")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

function slurm_job_modify()
    return slurm.SUCCESS
end
"""
NO_LIMIT = "(job.{0} == nil or job.{0} >= slurm.{1})"


@dataclass
class Kind:
    """A kind of site, and a job that it takes.

    `refuses`, in Lua, is what its plugin refuses of the requests in job scripts, and `conf` is more of its
    slurm.conf. `facts` are fields of `scontrol show job`; a test of them allows for the words of newer Slurm.
    """

    refuses: str
    site: str
    submission: tuple
    facts: dict[str, str]
    cpus_per_task: int
    options: tuple = ()
    conf: str = ""


KINDS = {
    "a kind of GPU, by --gres": Kind(
        refuses='not string.find(job.tres_per_node or "", "gpu:1g.10gb:[0-9]")',
        options=("--gpu-kind", "1g.10gb"),
        site="SITE_GPUS=--gres=gpu:1g.10gb:%d\n",
        submission=("single", "--gpus", 1),  # which asks for one of the two
        facts={"TresPerNode": "gpu:1g.10gb:1"},
        cpus_per_task=2,
    ),
    "memory and cores come with the GPU": Kind(
        refuses=f"not ({NO_LIMIT.format('pn_min_memory', 'NO_VAL64')} "
        f"and {NO_LIMIT.format('cpus_per_task', 'NO_VAL16')})",
        options=("--cpus", 6),
        conf="EnforcePartLimits=ALL\n"
        "PartitionName=short Nodes=ALL Default=YES MaxTime=10 DefCpuPerGPU=3 DefMemPerGPU=900\n",
        site="SITE_MEM=\nSITE_CPUS=\nexport SBATCH_TIMELIMIT=10\n",
        submission=("single", "--gpus", 1),
        facts={"TimeLimit": "00:10:00", "NumCPUs": "3"},
        cpus_per_task=3,
    ),
    "--gpus only, and the rest by the GPU": Kind(
        refuses="job.tres_per_node or not (job.tres_per_job and job.cpus_per_tres and job.mem_per_tres)",
        site="SITE_GPUS=--gpus=%d\nSITE_CPUS=--cpus-per-gpu=%d\nSITE_MEM=--mem-per-gpu=%dG\n",
        submission=("ddp", "--gpus", 2, "--nodes", 2),
        facts={"NumNodes": "2", "TresPerJob": "gpu:2", "NumCPUs": "4"},
        cpus_per_task=2,
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_site_of_another_kind(kind: Kind, tmp_path: Path) -> None:
    """It refuses the job scripts, a sentence and the doctor say what to do, and then jobs go well."""
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "slurm.conf").write_text(f"JobSubmitPlugins=lua\n{kind.conf}")
    plugin = PLUGIN.format(condition=kind.refuses, refusal="ask by --gres, --gpus or --mem")
    (conf / "job_submit.lua").write_text(plugin)
    with running_cluster("--conf", conf, *kind.options) as cluster:
        checkout = Checkout(tmp_path / "a checkout", cluster)
        checkout.pretend()
        stage, *asked = kind.submission
        if kind.conf:
            checkout.site("export SBATCH_TIMELIMIT=10\n")  # or its time is what is refused
        refused = checkout.submit_py(stage, *asked)
        assert re.match("error: Slurm did not accept the job .* SITE_GPUS, SITE_CPUS and ", refused.stderr)

        checkout.site(f"{kind.site}activate_environment() {{ false; }}\n")  # loading PyTorch takes seconds
        findings = json.loads(checkout.python("slurm/doctor.py", "--json").stdout)["findings"]
        submission = {finding["level"]: finding for finding in findings if finding["check"] == "submission"}
        assert submission.keys() == {"ok", "warning"}
        assert "job script" in submission["warning"]["message"]

        checkout.site(kind.site)
        script = checkout.folder / "job.sh"
        script.write_text(succeeded(checkout.submit_py(stage, *asked, "--dry-run")).stdout)
        succeeded(cluster.run(["sbatch", "--test-only", script]))
        done = succeeded(checkout.submit_py(stage, *asked, "--wait"))
        job = int(re.match(r"job (\d+) ", done.stdout)[1])
        seen = cluster.job(job)
        for name, value in kind.facts.items():
            assert seen[name].replace("gres/", "").replace("gres:", "") == value, seen
        (log,) = checkout.folder.rglob("*_0_log.out")
        assert f"CPUs per task {kind.cpus_per_task}\n" in log.read_text()


def test_a_job_that_can_never_start_is_refused_and_not_left(tmp_path: Path) -> None:
    """Slurm accepts each of them, as EnforcePartLimits is NO, and gives the reason later."""
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "slurm.conf").write_text(
        "PartitionName=small Nodes=ALL MaxNodes=1 MaxMemPerNode=4096 MaxTime=60\n"
        "PartitionName=large Nodes=ALL MinNodes=2 MaxTime=60\n"
    )
    with running_cluster("--conf", conf, accounting=True) as cluster:
        checkout = Checkout(tmp_path / "a checkout", cluster)
        # Slurm's next look at the queue may be late on busy cores.
        checkout.redefine("manygpus/jobs/submit/submission.py", "REASON_SECONDS = 60")
        script = checkout.folder / "tell.sh"
        script.write_text("#!/bin/sh\nsleep 100\n")
        script.chmod(0o755)

        def refused(partition: str, *options: object) -> str:
            """The error of a submission, which leaves nothing."""
            done = checkout.submit_py("ddp", "--partition", partition, *options, "--plain", script)
            assert (done.returncode, done.stdout) == (1, "")
            assert not [*checkout.folder.glob("results/jobs/submitit/*")]
            assert cluster.run(["squeue", "--noheader", "--states=pending,running"]).stdout == ""
            return done.stderr

        assert "PartitionTimeLimit" in refused("debug")
        assert "PartitionTimeLimit" in refused("debug", "--dry-run")
        assert "PartitionNodeLimit" in refused("small", "--nodes", 2)
        assert "PartitionNodeLimit" in refused("large", "--nodes", 1)
        assert "MaxMemPerLimit" in refused("small")
        assert "PartitionTimeLimit" in refused("debug,small")
        doctor = checkout.python("slurm/doctor.py", "--json", SBATCH_PARTITION="debug")
        (submission,) = [
            finding for finding in json.loads(doctor.stdout)["findings"] if finding["check"] == "submission"
        ]
        assert submission["level"] == "fault" and "PartitionTimeLimit" in submission["message"]

        # Slurm alone sees these.
        checkout.site("SITE_MEM=--mem-per-cpu=3G\n")
        assert "never start" in refused("small")
        cluster.run(["sacctmgr", "--immediate", "add", "qos", "special"])
        create = ["scontrol", "create", "PartitionName=theirs", "Nodes=ALL", "AllowQos=special", "MaxTime=60"]
        succeeded(cluster.run(create))
        assert "never start" in refused("theirs")

        # In one of these partitions it may start; and a QOS may lift a limit.
        checkout.site("SITE_MEM=\n")
        for partition in ("debug,practice", "debug"):
            succeeded(checkout.submit_py("ddp", "--partition", partition, "--plain", script))
            lift = ["sacctmgr", "--immediate", "modify", "qos", "normal", "set", "flags=PartitionTimeLimit"]
            succeeded(cluster.run(lift))


TELLS_ITS_CORES = f"""
import os, time
from pathlib import Path
print("cores", os.sched_getaffinity(0), open("/proc/self/cgroup").read())
if os.environ["SLURM_PROCID"] == "0":
    Path("/dev/shm/file").write_bytes(bytes(300_000_000))
time.sleep({2 * samples.PERIOD_SECONDS})
"""


def test_cgroups_confine_each_rank_to_its_cores(tmp_path: Path) -> None:
    """Those of version 1, where this machine has them and lets us; with memory constrained, and affinity.

    They count the memory of the job, with its files in memory.
    """
    if not os.access("/sys/fs/cgroup/cpuset", os.W_OK) or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine lets us make no cgroups of version 1, or has one core only")
    conf = tmp_path / "conf"
    conf.mkdir()
    # Groups are called by the job's number: so none is that of another cluster's job on this machine.
    (conf / "slurm.conf").write_text(
        "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup,task/affinity\nJobAcctGatherParams=UsePss\n"
        f"FirstJobId={os.getpid() + 1000}\n"
    )
    (conf / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\nConstrainCores=yes\nConstrainRAMSpace=yes\n"
    )
    try:
        with running_cluster("--conf", conf, "--cpus", 2, nodes=1) as cluster:
            checkout = Checkout(tmp_path / "a checkout", cluster)
            checkout.site("SITE_MONITOR=on\n")
            script = checkout.folder / "tell.py"
            script.write_text(TELLS_ITS_CORES)
            sizes = ("--gpus", 2, "--cpus-per-gpu", 1)
            succeeded(checkout.submit_py("ddp", *sizes, "--wait", "--plain", script))
            text = "".join(log.read_text() for log in checkout.folder.rglob("*_log.out"))
            (folder,) = checkout.folder.glob(f"results/jobs/*/{samples.FOLDER}")
            nodes = [row for row in samples.read(folder) if row["what"] == samples.NODE]
    finally:
        for folder in Path("/sys/fs/cgroup").glob("*/slurm_n1"):  # slurmd leaves them
            folder.rmdir()
    cores = re.findall(r"^cores (\{\d+\}) ", text, re.MULTILINE)
    assert len(cores) == 2 and len(set(cores)) == 2, text
    assert re.search(r":cpuset:/slurm_n1/uid_\d+/job_\d+/step_\d+(/task_\d+)?$", text, re.MULTILINE), text
    # Without a cgroup the file would count as one of nobody knows whom.
    assert {float(row["shared_files_mb"]) for row in nodes} == {0}
    assert max(float(row["memory_mb"]) for row in nodes) >= 300


RING = """
- topology: ring
  cluster_default: true
  ring:
    rings:
      - ring: r0
        nodes: n3,n1,n2
"""
TELLS_WHERE_RANKS_MEET = """
import os
print("rank", os.environ["RANK"], "on", os.environ["SLURMD_NODENAME"], "meets at", os.environ["MASTER_ADDR"])
"""


def test_ranks_meet_where_rank_0_is_in_a_topology_that_numbers_them(tmp_path: Path) -> None:
    """Slurm 26.05 numbers them in the order of its ring, with one task on each node and with two."""
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "topology.yaml").write_text(RING)
    with running_cluster("--conf", conf, nodes=3) as cluster:
        if tuple(map(int, re.findall(r"\d+", cluster.run(["scontrol", "--version"]).stdout)[:2])) < (26, 5):
            pytest.skip("this release of Slurm has no rings")
        checkout = Checkout(tmp_path / "a checkout", cluster)
        checkout.site("SITE_MONITOR=off\n")
        script = checkout.folder / "tell.py"
        script.write_text(TELLS_WHERE_RANKS_MEET)
        for tasks in (1, 2):
            counts = (f"--ntasks-per-node={tasks}", f"--gpus-per-node={tasks}", "--cpus-per-task=1")
            sbatch = ("--nodelist=n1,n3", "--nodes=2", "--mem=1G", *counts)
            job = checkout.submit("srun", "--plain", script, sbatch=sbatch)
            assert cluster.wait(job)["JobState"] == "COMPLETED", checkout.log(job)
            (places,) = re.findall("^rank 0 on (.*) meets at (.*)", checkout.log(job), re.MULTILINE)
            assert places[0] == places[1], checkout.log(job)
