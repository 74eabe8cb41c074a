"""What each launcher tells a process. train/test_mpirun.py and the tests of jobs start real ones."""

import os
import re
import sys

import pytest
from conftest import ran

from manygpus import launchers
from manygpus.launchers import DistEnv

MEET = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}

# The variables of the last of three ranks, which is alone on the second of two nodes, as each launcher sets
# them; where it is said, by a release that was started for this.
UNEVEN = {
    # https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    "torchrun": {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",
        # Within an srun step that has one task on each node, the torchruns.
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "1",
    },
    # https://slurm.schedmd.com/srun.html
    "srun": {
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_NODEID": "1",
    },
    # Open MPI 5.0.11. Its number of nodes is nowhere in the environment.
    "mpirun of Open MPI": {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "PMIX_RANK": "2",
        "PMIX_NAMESPACE": "prterun-vm-21183@1",
        # mpirun in a batch script.
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    },
    # MPICH 5.0.2.
    "mpirun of MPICH": {
        "PMI_RANK": "2",
        "PMI_SIZE": "3",
        "PMI_FD": "12",
        "PMI_HOSTNAME": "node-b",
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "1",
        # In a job, where srun starts one helper of mpirun on each node.
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "1",
    },
    "by hand": {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": "2",
    },
}
UNEVEN["srun --mpi=pmix"] = UNEVEN["srun"] | {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
UNEVEN["srun --mpi=pmi2"] = UNEVEN["srun"] | {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "7.0"}
UNEVEN["srun, and a script that sets RANK"] = UNEVEN["srun"] | {
    "RANK": "2",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "3",
}
UNEVEN["submitit"] = UNEVEN["srun, and a script that sets RANK"] | {"SUBMITIT_EXECUTOR": "slurm"}
NAMES = {"by hand": "env"}  # those that a record has; else the first word of what is above


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Sets variables where no launcher has set any."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "MASTER_", "SUBMITIT_")) or launchers.LEFT_BY_LAUNCHERS.fullmatch(name):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("what", UNEVEN)
def test_three_ranks_on_two_nodes(what: str, only: pytest.MonkeyPatch) -> None:
    for name, value in (UNEVEN[what] | MEET).items():
        only.setenv(name, value)
    name = NAMES.get(what, what.split()[0].strip(","))
    expected = DistEnv(rank=2, local_rank=0, world_size=3, local_world_size=1, num_nodes=2, launcher=name)
    assert launchers.read() == expected
    assert launchers.rank_of() == "2"


@pytest.mark.parametrize(
    ("tasks_per_node", "node_number", "ranks_here"),
    [
        ("3(x2),1(x2)", "1", 3),
        ("3(x2),1(x2)", "2", 1),
        ("3(x2),1(x2)", "4", 2),  # of a node that the step does not have
        ("3(x2),1(x2)", "", 2),
        ("1(x4)", "1", 2),  # a task on each node has started the ranks there
        ("", "1", 2),
    ],
)
def test_how_many_of_eight_ranks_on_four_nodes_are_here(
    tasks_per_node: str, node_number: str, ranks_here: int
) -> None:
    """By the srun step that they are in, if it has as many tasks, or else as many on each node."""
    environ = {
        "RANK": "3",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "8",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_NODEID": node_number,
    }
    assert launchers.launcher_of(environ).local_world_size() == ranks_here


@pytest.mark.parametrize("what", UNEVEN)
def test_ranks_that_do_not_know_where_to_meet(what: str, only: pytest.MonkeyPatch) -> None:
    for name, value in UNEVEN[what].items():
        only.setenv(name, value)
    with pytest.raises(
        ValueError, match=r"rank 2 of 3 on 2 node\(s\) cannot meet.* MASTER_ADDR and MASTER_PORT"
    ):
        launchers.read()


def test_one_process(only: pytest.MonkeyPatch) -> None:
    """Also in a batch script, which has the variables of no step."""
    assert launchers.read() == DistEnv()
    only.setenv("SLURM_PROCID", "0")
    only.setenv("SLURM_JOB_ID", "7")
    assert launchers.read() == DistEnv()
    assert "MASTER_ADDR" not in os.environ


def test_two_mpiruns_have_a_port_each_and_leave_one_that_was_chosen(only: pytest.MonkeyPatch) -> None:
    """The port is by the number of the process that has started the ranks: here pytest's parent."""
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    address = launchers.launcher_of(environ).main_address()
    assert address == ("localhost", str(launchers.PORTS[os.getppid() % len(launchers.PORTS)]))
    chosen = launchers.launcher_of(environ | {"MASTER_PORT": "12345"}).main_address()
    assert chosen == ("localhost", "12345")


def test_a_script_between_mpirun_and_the_ranks_leaves_them_their_port(only: pytest.MonkeyPatch) -> None:
    """Each rank has a script of its own, and all have to meet at one port: here that of pytest."""
    of_hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    program = "from manygpus import launchers; print(launchers.launcher_of().main_address().port)"
    script = f'"{sys.executable}" -c "{program}"; exit'  # bash would become the last command of a script
    done = ran("bash", "-c", script, env={**os.environ, **of_hydra})
    assert done.stdout.strip() == str(launchers.PORTS[os.getpid() % len(launchers.PORTS)]), done.stderr


def test_a_variable_that_is_missing_is_named(only: pytest.MonkeyPatch) -> None:
    """With what a single process would have to unset: what is set."""
    for name in ("SIZE", "RANK", "LOCAL_RANK"):
        only.setenv(f"OMPI_COMM_WORLD_{name}", "1")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_LOCAL_SIZE is None") as raised:
        launchers.read()
    assert re.findall("unset (.*)[.]", str(raised.value)) == ["OMPI_COMM_WORLD_SIZE"]


# What launchers that are not read here set for a rank of several, and for a single process.
NOT_READ = {
    "PALS, rank 1": ({"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "1"}, {"PALS_RANKID": "0"}),
    "PALS, rank 0": ({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "2"}, {"PALS_LOCAL_SIZE": "1"}),
    "Flux": ({"FLUX_JOB_SIZE": "2", "PMI_SIZE": "2"}, {"FLUX_JOB_SIZE": "1", "PMI_SIZE": "1"}),
    "jsrun": ({"JSM_NAMESPACE_SIZE": "2"}, {"JSM_NAMESPACE_SIZE": "1"}),
    "MVAPICH": ({"MV2_COMM_WORLD_SIZE": "2"}, {"MV2_COMM_WORLD_SIZE": "1"}),
    "PMI": ({"PMI_SIZE": "2", "PMI_RANK": "0"}, {"PMI_SIZE": "1", "PMI_RANK": "0"}),
    "PMIx": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prte.1"}, {"PMIX_RANK": "0"}),
}


@pytest.mark.parametrize("what", NOT_READ)
def test_a_launcher_that_is_not_read_is_refused(what: str, only: pytest.MonkeyPatch) -> None:
    """If it has started several processes, as each would train the whole. A script may set RANK by it."""
    of_several, of_one = NOT_READ[what]
    for name, value in of_several.items():
        assert launchers.LEFT_BY_LAUNCHERS.fullmatch(name)
        only.setenv(name, value)
    with pytest.raises(ValueError, match=" is [12].* torchrun"):
        launchers.read()
    by_hand = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"} | MEET
    for name, value in by_hand.items():
        only.setenv(name, value)
    assert launchers.read().world_size == 2
    for name in of_several | by_hand:
        only.delenv(name)
    for name, value in of_one.items():
        only.setenv(name, value)
    assert launchers.read() == DistEnv()


def test_flux_in_a_step_of_slurm_is_refused(only: pytest.MonkeyPatch) -> None:
    """Its processes have the variables of the one task of srun that has started Flux."""
    step = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    for name, value in (step | {"FLUX_JOB_SIZE": "2"}).items():
        only.setenv(name, value)
    with pytest.raises(ValueError, match="FLUX_JOB_SIZE is 2"):
        launchers.read()
