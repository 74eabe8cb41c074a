"""`doctor.py --write-site` on sites of many kinds: how each wants to be asked is found by asking Slurm.

That jobs run with such lines, test_other_sites.py shows.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from checkout import Checkout
from cluster import RunningCluster, running_cluster
from conftest import succeeded

pytestmark = pytest.mark.full

KIND = "1g.10gb"
# A plugin that refuses what a file describes, as the administrators of many sites have one.
PLUGIN = """
function slurm_job_submit(job, partitions, user)
    if dofile("{rule}")(job) then
        slurm.log_user("ask as the user guide says")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

function slurm_job_modify()
    return slurm.SUCCESS
end
"""
HAS_MEMORY = "(job.pn_min_memory and job.pn_min_memory < slurm.NO_VAL64 or job.mem_per_tres)"
HAS_CPUS = "(job.cpus_per_task and job.cpus_per_task < slurm.NO_VAL16 or job.cpus_per_tres)"
# What a plugin refuses, in Lua, and the lines of the site file that follow.
BY_PLUGIN = {
    "false": [],
    f"not string.find(job.tres_per_node or '', 'gpu:{KIND}:')": [f"SITE_GPUS=--gpus-per-node={KIND}:%d"],
    "job.tres_per_node": ["SITE_GPUS=--gpus=%d"],
    "not job.mem_per_tres": ["SITE_MEM=--mem-per-gpu=%dG"],
    HAS_MEMORY: ["SITE_MEM="],
    f"{HAS_MEMORY} or {HAS_CPUS}": ["SITE_CPUS=", "SITE_MEM="],
    "not job.account": [
        "export SBATCH_PARTITION=practice",
        "export SBATCH_ACCOUNT=root",
        "export SBATCH_QOS=normal",
    ],
}


class Written(NamedTuple):
    """What `doctor.py --write-site` has found, and the lines that are set in a file that it wrote."""

    findings: list[dict]
    lines: list[str]

    @property
    def faults(self) -> list[dict]:
        return [finding for finding in self.findings if finding["level"] == "fault"]


def write_site(checkout: Checkout, *options: object, name: str = "site.sh") -> Written:
    done = checkout.python("slurm/doctor.py", "--write-site", "--json", *options)
    findings = json.loads(done.stdout)["findings"]
    file = checkout.folder / "slurm" / name
    text = file.read_text() if file.exists() else ""
    settings = [line.partition(" #")[0].rstrip() for line in text.splitlines() if line[:1] not in ("", "#")]
    of_slurm = ("proposal", "slurm", "submission")
    return Written([finding for finding in findings if finding["check"] in of_slurm], settings)


def anew(checkout: Checkout, *options: object) -> Written:
    """Where there is no site file."""
    (checkout.folder / "slurm" / "site.sh").unlink(missing_ok=True)
    return write_site(checkout, *options)


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plugin") / "rule.lua"


@pytest.fixture(scope="module")
def cluster(rule: Path) -> Iterator[RunningCluster]:
    (rule.parent / "job_submit.lua").write_text(PLUGIN.format(rule=rule))
    (rule.parent / "slurm.conf").write_text("JobSubmitPlugins=lua\n")
    with running_cluster("--conf", rule.parent, "--gpu-kind", KIND, accounting=True) as cluster:
        yield cluster


@pytest.fixture
def checkout(cluster: RunningCluster, rule: Path, tmp_path: Path) -> Checkout:
    """On a cluster that refuses nothing so far."""
    rule.write_text("return function(job) return false end")
    return without_python(Checkout(tmp_path / "a checkout", cluster))


def without_python(checkout: Checkout) -> Checkout:
    """A checkout whose jobs have no Python: to load PyTorch takes seconds."""
    checkout.fake("python", "exit 1")
    return checkout


def test_what_a_plugin_refuses(checkout: Checkout, rule: Path) -> None:
    for refused, lines in BY_PLUGIN.items():
        rule.write_text(f"return function(job) return {refused} end")
        written = anew(checkout)
        assert (written.lines, written.faults) == (lines, []), refused
    rule.write_text("return function(job) return true end")
    written = anew(checkout)
    assert written.lines == []
    assert {fault["check"] for fault in written.faults} == {"proposal", "submission"}


def scontrol(cluster: RunningCluster, *words: str) -> None:
    succeeded(cluster.run(["scontrol", *words]))


def test_the_partition_that_fits_and_starts_first(checkout: Checkout) -> None:
    """Of one whose jobs wait, one that takes the place of others, one that is down, and one that is free."""
    cluster = checkout.cluster
    for name in ("practice", "urgent"):
        scontrol(cluster, "update", f"PartitionName={name}", "Nodes=n1")
    scontrol(cluster, "create", "PartitionName=new", "Nodes=n2", "MaxTime=60", "State=DOWN")
    scontrol(cluster, "create", "PartitionName=free", "Nodes=n2", "MaxTime=60")
    job = cluster.submit("--exclusive", "--nodelist=n1", "--time=60", "--wrap", "sleep 1000")
    cluster.wait(job, until="RUNNING")
    try:
        assert anew(checkout).lines == ["export SBATCH_PARTITION=free"]
        # The other partition with two nodes has too little time.
        scontrol(cluster, "update", "PartitionName=urgent", "Nodes=ALL")
        assert anew(checkout, "--nodes", 2, "--gpus", 4).lines == ["export SBATCH_PARTITION=urgent"]
        written = anew(checkout, "--nodes", 2, "--gpus", 6)
        assert written.lines == [] and written.faults
    finally:
        cluster.run(["scancel", job])
        for name in ("new", "free"):
            scontrol(cluster, "delete", f"PartitionName={name}")
        scontrol(cluster, "update", "PartitionName=practice", "Nodes=ALL")


def test_a_site_file_stays_as_it_is_with_the_proposal_beside_it(checkout: Checkout, rule: Path) -> None:
    rule.write_text(f"return function(job) return {HAS_MEMORY} end")
    text = (
        "export SBATCH_PARTITION=older\n"
        "activate_environment() { true; }\n"
        "export SBATCH_PARTITION=nowhere # the old one\n"
        "SITE_GPUS=(--gpus=%d --constraint=a100)\n"
    )
    checkout.site(text)
    for feature in ("availablefeatures", "activefeatures"):
        scontrol(checkout.cluster, "update", "NodeName=n[1-2]", f"{feature}=a100")
    proposed = write_site(checkout, name="site.sh.new")
    file = checkout.folder / "slurm" / "site.sh"
    assert file.read_text() == text
    # Its own way to ask for GPUs is taken, and kept.
    kept = text.splitlines()
    assert proposed.lines == [*kept[:2], "export SBATCH_PARTITION=practice", kept[3], "SITE_MEM="]
    file.with_name("site.sh.new").rename(file)
    written = write_site(checkout)
    assert (written.lines, written.faults) == (proposed.lines, [])
    assert not file.with_name("site.sh.new").exists()


def test_who_may_use_a_partition_and_how_long(checkout: Checkout) -> None:
    cluster = checkout.cluster
    for words in (
        "add account project",
        "add user root account=project",
        "add qos long",
        "modify user root account=project set qos+=long",
        "modify qos long set maxwall=12",
    ):
        succeeded(cluster.run(["sacctmgr", "--immediate", *words.split()]))
    scontrol(cluster, "update", "PartitionName=practice", "AllowAccounts=project", "AllowQos=long")
    scontrol(cluster, "update", "PartitionName=debug", "State=DOWN")
    scontrol(cluster, "update", "PartitionName=urgent", "AllowAccounts=theirs")
    written = anew(checkout)
    assert (written.lines, written.faults) == (
        ["export SBATCH_ACCOUNT=project", "export SBATCH_QOS=long", "export SBATCH_TIMELIMIT=12"],
        [],
    )


def test_without_gpus_that_slurm_counts_and_without_accounting(tmp_path: Path) -> None:
    """On nodes of which each job has the whole one; a feature tells which have GPUs."""
    with running_cluster(gpus=0) as cluster:
        scontrol(cluster, "update", "PartitionName=practice", "OverSubscribe=EXCLUSIVE")
        scontrol(cluster, "update", "NodeName=n1", "availablefeatures=a100")
        checkout = without_python(Checkout(tmp_path / "a checkout", cluster))
        written = anew(checkout)
    assert (written.lines, written.faults) == (["SITE_GPUS="], [])
    assert any("a100" in finding["fix"] for finding in written.findings)


def test_without_slurm_nothing_is_written(tmp_path: Path) -> None:
    checkout = without_python(Checkout(tmp_path / "a checkout"))
    written = anew(checkout)
    assert [fault["check"] for fault in written.faults] == ["slurm"]
    assert not (checkout.folder / "slurm" / "site.sh").exists()
