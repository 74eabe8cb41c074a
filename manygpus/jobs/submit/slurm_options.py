"""What a job asks Slurm for, in the form that its site wants: SITE_GPUS, SITE_CPUS and SITE_MEM of site.sh.

Some sites want a kind of GPU, or take --gres or --gpus only; some refuse --mem; some count cores and memory
by the GPU. Each of the three is a template of options of sbatch. It may have a %d, for a number, and what
that counts follows from the option it belongs to.

Here are also the options in which all job scripts agree. The executor in the submit.py of a stage and the
slurm_submit*.sh, which learners read, say the same in their own form; tests/jobs/test_launch_lines.py holds
them to this.

It needs only the standard library.
"""

import math
import shlex
from collections.abc import Mapping

from manygpus import project
from manygpus.errors import UserError
from manygpus.jobs.site import OPTION_TEMPLATES, Site
from manygpus.jobs.stages import Resources

# Of the host: a process with CUDA and NCCL takes 2 to 4, and loaders come on top.
MEMORY_PER_GPU_GB = 8
# SBATCH_QOS is --qos of sbatch, and so on, but for these (man sbatch, INPUT ENVIRONMENT VARIABLES).
OPTIONS_OF_OTHER_NAMES = {"SBATCH_TIMELIMIT": "time", "SBATCH_MEM_PER_NODE": "mem"}
# The forms in which sbatch takes memory.
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
# What every job asks sbatch for, besides its size. USR2 comes 60 seconds before the end: the ranks save a
# checkpoint, and the job goes back to the queue, and continues in the same log.
SBATCH = {"signal": "USR2@60", "requeue": True, "open-mode": "append"}
# In Slurm 22.05 to 23.02 srun does not inherit it from sbatch, and every rank would have one core.
CPUS = '--cpus-per-task="$SLURM_CPUS_PER_TASK"'
# If a rank fails, srun ends the others; if one leaves early, after 60 seconds.
KILL_ON_BAD_EXIT, WAIT = "--kill-on-bad-exit=1", "--wait=60"
# Of the site; scripts/job_env.sh sets both.
OF_SITE = '"${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}"'
# What surrounds a rank: the job's Python, or that in which the kit is installed (scripts/site_env.sh).
PYTHON = "python" if project.IS_CHECKOUT else '"$MANYGPUS_PYTHON"'


def srun_options(tasks: int) -> list[str]:
    """Return the options by which srun ends the ranks of a job together; one task has nobody to wait for."""
    return [KILL_ON_BAD_EXIT, WAIT] if tasks > 1 else [KILL_ON_BAD_EXIT]


def sbatch_options(site: Site, shape: Resources) -> dict[str, str]:
    """Return the options of sbatch by which a job of this shape asks for its GPUs, cores and memory.

    They are named without their dashes: {"gres": "gpu:a100:2", "cpus-per-task": "2", "mem": "16G"}. A number
    is rounded up. Nodes and tasks are not among them, as every Slurm takes these in one form.

    Raises:
        UserError: for templates of the site that are no such options.
    """
    templates = dict(site.option_templates)
    if not shape.gpus:
        del templates["SITE_GPUS"]
        for setting, template in templates.items():
            if "per-gpu=" in template:
                # It could not be counted by the GPU, and is asked for in the usual form.
                templates[setting] = OPTION_TEMPLATES[setting]
    if any(option_of(name) in MEMORY_OPTIONS for name, value in site.sbatch.items() if value):
        # sbatch takes memory in one form only, and the site's variable is not to be overruled.
        del templates["SITE_MEM"]
    options = {}
    for setting, template in templates.items():
        options |= _options(setting, template, _numbers(setting, shape))
    return options


def trial_options(site: Site, shape: Resources, minutes: int) -> dict[str, str]:
    """Return all options by which Slurm is asked about a job of this shape with this time limit.

    Raises:
        UserError: as `sbatch_options`.
    """
    return {
        "nodes": str(shape.nodes),
        "ntasks-per-node": str(shape.tasks_per_node),
        "time": str(minutes),
        **sbatch_options(site, shape),
    }


def option_of(variable: str) -> str:
    """Return the option of sbatch that an SBATCH_* variable stands for, without its dashes."""
    option = variable.removeprefix("SBATCH_").lower().replace("_", "-")
    return OPTIONS_OF_OTHER_NAMES.get(variable, option)


def of_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the options that SBATCH_* variables stand for, named without their dashes."""
    return {option_of(name): value for name, value in variables.items()}


def _numbers(setting: str, shape: Resources) -> dict[str, int]:
    """Return what %d stands for, by the option that it belongs to."""
    cpus_per_node = shape.cpus_per_task * shape.tasks_per_node
    processes_per_node = shape.tasks_per_node * shape.processes_per_task
    gb_per_node = MEMORY_PER_GPU_GB * max(shape.gpus_per_node, processes_per_node)
    gpus = max(shape.gpus_per_node, 1)
    gpus_per_task = math.ceil(shape.gpus_per_node / shape.tasks_per_node)
    return {
        "SITE_GPUS": {
            "gpus-per-node": shape.gpus_per_node,
            "gres": shape.gpus_per_node,
            "gpus": shape.gpus,
            "gpus-per-task": gpus_per_task,
            "tres-per-task": gpus_per_task,
        },
        "SITE_CPUS": {
            "cpus-per-task": shape.cpus_per_task,
            "cpus-per-gpu": math.ceil(cpus_per_node / gpus),
        },
        "SITE_MEM": {
            "mem": gb_per_node,
            "mem-per-cpu": math.ceil(gb_per_node / cpus_per_node),
            "mem-per-gpu": math.ceil(gb_per_node / gpus),
        },
    }[setting]


def _options(setting: str, template: str, numbers: dict[str, int]) -> dict[str, str]:
    """Return the options of a setting's template, with these numbers in place of %d.

    Raises:
        UserError: if it has something else than options, or a %d where no number is known.
    """
    options = {}
    for word in shlex.split(template):
        option, _, value = word.removeprefix("--").partition("=")
        has_number = "%" in value
        is_option = word.startswith("--") and value != ""
        if not is_option or (has_number and option not in numbers):
            raise UserError(
                f"{setting} of {project.site_name()} has {word!r}: write options of sbatch with = and a "
                f"value, as in {OPTION_TEMPLATES[setting]}. A %d may be in --{', --'.join(numbers)}."
            )
        if setting == "SITE_MEM" and has_number and value != "%dG":
            raise UserError(
                f"{setting} of {project.site_name()} has {word!r}: write GB, as in --{option}=%dG."
            )
        options[option] = value.replace("%d", str(numbers.get(option)))
    if setting == "SITE_GPUS" and template and "%d" not in template:
        raise UserError(
            f"SITE_GPUS of {project.site_name()} has no %d, so that every job would hold the same number of "
            f"GPUs: write it as in {OPTION_TEMPLATES[setting]}."
        )
    return options
