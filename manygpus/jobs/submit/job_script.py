"""The text of a job script.

`submit.py --dry-run` prints such a text (`of_one_job`), and a sweep sends one for each shape of its jobs
(`of_tasks`).
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from manygpus.jobs.stages import STAGES
from manygpus.jobs.submit.request import Request
from manygpus.jobs.submit.slurm_options import CPUS, OF_SITE, PYTHON, SBATCH, of_variables, srun_options

# In the folder of a sweep: its runs, one in a line, and the logs of their jobs.
COMMANDS, LOGS = "commands.txt", "logs"
# In the folder of a run: links to the folder of its latest job, and to its log.
JOB, LOG = "job", "log.out"
# In the folder of a sweep: what jobs that several runs share are to run (sweeps/pack.py), and behind the name
# of each a link to the folder of its job.
PACKS, OF_PACK = "packs", "-job"


def of_one_job(request: Request) -> str:
    """Return a job script with this site's settings, which sbatch takes from any folder.

    It is not the one that submitit writes: what that one is to call lies pickled in the folder of its job.
    """
    stage = request.stage
    training = [*request.words, *request.arguments]
    if stage.plain:
        # It takes the place of the stage's own script.
        training.insert(0, str(stage.script))
    return _text(
        "A job for this site, by submit.py --dry-run. Save it as job.sh, and submit it: sbatch job.sh",
        _directives(request, output="%x-%j.log"),
        [
            *(f"# {sentence}" for sentence in request.about_code),
            *request.environment,
            f'choose_training {shlex.join(training)} "$@"',
            "",
            *_launch(request),
        ],
    )


def of_tasks(
    request: Request, folder: Path, tasks: Sequence[int], most_at_a_time: int, after: Sequence[str]
) -> str:
    """Return the job script of an array whose task N does line N of the commands in the folder of a sweep.

    Args:
        request: the request of any of the runs, as all ask Slurm for the same; `working_dir` says whether
            each run starts in its own folder.
        folder: the sweep's folder.
        tasks: the numbers of the lines, from 1 on.
        most_at_a_time: how many of the tasks may run at a time.
        after: the numbers of arrays that have to end before.
    """
    log_of_rank = f"{LOGS}/%A_%a_%t_log.out"
    log_of_task = f"{LOGS}/${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}_0_log.out"
    # A plain script is among the words of the line, and takes the place of the stage's.
    script = request.stage.script if request.stage.plain else STAGES[request.stage.name].script
    lines = [
        "set -euo pipefail",
        f"sweep={shlex.quote(str(folder))}",
        "# Line N: the name of the run, which is that of its folder, and the words that name its script.",
        f'eval "set -- $(sed -n "${{SLURM_ARRAY_TASK_ID}}p" "$sweep/{COMMANDS}")"',
        "name_in_sweep=$1",
        "shift",
        f'ln -sfn {shlex.quote(str(request.site.jobs_dir))}/"$SLURM_JOB_ID" "$sweep/$name_in_sweep/{JOB}"',
        f'ln -sfn "$sweep/{log_of_task}" "$sweep/$name_in_sweep/{LOG}"',
        *request.kit,
        f'source {shlex.quote(str(request.job_env))} "$@"',
        "export MANYGPUS_RESULTS_DIR=$sweep/$name_in_sweep",
        f'choose_training {shlex.quote(str(script))} "$@"',
    ]
    if request.working_dir:
        # A module of the user is found from where the sweep was started.
        modules = shlex.quote(str(request.code.code.sent_from)) if request.code else "$PWD"
        lines += [
            f"export PYTHONPATH={modules}${{PYTHONPATH:+:$PYTHONPATH}}",
            'cd "$sweep/$name_in_sweep"',
        ]
    return _text(
        "Runs of a sweep that ask Slurm for the same, by sweep.py: task N of the array does line N of "
        f"{COMMANDS}.",
        _directives(request, **_of_array(folder, tasks, most_at_a_time, after)),
        [
            *lines,
            "",
            "# Each rank but the first has a log of its own.",
            *_launch(request, f'--output="$sweep/{log_of_rank}"', "--open-mode=append"),
        ],
    )


def of_packs(
    request: Request,
    program: Path,
    folder: Path,
    packs: Sequence[int],
    most_at_a_time: int,
    after: Sequence[str],
) -> str:
    """Return the job script of an array whose task N does the runs of pack N in the folder of a sweep.

    Args:
        request: the request for any of these jobs, as all ask Slurm for the same.
        program: what starts the runs in the job.
        folder, most_at_a_time, after: as for `of_tasks`.
        packs: the numbers of the packs.
    """
    return _text(
        f"Jobs that runs of a sweep share, by sweep.py: task N of the array does the runs of {PACKS}/N.",
        _directives(request, **_of_array(folder, packs, most_at_a_time, after)),
        [
            "set -euo pipefail",
            f'pack={shlex.quote(str(folder / PACKS))}/"$SLURM_ARRAY_TASK_ID"',
            f'ln -sfn {shlex.quote(str(request.site.jobs_dir))}/"$SLURM_JOB_ID" "$pack{OF_PACK}"',
            *request.kit,
            f"source {shlex.quote(str(request.job_env))} --plain",
            "# Each run has a monitor of its own.",
            "SITE_MONITOR=off",
            'name_in_sweep="runs of pack $SLURM_ARRAY_TASK_ID"',
            f'TRAINING=({shlex.quote(str(program))} "$pack")',
            'begin_job --plain "${TRAINING[@]}"',
            "",
            *_launch(request),
        ],
    )


def _of_array(
    folder: Path, tasks: Sequence[int], most_at_a_time: int, after: Sequence[str]
) -> dict[str, str]:
    """Return the options of sbatch of an array in the folder of a sweep."""
    asked = {
        "array": f"{','.join(map(str, tasks))}%{most_at_a_time}",
        "output": f"{folder}/{LOGS}/%A_%a_0_log.out",
    }
    if after:
        # What the user has asked to wait for was waited for by these.
        asked["dependency"] = f"afterany:{':'.join(after)}"
    return asked


def _directives(request: Request, **others: str) -> list[str]:
    """Return the #SBATCH lines; `others` are options of sbatch that come before all else."""
    asked = {
        "job-name": request.job_name,
        "nodes": request.resources.nodes,
        "ntasks-per-node": request.resources.tasks_per_node,
        **request.sbatch_options,
        "time": request.timeout_min,
        **SBATCH,
        **of_variables(request.sbatch_variables),
        **others,
    }
    lines = []
    for option, value in asked.items():
        line = f"#SBATCH --{option}"
        if value is not True:
            line += f"={shlex.quote(str(value))}"
        lines.append(line)
    return lines


def _launch(request: Request, *options: str) -> list[str]:
    launch = " ".join(["srun", CPUS, *srun_options(request.resources.tasks), *options])
    return [f"{launch} \\", f'    {OF_SITE} {PYTHON} "${{TRAINING[@]}}"']


def _text(title: str, directives: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join(["#!/bin/bash", f"# {title}", *directives, "", *lines])
