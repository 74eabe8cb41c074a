"""The stages: where they are, what they run on, and the shape of their jobs.

It needs only the standard library.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from manygpus.config.command_line import check_divides
from manygpus.errors import REPOSITORY, UserError
from manygpus.jobs.site import SCRIPTS
from manygpus.jobs.user_program import Program
from manygpus.record.columns import DDP, DP, SINGLE

# What every job script sources.
JOB_ENV = SCRIPTS / "job_env.sh"
STAGE_FOLDERS = {SINGLE: "01_singlegpu", DP: "02_multigpu_dp", DDP: "03_multigpu_ddp"}


@dataclass(frozen=True)
class Stage:
    """A stage, and what it runs on: one process per GPU, or one process with all GPUs of a node.

    Attributes:
        is_users_own: whether `script` is a user's own instead of the stage's; it runs on the same.
        program: the script as a program that does not use the kit, and gets only its own arguments.
    """

    name: str
    script: Path
    default_gpus: int
    process_per_gpu: bool = False
    is_users_own: bool = False
    program: Program | None = None

    @property
    def plain(self) -> bool:
        """Return whether the script does not use the kit."""
        return self.program is not None

    @property
    def label(self) -> str:
        """Return the name of its runs, also for jobs and folders, without characters that would do harm."""
        if not self.is_users_own:
            return self.name
        return re.sub(r"[^\w .+-]", "_", self.program.label if self.program else self.script.stem)

    @property
    def words(self) -> list[str]:
        """Return the words by which a command line names a user's own script, before its arguments."""
        return self.program.words if self.program else ["--script", str(self.script)]

    @property
    def command(self) -> list[str]:
        """Return the words by which its user would start it, before its arguments."""
        return self.program.command if self.program else ["python", str(self.script)]

    @property
    def job_name(self) -> str:
        """Return the name of its jobs; a user's own script is not one of our trainings on MNIST."""
        return self.label if self.is_users_own else f"mnist-{self.name}"

    def with_program(self, program: Program) -> "Stage":
        """Return the stage with a program that does not use the kit."""
        return replace(self, script=program.path, is_users_own=True, program=program)

    def with_script(self, text: str) -> "Stage":
        """Return the stage with the user's own script, a path from the current folder or from the stage's.

        Raises:
            UserError: if it does not exist, or is not a Python script.
        """
        script = Path(text)
        if not script.is_file():
            script = self.script.parent / text
        if not script.is_file():
            raise UserError(f"there is no script {text}, here or in {self.script.parent}: correct its name.")
        if script.suffix != ".py":
            raise UserError(f"{text} does not end in .py: give a Python script.")
        return replace(self, script=script.absolute(), is_users_own=True)


STAGES = {
    stage.name: stage
    for stage in (
        Stage(SINGLE, REPOSITORY / STAGE_FOLDERS[SINGLE] / "mnist_singlegpu.py", default_gpus=1),
        Stage(DP, REPOSITORY / STAGE_FOLDERS[DP] / "mnist_multigpu.py", default_gpus=2),
        Stage(DDP, REPOSITORY / STAGE_FOLDERS[DDP] / "mnist_ddp.py", default_gpus=2, process_per_gpu=True),
    )
}


@dataclass(frozen=True)
class Resources:
    """The shape of a job, in Slurm's words.

    Attributes:
        processes_per_task: those that a task starts, each with memory of its own; 1 if it starts none, or as
            many as it has GPUs.
    """

    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    processes_per_task: int = 1

    def __str__(self) -> str:
        return f"{self.nodes} node(s), {self.tasks} process(es), {self.gpus} GPU(s)"

    @property
    def tasks(self) -> int:
        """Return the number of processes of the whole job."""
        return self.nodes * self.tasks_per_node

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the whole job."""
        return self.nodes * self.gpus_per_node


def resources(stage: Stage, gpus: int, nodes: int = 1, cpus_per_gpu: int = 2) -> Resources:
    """Return the shape of a job of `stage` with `gpus` in all; 0: one process per node, on its CPU.

    Where the program starts its ranks itself, it is one process per node, too, with all the GPUs there.

    Raises:
        UserError: if the stage cannot use that many, or they do not divide evenly among the nodes.
    """
    if stage.name == SINGLE and gpus > 1:
        raise UserError(f"stage single uses 1 GPU, not {gpus}: use stage 02, 02_multigpu_dp, or 03.")
    if nodes > 1 and not stage.process_per_gpu:
        raise UserError(
            f"stage {stage.name} is one process and cannot leave its node: leave out --nodes {nodes}, or use "
            "stage 03, 03_multigpu_ddp."
        )
    check_divides(gpus, nodes, "nodes", "--gpus")
    gpus_per_node = gpus // nodes
    starts_its_ranks = stage.program is not None and stage.program.one_process_per_node
    process_per_gpu = stage.process_per_gpu and not starts_its_ranks
    tasks_per_node = max(gpus_per_node, 1) if process_per_gpu else 1
    gpus_per_task = max(gpus_per_node // tasks_per_node, 1)
    return Resources(
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_gpu * gpus_per_task,
    )
