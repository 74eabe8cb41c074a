"""How a job begins, decided from what Slurm says of it and from the variables of its shell.

It is asked once site.sh is read and Python is ready (`begin_job` in scripts/job_env.sh), and answers in shell
code. It needs no packages.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from manygpus import frozen_code, job_folder, launchers, project
from manygpus.errors import UserError
from manygpus.frozen_code import FrozenCode
from manygpus.job_folder import Script
from manygpus.jobs import slurm
from manygpus.jobs.user_program import Program, newest
from manygpus.log_words import CODE, GPUS, JOB, NODES, PYTHON, SCRIPT, line, printable
from manygpus.monitor import samples

# What sbatch sets if a job asks for it, and the field that its record then has.
FIELD_OF_VARIABLE = {
    "SLURM_GPUS": "TresPerJob",
    "SLURM_GPUS_PER_NODE": "TresPerNode",
    "SLURM_GPUS_PER_SOCKET": "TresPerSocket",
    "SLURM_GPUS_PER_TASK": "TresPerTask",
    "SLURM_TRES_PER_TASK": "TresPerTask",
    "SLURM_NTASKS_PER_GPU": "NtasksPerTRES",
    "SLURM_NTASKS_PER_TRES": "NtasksPerTRES",
    "SLURM_CPUS_PER_GPU": "CpusPerTres",
    "SLURM_MEM_PER_NODE": "MinMemoryNode",
    "SLURM_MEM_PER_CPU": "MinMemoryCPU",
    "SLURM_MEM_PER_GPU": "MemPerTres",
    "SLURM_GPU_BIND": "TresBind",
    "SLURM_TRES_BIND": "TresBind",
    "SLURM_GPU_FREQ": "TresFreq",
}
SPARE_NODES = "MANYGPUS_SPARE_NODES"  # the variable with the number of nodes that a job can lose
# What sbatch may set, and a record does not have.
NOT_RECORDED = re.compile("SLURM_DIST.*|SLURM_MEM_BIND.*|SLURM_CPU_FREQ.*|SLURM_OVERCOMMIT")


@dataclass(frozen=True)
class JobStart:
    """What is known of a job when it begins.

    Attributes:
        record: what `scontrol --oneliner show job` says of it; "" if it does not answer.
        variables: the variables of its shell, those of Slurm and of the site that count here.
        set_aside: options of srun in its shell, which srun does not get so far. Some may be left from another
            job that has sent this one. What the site itself sets is not among them.
        exported: the names of all variables that its processes would get.
        first_node: its name in Slurm; "" if it is unknown.
        first_node_record: what `scontrol --oneliner show node` says of that.
        addresses: the addresses of the node that this is asked on.
        signal_lines: the lines of the job script that begin with `#SBATCH --signal=`.
        gpu_names: the names of the GPUs, one in each line, as nvidia-smi prints them.
        version: the version of the code in `repository`; "" if git does not know it.
        repository: this checkout, or the job's frozen copy of it.
        folder: the job's folder.
        program: its script, where that does not use the kit.
        restarts_in_job: how often it has started again in its nodes since it came from the queue.
        array_of_runs: whether it is of a sweep, each task of which has arguments of its own
            (submit/job_script.py).
    """

    record: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    set_aside: Mapping[str, str] = field(default_factory=dict)
    exported: tuple[str, ...] = ()
    first_node: str = ""
    first_node_record: str = ""
    addresses: tuple[str, ...] = ()
    signal_lines: str = ""
    gpu_names: str = ""
    version: str = ""
    repository: str = ""
    folder: Path = Path()
    program: Program | None = None
    restarts_in_job: int = 0
    array_of_runs: bool = False

    @property
    def plain(self) -> bool:
        """Return whether its script does not use the kit."""
        return self.program is not None

    @property
    def recorded(self) -> dict[str, str]:
        """Return the fields of its record; none if what scontrol has printed is none."""
        return slurm.fields(self.record) if "JobId=" in self.record else {}

    @property
    def restarts(self) -> int:
        """Return how often it has come back from the queue.

        A job that is sent by another has the other's number in its environment.
        """
        recorded = self.recorded.get("Restarts", "")
        if recorded.isdecimal():
            return int(recorded)
        return _number(self.variables, "SLURM_RESTART_COUNT")

    @property
    def earlier_starts(self) -> int:
        """Return how often it has started before, after the queue or again in its nodes."""
        return self.restarts + self.restarts_in_job


@dataclass(frozen=True)
class StartPlan:
    """How a job begins.

    Attributes:
        unset: variables to unset.
        exports: variables to set, for all processes.
        assigns: variables to set for the job script alone.
        header: the first lines of its log.
        asked: what it has asked Slurm for, which the verdict of its samples compares with what it used.
        checks_nodes: whether its nodes are measured before its ranks start, if the site wants that.
    """

    unset: list[str]
    exports: dict[str, str]
    assigns: dict[str, str]
    header: list[str]
    asked: samples.RequestedResources
    checks_nodes: bool = False


def decide(job: JobStart, resolve: Callable[[str], str | None], now: datetime) -> StartPlan:
    """Return how the job begins.

    Args:
        job: what is known of it.
        resolve: returns the address that a name has on this node; None if it has none.
        now: the time, for the log.

    Raises:
        UserError: if it cannot train.
    """
    _refuse_an_array(job)
    _refuse_a_short_limit(job)
    starts_its_ranks = job.program is not None and job.program.one_process_per_node
    if starts_its_ranks:
        _refuse_several_tasks(job)
    exports = {name: value for name, value in job.set_aside.items() if _is_of_this_job(name, job)}
    assigns: dict[str, str] = {}
    unset = [name for name in job.set_aside if name not in exports]
    unset += [name for name in job.exported if launchers.LEFT_BY_LAUNCHERS.fullmatch(name)]
    variables = {**job.variables, **exports}

    if job.restarts:
        exports["SLURM_RESTART_COUNT"] = str(job.restarts)
    else:
        unset.append("SLURM_RESTART_COUNT")

    gpus_per_node = _gpus_per_node(variables)
    if gpus_per_node:
        exports.pop("SLURM_GPUS", None)
        exports["SLURM_GPUS_PER_NODE"] = str(gpus_per_node)
        unset.append("SLURM_GPUS")

    if SPARE_NODES in job.variables:
        exports |= _without_spare_nodes(job)
        unset.append(SPARE_NODES)  # it is not for the jobs that this one sends

    cpus_per_task = _cpus_per_task_asked_for(job)
    if cpus_per_task is None:
        cpus_per_task = _share_of_cpus(variables)
        assigns["SLURM_CPUS_PER_TASK"] = str(cpus_per_task)
        unset.append("SLURM_CPUS_PER_TASK")
    ranks_per_task = max(_number(variables, "SLURM_GPUS_ON_NODE"), 1) if starts_its_ranks else 1
    exports["OMP_NUM_THREADS"] = str(_threads(variables, max(cpus_per_task // ranks_per_task, 1)))

    address = _meeting_address(job, resolve)
    port = _meeting_port(variables)
    exports["MASTER_ADDR"] = address
    exports["MASTER_PORT"] = port
    interface = variables.get("SITE_NETWORK_INTERFACE")
    if interface:
        exports["NCCL_SOCKET_IFNAME"] = interface
        exports["GLOO_SOCKET_IFNAME"] = interface

    tasks_per_node = variables.get("SLURM_TASKS_PER_NODE", "1")
    name = variables.get("SLURM_JOB_NAME", "")
    numbers = _numbers(variables["SLURM_JOB_ID"], job)
    gpus_on_node = _number(variables, "SLURM_GPUS_ON_NODE")
    in_job = f" and {job.restarts_in_job} in these nodes" if job.restarts_in_job else ""
    return StartPlan(
        unset=unset,
        exports=exports,
        assigns=assigns,
        header=[
            line(JOB, f"{numbers} {name}, restart {job.restarts}{in_job}, {now:%FT%T%z}"),
            line(
                NODES,
                f"{_nodes(job)}, tasks per node {tasks_per_node}, CPUs per task {cpus_per_task}",
            ),
            # Other nodes may have fewer (seen: --gpus=3, and three tasks with --gpus-per-task=1).
            line(GPUS, f"{gpus_on_node} on {job.first_node}: {_count_by_name(job.gpu_names)}"),
            code_line(job.version, job.repository, frozen_code.of(Path(job.repository))),
            f"meet at {address}:{port}; checkpoints and notes in {job.folder}",
        ],
        asked=samples.RequestedResources(
            cpus_per_task=cpus_per_task,
            tasks_per_node=_counts(tasks_per_node)[0],
            mb_per_node=_number(variables, "SLURM_MEM_PER_NODE"),
            # All nodes of the practice cluster are one machine.
            exclusive_helps=variables.get("SLURM_CLUSTER_NAME") != "practice",
        ),
        # A job that starts again in its nodes has measured them before.
        checks_nodes=_number(variables, "SLURM_JOB_NUM_NODES") > 1 and not job.restarts_in_job,
    )


def _without_spare_nodes(job: JobStart) -> dict[str, str]:
    """Return the variables of srun for a job with spare nodes: its ranks are on as many nodes as it needs.

    Slurm takes a node that fails out of the job (--no-kill), and srun then chooses among the others.

    Raises:
        UserError: if too few nodes are left, or so many spare ones make no sense.
    """
    text = job.variables[SPARE_NODES]
    nodes = _number(job.variables, "SLURM_JOB_NUM_NODES")
    # Slurm puts a step on nodes that have none so far, if they are enough: the monitor would have other nodes
    # than the ranks.
    if not text.isdecimal() or 2 * int(text) >= nodes:
        raise UserError(
            f"{SPARE_NODES} is {text}, and the job has {nodes} node(s): ask for the nodes of the ranks and "
            "the spare ones together (sbatch --nodes), and for fewer spare ones than those of the ranks."
        )
    needed = nodes - int(text)
    left = slurm.number_of_nodes(job.recorded)
    if left is not None and left < needed:
        raise UserError(
            f"{left} of the job's {nodes} nodes are left, and it needs {needed}: submit it again."
        )
    ranks = {
        name: str(_number(job.variables, name) * needed // nodes)
        for name in ("SLURM_NTASKS", "SLURM_NPROCS")
        if name in job.variables
    }
    return {"SLURM_NNODES": str(needed), "SLURM_JOB_NUM_NODES": str(needed), **ranks}


def _nodes(job: JobStart) -> str:
    """Return the nodes of the job in Slurm's words."""
    spare = job.variables.get(SPARE_NODES)
    if spare is None:
        return job.variables["SLURM_JOB_NODELIST"]
    left = job.recorded.get("NodeList", job.variables["SLURM_JOB_NODELIST"])
    return f"{left} (asked for with {spare} to spare)"


def _numbers(number: str, job: JobStart) -> str:
    """Return the number of the job; of one of an array what scancel takes before it, as 17_2 (19)."""
    element = slurm.array_element(job.record)
    return f"{element} ({number})" if element else number


def _refuse_an_array(job: JobStart) -> None:
    if "ArrayTaskId" in job.recorded and not job.plain and not job.array_of_runs:
        raise UserError(
            "this is a job of an array, and all its jobs would train the same: leave out --array."
        )


def _refuse_a_short_limit(job: JobStart) -> None:
    """Raise a UserError for a job that is asked to save as soon as it begins.

    It would come back without end, and train a step each time.
    """
    limit = slurm.seconds(job.recorded.get("TimeLimit", ""))
    ran = slurm.seconds(job.recorded.get("RunTime", ""))
    if job.plain or limit is None or ran is None:
        return
    asked = re.findall(r"^#SBATCH --signal=.*@(\d+)", job.signal_lines, re.MULTILINE)
    seconds_to_save = int(asked[-1]) if asked else 0
    if limit - ran <= seconds_to_save:
        raise UserError(
            f"this job has to save and stop {seconds_to_save} s before its time limit, which leaves no time "
            "to train: give it more --time."
        )


def _refuse_several_tasks(job: JobStart) -> None:
    tasks_per_node = job.variables.get("SLURM_TASKS_PER_NODE", "1")
    if _counts(tasks_per_node) != [1]:
        raise UserError(
            f"--one-process-per-node, and this job has {tasks_per_node} tasks per node: give sbatch "
            "--ntasks-per-node=1, and as many --gpus-per-node as the script is to use."
        )


def _is_of_this_job(name: str, job: JobStart) -> bool:
    """Return whether this option of srun is of this job, rather than left from the one that has sent it."""
    if NOT_RECORDED.fullmatch(name):
        # Only processes that srun has started have the nodes of their step, and so these are of their job.
        # (A job script has a SLURM_STEP_ID of its own in newer Slurm, seen: -5 by 26.05.)
        return "SLURM_STEP_NODELIST" not in job.set_aside
    if name not in FIELD_OF_VARIABLE:  # only srun sets or reads it
        return False
    if not job.recorded:
        return True
    recorded = job.recorded.get(FIELD_OF_VARIABLE[name])
    return recorded is not None and not (name == "SLURM_MEM_PER_NODE" and recorded.startswith("0"))


def _gpus_per_node(variables: Mapping[str, str]) -> int | None:
    """Return the GPUs of each node for a job that has asked for a number of GPUs in all (--gpus).

    That would be the number of each step, also where a step is on one node, which has less; and where a node
    has one task, Slurm hands out fewer. None if it has not asked so, or its nodes differ.
    """
    asked = variables.get("SLURM_GPUS", "").rpartition(":")[2]
    on_node = _number(variables, "SLURM_GPUS_ON_NODE")
    in_all = on_node * _number(variables, "SLURM_JOB_NUM_NODES")
    return on_node if asked == str(in_all) else None


def _cpus_per_task_asked_for(job: JobStart) -> int | None:
    """Return the CPUs of a task that this job asks for by --cpus-per-task; None if it does not."""
    asked = _number(job.variables, "SLURM_CPUS_PER_TASK")
    recorded = re.search(r" CPUs/Task=(\d+)", job.record)
    if job.recorded and not (recorded and int(recorded[1]) == asked):
        return None
    return asked or None


def _share_of_cpus(variables: Mapping[str, str]) -> int:
    """Return a task's share of the CPUs that the job has on a node.

    Where nodes differ, it is that of the fewest CPUs and the most tasks: srun refuses what one of them does
    not have.
    """
    cpus = _counts(variables.get("SLURM_JOB_CPUS_PER_NODE", "1"))
    tasks = [1]
    if variables.get("SLURM_NTASKS"):
        tasks = _counts(variables.get("SLURM_TASKS_PER_NODE", "1"))
    return max(min(cpus) // max(tasks), 1)


def _counts(text: str) -> list[int]:
    """Return the different numbers of tasks or CPUs on a node, in Slurm's words, such as 4(x2),2."""
    return [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?", text)] or [1]


def _threads(variables: Mapping[str, str], cpus_per_rank: int) -> int:
    """Return OMP_NUM_THREADS of the site or of the user, else a thread for each CPU of a rank."""
    wanted = variables.get("OMP_NUM_THREADS", "")
    if not wanted:
        return cpus_per_rank
    first = wanted.partition(",")[0]  # OpenMP takes a list, for threads within threads
    if not re.fullmatch("[1-9][0-9]*", first):
        raise UserError(f"OMP_NUM_THREADS is '{first}', which is not a number of threads: unset it.")
    return int(first)


def _meeting_address(job: JobStart, resolve: Callable[[str], str | None]) -> str:
    """Return MASTER_ADDR: the site's own, as for a faster network, or the first node."""
    here = launchers.node()
    site_value = job.variables.get("MASTER_ADDR")
    if site_value:
        address = resolve(site_value)
        if address not in job.addresses:
            raise UserError(
                f"MASTER_ADDR={site_value} of {project.site_name()} is {address or 'unknown'}, no address of "
                f"{here}, where rank 0 runs: correct it, or leave it out."
            )
        return site_value
    if not job.first_node:
        nodes = job.variables.get("SLURM_JOB_NODELIST")
        raise UserError(f"scontrol does not name the nodes of this job ({nodes}): report it to your admin.")
    if resolve(job.first_node):
        return job.first_node
    by_slurm = slurm.fields(job.first_node_record).get("NodeAddr", "")
    if by_slurm and resolve(by_slurm):
        return by_slurm
    raise UserError(
        f"neither {job.first_node} nor its address in Slurm ({by_slurm}) can be resolved on {here}: report "
        "it to your admin."
    )


def _meeting_port(variables: Mapping[str, str]) -> str:
    """Return MASTER_PORT: the site's own, or one by the job's number: two jobs on a node do not collide."""
    site_value = variables.get("MASTER_PORT")
    if site_value:
        return site_value
    first, last = map(int, variables["SITE_PORTS"].split("-"))
    return str(first + int(variables["SLURM_JOB_ID"]) % (last - first + 1))


def _count_by_name(gpu_names: str) -> str:
    counts = Counter(gpu_names.splitlines())
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no nvidia-smi on this node"


def _number(variables: Mapping[str, str], name: str) -> int:
    """Return the number in a variable of Slurm; 0 if there is none."""
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else 0


def begin(job: JobStart, script: Script | None, resolve: Callable[[str], str | None], monitored: bool) -> str:
    """Make the job's folder ready, and return what its shell has to do.

    Args:
        job: what is known of it.
        script: what it runs; None if its job script does not say so.
        resolve: returns the address that a name has on this node; None if it has none.
        monitored: whether its nodes are sampled.

    Raises:
        UserError: if it cannot train.
    """
    # Slurm may start a preempted job once more after it has ended well: outcome_rules.py says when.
    if job.restarts and job_folder.has_ended_for_good(job.folder):
        words = "this job has already ended well, and does nothing more: to train again, submit it again"
        return f"begun=1\n{print_in_shell([words])}\nexit"
    plan = decide(job, resolve, datetime.now().astimezone())
    try:
        if job.earlier_starts == 0:
            job_folder.set_aside(job.folder)
        job_folder.prepare(job.folder, plain=job.plain)
        samples.prepare(job.folder / samples.FOLDER, plan.asked if monitored else None)
    except OSError as error:
        raise UserError(
            f"{job.folder} cannot be created ({error.strerror}): set SITE_RESULTS_DIR or SITE_SCRATCH_DIR in "
            f"{project.site_name()} to a shared folder of yours."
        ) from None
    if script:
        with suppress(OSError):  # a full disk
            job_folder.keep_script(job.folder, script)
        head = [*plan.header, *script_lines(script, job.repository, job.earlier_starts), ""]
        plan = replace(plan, header=head)
    return as_shell(plan, job.program)


def script_lines(script: Script, kit: str, earlier_starts: int = 0) -> list[str]:
    """Return the lines of the log's head on what the job runs.

    Args:
        script: what it runs.
        earlier_starts: how often the job has started before.
        kit: the folder of this checkout, or of the job's copy, whose commit the log has already.
    """
    name = ("-m", script.module) if script.module else (script.path,)
    words = [printable(word) for word in (*name, *script.arguments)]
    lines = [line(SCRIPT, " ".join(words))]
    if earlier_starts and script.when_requeued and not newest(script.when_requeued):
        lines.append("nothing is there so far that --when-requeued names: it starts anew")
    if script.python:
        lines.append(line(PYTHON, script.python))
    if script.frozen_in:
        code = frozen_code.of(Path(script.frozen_in))
        if code != frozen_code.of(Path(kit)):
            lines.append(code_line(script.commit, script.repository, code))
        return lines
    path, kit_folder = Path(script.path).resolve(), Path(kit).resolve()
    is_of_the_kit = path.is_relative_to(kit_folder) and Path(script.repository or kit).resolve() == kit_folder
    if not is_of_the_kit:
        lines.append(
            code_line(script.commit, script.repository or str(path if path.is_dir() else path.parent))
        )
    return lines


def code_line(commit: str, folder: str, code: FrozenCode | None = None) -> str:
    """Return the line of the log's head on the code in a folder, which is at this commit, if git knows it.

    If the job runs a frozen copy, `code` says all.
    """
    if code:
        return line(CODE, f"{code.commit_in_words} in {code.checkout}, frozen in {code.folder}")
    described = commit or "not a git checkout"
    if commit.endswith("-dirty"):
        described = f"{commit.removesuffix('-dirty')} with changes"
    return line(CODE, f"{described} in {folder}")


def as_shell(plan: StartPlan, program: Program | None = None) -> str:
    """Return the plan as shell code, for a job that runs this program."""
    lines = ["begun=1"]
    if plan.checks_nodes:
        lines.append("checks_nodes=1")
    if plan.unset:
        lines.append(f"unset {' '.join(plan.unset)}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.exports.items()]
    lines += [f"{name}={shlex.quote(value)}" for name, value in plan.assigns.items()]
    if program and program.when_requeued is not None:
        lines.append("resumes_unsaved=1")
    lines.append(print_in_shell(plan.header))
    return "\n".join(lines)


def print_in_shell(lines: Iterable[str]) -> str:
    """Return shell code that prints these lines."""
    return f"printf '%s\\n' {shlex.join(lines)}"
