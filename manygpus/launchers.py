"""Who this process is among all processes of the training, as its launcher tells it.

Each launcher has its own environment variables, and a class here that reads them. The first class in
LAUNCHERS that detects its launcher counts. A new launcher is one more class in that list.
"""

import os
import random
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

PORTS = range(10_000, 30_000)  # below those that Linux gives to programs that ask for any port (32768 and up)
LARGEST_NUMBER = 2**31 - 1  # of ranks, and of whatever else a launcher counts; PyTorch holds it in an int

# The job scripts set it within the site's container (scripts/job_env.sh).
STARTED_BY = "MANYGPUS_STARTED_BY"

# What torchrun, mpirun and others set for their processes, and these leave to others.
LEFT_BY_LAUNCHERS = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|(TORCHELASTIC|PET|OMPI_COMM|PMI)_.*"
    "|PMIX_(RANK|NAMESPACE)|(PALS|MV2_COMM_WORLD|JSM_NAMESPACE|FLUX_(JOB|TASK))_.*"
)
# Of launchers that are not read here, under each of which every process trained the whole: the number from
# which on a variable shows that there are several processes. It counts them, or is the rank. Sources: pals.h
# of HPE; flux-environment(7); for jsrun LSFEnvironment of Lightning, for mpirun_rsh state.py of Accelerate.
SEVERAL_FROM = {
    "PALS_LOCAL_SIZE": 2,  # mpiexec of Cray
    "PALS_RANKID": 1,
    "FLUX_JOB_SIZE": 2,
    "JSM_NAMESPACE_SIZE": 2,  # jsrun of LSF
    "MV2_COMM_WORLD_SIZE": 2,  # mpirun_rsh of MVAPICH
}
SEVERAL_FROM_UNLESS_SRUN = {"PMI_SIZE": 2, "PMIX_RANK": 1}  # which srun --mpi=pmi2 or pmix sets, too


@dataclass(frozen=True)
class DistEnv:
    """Which of the processes of a training this one is."""

    rank: int = 0  # over all processes
    local_rank: int = 0  # over those of this node
    world_size: int = 1  # the number of processes
    local_world_size: int = 1  # the number of them on this node
    num_nodes: int = 1
    launcher: str = "python"  # the name of one of LAUNCHERS
    device: "torch.device | None" = None  # before it is chosen


class Address(NamedTuple):
    """Where rank 0 waits for the others."""

    host: str
    port: str


class Launcher:
    """What has started a process, and tells it who it is.

    The methods raise a ValueError, whose text says what to do, if the launcher's variables are not there or
    are no numbers.

    Args:
        environ: the environment variables of the process.
    """

    name: str  # in the column `launcher` of a record
    rank_variables: tuple[str, ...]  # the first that is set holds the rank
    opens_store = False  # whether the launcher itself, and not rank 0, opens the store where the ranks meet
    tells_num_nodes = True  # else process_group.py counts the nodes when the ranks have met
    detected_by: tuple[str, ...] = ()  # a single process that has inherited them goes without
    # What to do if the ranks cannot meet by its variables.
    how_to_meet = (
        "start with torchrun, or give each process its own RANK, from 0 to WORLD_SIZE - 1, and all of them "
        "MASTER_ADDR and MASTER_PORT (the first node's name, and a free port)"
    )

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Return whether this launcher has started the process with these environment variables."""
        raise NotImplementedError

    def rank(self) -> int:
        """Return the rank of this process over all nodes, from 0."""
        raise NotImplementedError

    def local_rank(self) -> int:
        """Return the rank of this process among those of its node, from 0."""
        raise NotImplementedError

    def world_size(self) -> int:
        """Return the number of processes on all nodes."""
        raise NotImplementedError

    def local_world_size(self) -> int:
        """Return the number of processes on this node."""
        raise NotImplementedError

    def num_nodes(self) -> int:
        """Return the number of nodes, or, without `tells_num_nodes`, how many there are at least."""
        raise NotImplementedError

    def main_address(self) -> Address | None:
        """Return where rank 0 waits for the others: MASTER_ADDR and MASTER_PORT; None if one is not set."""
        host = self.environ.get("MASTER_ADDR")
        port = self.environ.get("MASTER_PORT")
        if host is None or port is None:
            return None
        return Address(host, port)

    def training_id(self) -> str:
        """Return words that only the processes of this training have; "" if the launcher has none."""
        return ""

    def binds_cores(self) -> bool:
        """Return whether the launcher has given each process of a node cores of its own."""
        return True

    def to_unset(self, variables: Iterable[str]) -> str:
        """Return the names of those of the variables that are set, in words."""
        return " and ".join(name for name in variables if name in self.environ)

    def number(self, variable: str, smallest: int, default: int | None = None) -> int:
        """Return the number in an environment variable.

        Raises:
            ValueError: if it is no whole number from `smallest` on; its text says what to do.
        """
        text = self.environ.get(variable, default)
        try:
            number = int(text)
        except (TypeError, ValueError):
            number = smallest - 1
        if not smallest <= number <= LARGEST_NUMBER:
            raise ValueError(
                f"{variable} is {text!r}, not a whole number from {smallest} on: start the processes with "
                f"torchrun or srun, or, if there is to be only one, unset {self.to_unset(self.detected_by)}."
            )
        return number


class ByHand(Launcher):
    """Whoever sets RANK, LOCAL_RANK and WORLD_SIZE; on several nodes also LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE.

    Their meaning is that of torchrun's: https://docs.pytorch.org/docs/stable/elastic/run.html
    """

    name = "env"
    rank_variables = ("RANK",)
    detected_by = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Return whether one of the three is set; that the others are missing is told later."""
        return any(variable in environ for variable in cls.detected_by)

    def rank(self) -> int:
        """Return RANK."""
        return self.number("RANK", smallest=0)

    def local_rank(self) -> int:
        """Return LOCAL_RANK."""
        return self.number("LOCAL_RANK", smallest=0)

    def world_size(self) -> int:
        """Return WORLD_SIZE."""
        return self.number("WORLD_SIZE", smallest=1)

    def num_nodes(self) -> int:
        """Return GROUP_WORLD_SIZE, or the number of nodes of the srun step that this process is in, or 1."""
        if self.environ.get("GROUP_WORLD_SIZE"):
            return self.number("GROUP_WORLD_SIZE", smallest=1)
        return self.number("SLURM_STEP_NUM_NODES", smallest=1, default=1)

    def local_world_size(self) -> int:
        """Return LOCAL_WORLD_SIZE, or else what Slurm tells, or the same number on each node."""
        told_by_slurm = local_world_size_of_step(self.environ, self.world_size(), self.num_nodes())
        return self.number("LOCAL_WORLD_SIZE", smallest=1, default=told_by_slurm)


class TorchElastic(ByHand):
    """PyTorch's torchrun."""

    name = "torchrun"
    opens_store = True

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Return whether torchrun has set RANK."""
        return super().detect(environ) and "TORCHELASTIC_RUN_ID" in environ

    def training_id(self) -> str:
        """Return torchrun's name of this training: that of --rdzv-id, or a random one with --standalone."""
        return f"torchrun {self.environ['TORCHELASTIC_RUN_ID']}"

    def binds_cores(self) -> bool:
        """Return False: torchrun gives every core to every rank."""
        return False


class Submitit(ByHand):
    """submitit, whose processes set RANK and the others themselves (manygpus/jobs/inside/job_task.py)."""

    name = "submitit"
    rank_variables = ("RANK", "SUBMITIT_LOCAL_GLOBALID")  # the second before the process sets the first

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Return whether this process of submitit has set RANK."""
        return super().detect(environ) and "SUBMITIT_EXECUTOR" in environ

    def training_id(self) -> str:
        """Return the Slurm job; "" without Slurm."""
        return _slurm_job(self.environ)

    def binds_cores(self) -> bool:
        """Return whether srun has started the processes, and not submitit's own stand-in for Slurm."""
        return self.environ["SUBMITIT_EXECUTOR"] != "local"


class SrunByHand(ByHand):
    """srun, with a script that sets RANK by Slurm's variables, as 03_multigpu_ddp/plain_slurm.sh does."""

    name = "srun"

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Return whether RANK is set, and this process is in an srun step."""
        return super().detect(environ) and "SLURM_STEP_ID" in environ

    def training_id(self) -> str:
        """Return the Slurm job."""
        return _slurm_job(self.environ)


class Srun(Launcher):
    """Slurm's srun, with any --mpi: pmix and pmi2 set PMIX_* and PMI_* besides, with the same ranks.

    Source: "OUTPUT ENVIRONMENT VARIABLES" of https://slurm.schedmd.com/srun.html
    """

    name = "srun"
    rank_variables = ("SLURM_PROCID",)
    detected_by = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Return whether this is an srun step. A batch script has SLURM_PROCID as well, and there it is 0."""
        return all(variable in environ for variable in cls.detected_by)

    def rank(self) -> int:
        """Return SLURM_PROCID."""
        return self.number("SLURM_PROCID", smallest=0)

    def local_rank(self) -> int:
        """Return SLURM_LOCALID."""
        return self.number("SLURM_LOCALID", smallest=0)

    def world_size(self) -> int:
        """Return SLURM_STEP_NUM_TASKS."""
        return self.number("SLURM_STEP_NUM_TASKS", smallest=1)

    def num_nodes(self) -> int:
        """Return SLURM_STEP_NUM_NODES."""
        return self.number("SLURM_STEP_NUM_NODES", smallest=1, default=1)

    def local_world_size(self) -> int:
        """Return this node's number in SLURM_STEP_TASKS_PER_NODE."""
        return local_world_size_of_step(self.environ, self.world_size(), self.num_nodes())

    def training_id(self) -> str:
        """Return the Slurm job."""
        return _slurm_job(self.environ)


class Mpirun(Launcher):
    """mpirun, or mpiexec; the subclasses have the variables of each MPI.

    MPI itself is not used: the ranks meet, and average gradients, as with the other launchers.
    """

    name = "mpirun"
    tells_num_nodes = False
    how_to_meet = (
        "give all of them MASTER_ADDR and MASTER_PORT (the name of rank 0's node, and a free port): export "
        "both, and with Open MPI start with mpirun -x MASTER_ADDR -x MASTER_PORT"
    )
    local_rank_variable: str
    world_size_variable: str
    local_world_size_variable: str

    def rank(self) -> int:
        """Return the rank that MPI_Comm_rank would return of MPI_COMM_WORLD."""
        return self.number(self.rank_variables[0], smallest=0)

    def local_rank(self) -> int:
        """Return the rank among the processes of this node."""
        return self.number(self.local_rank_variable, smallest=0)

    def world_size(self) -> int:
        """Return the size of MPI_COMM_WORLD."""
        return self.number(self.world_size_variable, smallest=1)

    def local_world_size(self) -> int:
        """Return how many processes mpirun has started on this node."""
        return self.number(self.local_world_size_variable, smallest=1)

    def num_nodes(self) -> int:
        """Return 1 if all processes are on this node, else 2: mpirun does not tell where the others are."""
        return 1 if self.local_world_size() == self.world_size() else 2

    def main_address(self) -> Address | None:
        """Return MASTER_ADDR and MASTER_PORT; on one node this machine, and a port of this mpirun, will do.

        Other nodes cannot know where rank 0 runs: mpirun tells it to MPI's own library only.
        """
        address = super().main_address()
        if address is not None or self.num_nodes() > 1:
            return address
        host = self.environ.get("MASTER_ADDR", "localhost")
        port = self.environ.get("MASTER_PORT") or self._port_of_this_mpirun()
        return None if port is None else Address(host, port)

    def training_id(self) -> str:
        """Return PMIx's name of what this mpirun has started; MPICH has none."""
        namespace = self.environ.get("PMIX_NAMESPACE")
        return f"mpirun {namespace}" if namespace else ""

    def _port_of_this_mpirun(self) -> str | None:
        """Return a port by the number of the process that has started the ranks, which is the same for all.

        That is the nearest ancestor that is no rank: a script between mpirun and Python has the variables of
        the rank, too. None if a container hides the ancestors.
        """
        import psutil  # which a login node may not have

        for ancestor in psutil.Process().parents():
            if self.rank_variables[0] not in ancestor.environ():
                return str(PORTS[ancestor.pid % len(PORTS)])
        return None


class OpenMpi(Mpirun):
    """mpirun of Open MPI.

    Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html, and Open MPI 4.1.4.
    """

    rank_variables = ("OMPI_COMM_WORLD_RANK",)
    local_rank_variable = "OMPI_COMM_WORLD_LOCAL_RANK"
    world_size_variable = "OMPI_COMM_WORLD_SIZE"
    local_world_size_variable = "OMPI_COMM_WORLD_LOCAL_SIZE"
    detected_by = (world_size_variable,)

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Return whether Open MPI's mpirun has set the number of processes."""
        return cls.world_size_variable in environ


class Hydra(Mpirun):
    """mpirun of MPICH and of Intel MPI, whose process manager is called Hydra.

    Source: what mpirun of MPICH 4.0.2 and 5.0.2, and of Intel MPI 2021.19, sets.
    """

    rank_variables = ("PMI_RANK",)
    local_rank_variable = "MPI_LOCALRANKID"
    world_size_variable = "PMI_SIZE"
    local_world_size_variable = "MPI_LOCALNRANKS"
    detected_by = (world_size_variable, local_rank_variable)

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Return whether mpirun has set PMI_SIZE and the local rank: other launchers set only the first.

        In a job, Hydra starts a helper of its own on each node by srun, and its processes have the variables
        of this helper.
        """
        return all(variable in environ for variable in cls.detected_by)


class Unknown(Launcher):
    """A launcher that has started several processes, and whose variables are not read here: it is refused."""

    name = "unknown"
    rank_variables = ()

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Return whether a variable of SEVERAL_FROM tells of several processes.

        Flux may run within an srun step, and its processes have the variables of that step.
        """
        return any(_number_of(environ, name) >= least for name, least in _several_from(environ).items())

    def world_size(self) -> int:
        """Raise a ValueError: each process would take itself for the only one."""
        names = [name for name in _several_from(self.environ) if name in self.environ]
        numbers = ", ".join(f"{name} is {self.environ[name]}" for name in names)
        raise ValueError(
            f"a launcher that manygpus cannot read has started several processes ({numbers}), and each would "
            "train the whole: start them with torchrun, srun or mpirun, or have each set RANK, LOCAL_RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT. If there is to be only one, unset "
            f"{self.to_unset(names)}."
        )


class SingleProcess(Launcher):
    """No launcher: this process is the only one."""

    name = "python"
    rank_variables = ()

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Return True."""
        return True

    def rank(self) -> int:
        """Return 0."""
        return 0

    def local_rank(self) -> int:
        """Return 0."""
        return 0

    def world_size(self) -> int:
        """Return 1."""
        return 1

    def local_world_size(self) -> int:
        """Return 1."""
        return 1

    def num_nodes(self) -> int:
        """Return 1."""
        return 1


# The first that detects itself counts: RANK counts before the variables that a launcher has set for a script
# which sets RANK by them, and those of mpirun, or of a launcher that is not read, before those of the srun
# that has started its helpers.
LAUNCHERS: tuple[type[Launcher], ...] = (
    TorchElastic,
    Submitit,
    SrunByHand,
    ByHand,
    OpenMpi,
    Hydra,
    Unknown,
    Srun,
    SingleProcess,
)


def _several_from(environ: Mapping[str, str]) -> dict[str, int]:
    return SEVERAL_FROM if Srun.detect(environ) else SEVERAL_FROM | SEVERAL_FROM_UNLESS_SRUN


def _number_of(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def launcher_of(environ: Mapping[str, str] = os.environ) -> Launcher:
    """Return what has started the process with these environment variables."""
    kind = next(kind for kind in LAUNCHERS if kind.detect(environ))
    return kind(environ)


def rank_of(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the rank from these variables, even if the others are missing; None if none has it."""
    for kind in LAUNCHERS:
        for variable in kind.rank_variables:
            if environ.get(variable):
                return environ[variable]
    return None


def read() -> DistEnv:
    """Return which process this is; without a launcher's variables it is the only one.

    Sets MASTER_ADDR and MASTER_PORT, where PyTorch looks for them, if the launcher leaves that to its ranks.

    Raises:
        ValueError: if the variables contradict each other; its text says what to do.
    """
    check_variables_of_srun()
    launcher = launcher_of(os.environ)
    dist_env = DistEnv(
        world_size=launcher.world_size(),
        rank=launcher.rank(),
        local_rank=launcher.local_rank(),
        local_world_size=launcher.local_world_size(),
        num_nodes=launcher.num_nodes(),
        launcher=launcher.name,
    )
    address = launcher.main_address()
    contradicts_itself = dist_env.rank >= dist_env.world_size or dist_env.num_nodes > dist_env.world_size
    if contradicts_itself or (dist_env.world_size > 1 and address is None):
        raise ValueError(
            f"rank {dist_env.rank} of {dist_env.world_size} on {dist_env.num_nodes} node(s) cannot meet the "
            f"others: {launcher.how_to_meet}."
        )
    if dist_env.world_size > 1:
        os.environ["MASTER_ADDR"] = address.host
        os.environ["MASTER_PORT"] = address.port
    return dist_env


def check_variables_of_srun() -> None:
    """Raise a ValueError if srun has started this process, and a container hides Slurm's variables."""
    if isinstance(launcher_of(os.environ), SingleProcess) and os.environ.get(STARTED_BY) == "srun":
        raise ValueError(
            "srun has started this process, but the container does not pass on the variables of Slurm, such "
            "as SLURM_PROCID: correct SITE_CONTAINER or SITE_SRUN_ARGS in slurm/site.sh."
        )


def local_world_size_of_step(environ: Mapping[str, str], world_size: int, num_nodes: int) -> int:
    """Return how many of the processes are on this node: as srun tells, or the same number on each.

    SLURM_STEP_TASKS_PER_NODE, such as "2(x3),1", is of the step that this process is in. If that has another
    number of processes, something else has started these.
    """
    entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks_of_nodes = []
    for tasks, repeats in entries:
        tasks_of_nodes += [int(tasks)] * int(repeats or 1)
    node_number = environ.get("SLURM_NODEID", "")
    is_of_this_step = sum(tasks_of_nodes) == world_size and node_number.isdecimal()
    if is_of_this_step and int(node_number) < len(tasks_of_nodes):
        return tasks_of_nodes[int(node_number)]
    return max(world_size // num_nodes, 1)


def job_id(environ: Mapping[str, str] = os.environ) -> str:
    """Return the number of the Slurm job that this process runs in, on one of its nodes; "" if in none.

    The shell of salloc has the number, too, and is on the login node.
    """
    return environ.get("SLURM_JOB_ID", "") if "SLURM_PROCID" in environ else ""


def _slurm_job(environ: Mapping[str, str]) -> str:
    """Return words for the job by which its ranks know each other; "" if this process is in none."""
    number = job_id(environ)
    return f"job {number}" if number else ""


def node_list() -> str:
    """Return the nodes of all processes, in Slurm's words, if srun has started them; else this one's."""
    in_step = job_id() and os.environ.get("SLURM_STEP_NODELIST")
    return in_step or node()


def node() -> str:
    """Return this node's name in Slurm, or else this machine's."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def free_port() -> int:
    """Return a free port to meet at, of PORTS."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
