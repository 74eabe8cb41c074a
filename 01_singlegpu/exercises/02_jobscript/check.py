"""Reads what the job script asks for, runs it with a stand-in for srun, and asks Slurm where there is one."""

import argparse
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from manygpus.config.command_line import time_limit
from manygpus.jobs import slurm
from manygpus.workshop.work import Workspace, Wrong, ask_slurm, requested

JOB = "job.sh"
SCRIPT = "train.py"
ANSWERS = """\
# Before you submit: where will the output of the job go, to the terminal or into a file?
prediction = file
"""
HINTS = """\
## 1

A line such as `#SBATCH --ntasks=1` asks for one task. The other options are --gpus-per-node,
--cpus-per-task, --mem, --time and --output. These lines begin with `#SBATCH`, without a space after the `#`.
The last line of the script begins with `srun`.

## 2

In `--output`, Slurm replaces `%j` with the number of the job. `--mem=8G` has a unit; a number without one is
in MB. `set` needs `-e` (end at an error), `-u` (a variable that is not set is an error) and `-o pipefail`:
together `set -euo pipefail`.

## 3

The job starts in the folder that you submit from, the folder of the stage. So the last line is
`srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python exercises/02_jobscript/mine/train.py`.
"""
SOLUTION = {
    "job.sh": """\
@@
-# What Slurm should give the job: lines of #SBATCH, before the first command
+#SBATCH --job-name=first
+#SBATCH --ntasks=1
+#SBATCH --gpus-per-node=1
+#SBATCH --cpus-per-task=2
+#SBATCH --mem=8G
+#SBATCH --time=00:10:00
+#SBATCH --output=first-%j.log
@@
-# What the shell should do when a command fails
+set -euo pipefail
@@
-# The training, started by Slurm as a task of the job
+srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python exercises/02_jobscript/mine/train.py
""",
}
STARTS_WITH = "`prediction`"
SRUN = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'
PYTHON = "python exercises/02_jobscript/mine/train.py"
SET = "set -euo pipefail\n"
WRONG = [
    ("job.sh", "#SBATCH --mem", "# SBATCH --mem", "a comment like any other"),
    ("job.sh", "#SBATCH --mem=8G\n", "", "`#SBATCH --mem=...` is missing"),
    ("job.sh", "#SBATCH --gpus-per-node=1\n", "", "asks for no GPU"),
    ("job.sh", SET, "sleep 1\n#SBATCH --mem=9G\n" + SET, "after the first command"),
    ("job.sh", "--ntasks=1", "--ntasks=2", "the same training twice"),
    ("job.sh", "--gpus-per-node=1", "--gpus-per-node=2", "uses one GPU"),
    ("job.sh", "--cpus-per-task=2\n", "--cpus-per-task=1\n", "share one core"),
    ("job.sh", "00:10:00", "00:00:10", "5 minutes or more"),
    ("job.sh", "00:10:00", "2-00:00:00", "waits longer in the queue"),
    ("job.sh", "00:10:00", "soon", "neither HH:MM:SS"),
    ("job.sh", "--mem=8G", "--mem=8", "in MB"),
    ("job.sh", "--mem=8G", "--mem=900G", "asks for 900 GB"),
    ("job.sh", "--mem=8G", "--mem=0", "all memory of the node"),
    ("job.sh", "#!/bin/bash\n", "#!/bin/sh\n", "may lack"),
    ("job.sh", "#!/bin/bash\n", "#!/bin/bash -l\n", "sets PATH anew"),
    ("job.sh", "#!/bin/bash\n", "\ufeff#!/bin/bash\n", "sbatch refuses it"),
    ("job.sh", SET, "set -uo pipefail\n", "continues after an error"),
    ("job.sh", SET, SET + "cd no/such/folder\n", "before it reaches srun"),
    ("job.sh", "first-%j.log", "first.log", "would write into the same log"),
    ("job.sh", "first-%j.log", "logs/first-%j.log", "no folder logs"),
    ("job.sh", "srun --c", "exec --c", "no line begins with srun"),
    ("job.sh", SRUN, "srun --ntasks=1", "gets only one core"),
    ("job.sh", '"$SLURM_CPUS_PER_TASK"', "1", "#SBATCH asks for 2"),
    ("job.sh", SRUN, SRUN + " -n 2", "starts 2 tasks"),
    ("job.sh", PYTHON, "exercises/02_jobscript/mine/train.py", "needs `python` before it"),
    ("job.sh", PYTHON, "python train.py", "There is no train.py"),
    ("job.sh", PYTHON, 'python "$(dirname "$0")/train.py"', "runs a copy of the script"),
    ("job.sh", PYTHON, PYTHON + " || true", "ends as if it had gone well"),
    ("job.sh", PYTHON, PYTHON + " &", "ends as if it had gone well"),
    ("job.sh", PYTHON, PYTHON + "'", "bash cannot read it"),
]
TOLD_WHEN_DONE = [
    ("job.sh", "#!/bin/bash\n", "#!/usr/bin/env bash\n", "asks for what the training needs"),
    ("job.sh", "--mem=8G", "--mem-per-cpu=4000", "asks for what the training needs"),
]
# Stands in for srun: notes how it was called, and ends as the training is said to.
STAND_IN = """\
#!/bin/sh
exec {python} - "$@" <<'END'
import json, os, sys
called = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "cores": os.environ.get("SRUN_CPUS_PER_TASK")}}
with open({notes!r}, "a") as file:
    print(json.dumps(called), file=file)
sys.exit({exit_code})
END
"""
MOST_GIGABYTES = 64  # for a job that needs 8
FAILURE = 3  # the exit code of a training that fails
SECONDS = 60  # for the script, whose training is not started
HOST_LINE = re.compile(r"^host (\S+), (\w+), (\d+) cores$", re.MULTILINE)


class Started(NamedTuple):
    """How the script ended, what it wrote to stderr, and its last call of srun: None if there was none."""

    exit_code: int
    errors: str
    srun: dict | None


def check(workspace: Workspace) -> str:
    prediction = workspace.answers().word("prediction", "terminal", "file")
    text = workspace.text(JOB)
    content = (workspace.folder / JOB).read_bytes()
    if not content.startswith(b"#!") or b"\r" in content or b"\0" in content:
        raise Wrong(
            f"mine/{JOB} must begin with the line #!/bin/bash, and no line may end as in Windows: otherwise "
            "sbatch refuses it."
        )
    _check_first_line(text)
    stage = workspace.folder.parents[2]
    _check_lines(text.splitlines())
    options = requested(text)
    _check_options(options, stage)
    _check_commands(workspace.folder / JOB, text)
    _check_run(workspace.folder, stage, options["cpus-per-task"])
    asked = ask_slurm(workspace.folder / JOB, stage)
    as_expected = "as you predicted" if prediction == "file" else "not to the terminal"
    return (
        f"The script asks for what the training needs, and starts the training. {asked} "
        f"{_job(options, stage)} The output goes into the file that --output names, {as_expected}, since "
        "sbatch returns before the job begins."
    )


def _check_first_line(text: str) -> None:
    shell, *commands = text.splitlines()
    if not re.match(r"#!\s*(/\S*/|/usr/bin/env )bash\b", shell):
        raise Wrong(f"mine/{JOB} begins with {shell}: write #!/bin/bash, since sh may lack `pipefail`.")
    activates = re.search(r"^\s*(source|\.|module|conda|micromamba) ", "\n".join(commands), re.MULTILINE)
    if re.search(r"\s(-\w*l|--login)", shell) and not activates:
        raise Wrong(
            f"mine/{JOB} begins with {shell}: a login shell reads your profile, which on many clusters sets "
            "PATH anew, so `python` is no longer that of your environment (`No module named torch`). Leave "
            "out -l, or activate the environment in the script."
        )


def _check_lines(lines: list[str]) -> None:
    has_begun = False
    for number, line in enumerate(lines, start=1):
        where = f"mine/{JOB}, line {number}"
        if re.match(r"#\s+SBATCH", line):
            raise Wrong(
                f"{where}: with a space, `# SBATCH` is a comment like any other. Slurm ignores it without a "
                "warning."
            )
        if line.startswith("#SBATCH") and has_begun:
            raise Wrong(f"{where}: Slurm ignores #SBATCH lines after the first command, without a warning.")
        has_begun |= bool(line.strip()) and not line.startswith("#")


def _check_options(options: dict[str, str], stage: Path) -> None:
    for name in ("cpus-per-task", "time", "output"):
        if name not in options:
            raise Wrong(f"mine/{JOB}: a line `#SBATCH --{name}=...` is missing.")
    _check_tasks_and_gpus(options)
    memory = next((options[name] for name in ("mem", "mem-per-cpu", "mem-per-gpu") if name in options), None)
    if memory is None:
        raise Wrong(f"mine/{JOB}: a line `#SBATCH --mem=...` is missing.")
    _check_memory_size(memory, options)
    if not re.fullmatch(r"[2-9]|1\d", options["cpus-per-task"]):
        raise Wrong(
            f"--cpus-per-task={options['cpus-per-task']}: ask for 2 or a few more. With 1, a training and "
            "its loader share one core. Of very many cores, most stay idle."
        )
    try:
        minutes = time_limit(options["time"])
    except argparse.ArgumentTypeError as error:
        raise Wrong(f"--time: {error}.") from None
    if minutes < 5:
        raise Wrong(
            f"--time={options['time']}: Slurm ends the job after that time. Starting Python takes a while, "
            "so ask for 5 minutes or more."
        )
    if minutes > 120:
        raise Wrong(
            f"--time={options['time']}: a job that asks for so much time waits longer in the queue. Ask for "
            "2 hours at most."
        )
    if not re.search(r"(?<!%)%j", options["output"]):
        raise Wrong(
            f"--output={options['output']}: every job would write into the same log. `%j` stands for the "
            "job's number."
        )
    folder = Path(options["output"]).parent
    if not (stage / folder).is_dir():
        raise Wrong(
            f"There is no folder {folder}: a job whose log cannot be written fails without a message."
        )


def _check_memory_size(memory: str, options: dict[str, str]) -> None:
    size = re.fullmatch(r"(\d+)([KMGT]?)B?", memory, re.IGNORECASE)
    if size is None:
        raise Wrong(f"--mem={memory}: Slurm wants a number and a unit, such as 8G.")
    gigabytes = int(size[1]) * {"K": 1 / 1024**2, "M": 1 / 1024, "G": 1, "T": 1024}[size[2].upper() or "M"]
    if "mem-per-cpu" in options and "mem" not in options and options["cpus-per-task"].isdecimal():
        gigabytes *= int(options["cpus-per-task"])
    if gigabytes == 0 or gigabytes > MOST_GIGABYTES:
        amount = "all memory of the node" if gigabytes == 0 else f"{gigabytes:.0f} GB"
        raise Wrong(
            f"--mem={memory} asks for {amount}: the job would wait for a node with so much free memory, and "
            "leave it unused. Ask for 8 GB or a little more."
        )
    if gigabytes < 1:
        raise Wrong(
            f"--mem={memory}: a number without a unit is in MB. Python and PyTorch need several GB: 8G."
        )


def _check_tasks_and_gpus(options: dict[str, str]) -> None:
    tasks = options.get("ntasks", options.get("ntasks-per-node"))
    gpus = next(
        (options[name] for name in ("gpus-per-node", "gpus", "gres", "gpus-per-task") if name in options),
        None,
    )
    if tasks is None:
        raise Wrong(f"mine/{JOB}: a line `#SBATCH --ntasks=...` is missing.")
    if tasks != "1":
        raise Wrong(
            f"With {tasks} tasks, srun would start the same training twice or more. This training is one "
            "process."
        )
    if gpus is None:
        raise Wrong(f"mine/{JOB} asks for no GPU: `#SBATCH --gpus-per-node=...` is missing.")
    if not re.search(r"(^|:)1$", gpus) and not re.fullmatch(r"gpu(:[a-z]\w*)?", gpus):
        raise Wrong(
            f"The script asks for {gpus} GPUs, but this training uses one GPU. The others would be idle."
        )


def _check_commands(path: Path, text: str) -> None:
    syntax = slurm.ask("bash", "-n", str(path))
    if syntax.returncode:
        raise Wrong(
            f"mine/{JOB}: bash cannot read it: {syntax.stderr.strip().splitlines()[0].partition(': ')[2]}"
        )
    commands = re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "))
    flags = " ".join(re.findall(r"^\s*set (.*)", commands, re.MULTILINE))
    flags += text.partition("\n")[0].partition("bash")[2]
    if not re.search(r"-\w*e|errexit", flags):
        raise Wrong(
            f"mine/{JOB}: without `set -euo pipefail` the job continues after an error, and may end as if "
            "nothing had happened."
        )
    if not re.search(r"^\s*(exec\s+)?srun\b", commands, re.MULTILINE):
        raise Wrong(f"mine/{JOB}: no line begins with srun, so Slurm does not start the training as a task.")


def _check_run(folder: Path, stage: Path, cores: str) -> None:
    """Run the script as Slurm would, with an srun that starts nothing, and look at how it was called."""
    started = _run(folder / JOB, stage, cores, exit_code=0)
    if started.srun is None or started.exit_code:
        raise Wrong(
            f"mine/{JOB} ends with exit code {started.exit_code} before it reaches srun, or after it: "
            f"{started.errors.strip()[-300:] or 'without a message'}"
        )
    _check_start(started.srun, folder, cores)
    if _run(folder / JOB, stage, cores, exit_code=FAILURE).exit_code == 0:
        raise Wrong(
            f"mine/{JOB}: when the training fails, the job ends as if it had gone well. The job has to wait "
            "for srun and end with its exit code, so leave out `&` and `||`, and write `set -euo pipefail` "
            "before srun."
        )


def _run(script: Path, stage: Path, cores: str, exit_code: int) -> Started:
    with tempfile.TemporaryDirectory() as place:
        notes = Path(place) / "called"
        commands = Path(place) / "bin"
        commands.mkdir()
        srun = commands / "srun"
        srun.write_text(
            STAND_IN.format(python=shlex.quote(sys.executable), notes=str(notes), exit_code=exit_code)
        )
        # A cluster may have these two, and this machine not.
        for name in ("module", "scontrol"):
            (commands / name).write_text("#!/bin/sh\n")
        for command in commands.iterdir():
            command.chmod(0o755)
        # Slurm runs a copy of the script, in a folder of its own.
        copy = shutil.copy(script, Path(place) / "slurm_script")
        environment = os.environ | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "1",
            "SLURM_SUBMIT_DIR": str(stage),
            "SLURM_CPUS_PER_TASK": cores,
            "SLURM_NTASKS": "1",
        }
        try:
            done = subprocess.run(
                ["bash", *re.findall(r"\s(-[eux]+)\b", script.read_text().partition("\n")[0]), copy],
                cwd=stage,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise Wrong(
                f"mine/{JOB} does not end within {SECONDS} seconds, though srun starts nothing."
            ) from None
        calls = notes.read_text().splitlines() if notes.exists() else []
        return Started(done.returncode, done.stderr, json.loads(calls[-1]) if calls else None)


def _check_start(called: dict, folder: Path, cores: str) -> None:
    line = " ".join(called["arguments"])
    options, python, rest = re.match(r"(.*?)(\S*python[\d.]*(?= )|$)(.*)", line).groups()
    passed = re.search(r"(?:--cpus-per-task|-c)[= ]*(\d+)", options)
    number = passed[1] if passed else called["cores"]
    if number is None:
        raise Wrong(
            f"mine/{JOB}: in Slurm 22.05 to 23.02, srun ignores the --cpus-per-task of #SBATCH, so the "
            "training gets only one core."
        )
    if number != cores:
        raise Wrong(
            f"mine/{JOB}: srun starts the training with {number} core(s), but #SBATCH asks for {cores}. Pass "
            "on $SLURM_CPUS_PER_TASK."
        )
    tasks = re.search(r"(?:--ntasks|-n)[= ]*(\d+)", options)
    if tasks and tasks[1] != "1":
        raise Wrong(f"mine/{JOB}: srun starts {tasks[1]} tasks, but #SBATCH asks for one.")
    if not python:
        raise Wrong(
            f"mine/{JOB}: srun starts `{line}`, but {SCRIPT} is not a program by itself: it needs `python` "
            "before it."
        )
    scripts = [word for word in rest.split() if word.endswith(SCRIPT)]
    if not scripts:
        raise Wrong(f"mine/{JOB}: srun starts `{python}{rest}`, which is not {SCRIPT}.")
    script = Path(called["folder"]) / scripts[0]
    if scripts[0].startswith("/") and not script.exists():
        raise Wrong(
            f"mine/{JOB}: the script looks for {SCRIPT} in its own folder. But Slurm runs a copy of the "
            "script from a different folder, so write the path from the folder where you submit."
        )
    if not script.exists():
        raise Wrong(
            f"There is no {scripts[0]} in the folder where the job starts: that is the folder of the stage, "
            "from which you submit."
        )


def _job(options: dict[str, str], stage: Path) -> str:
    """Return a sentence on the job that has run.

    Raises:
        Wrong: if there is a Slurm, and no job has run, or it failed.
    """
    pattern = glob.escape(options["output"]).replace("%x", options.get("job-name", JOB))
    pattern = re.sub("(%j)+", "[0-9]*", pattern)
    folder = Path("/") if pattern.startswith("/") else stage
    logs = [log for log in folder.glob(pattern.strip("/") or "*") if log.is_file()]
    logs.sort(key=lambda log: log.stat().st_mtime)
    if not logs:
        if slurm.why_not_here():
            return "Submit it when you are on a cluster."
        raise Wrong(
            "The script is right, and Slurm is available here: submit it, and check again after the job."
        )
    said = logs[-1].read_text(errors="replace")
    host = HOST_LINE.search(said)
    if not host or "\ntrained " not in said:
        raise Wrong(
            f"{logs[-1].name} has no line `trained ...`: wait if the job still runs. Otherwise its last "
            f"lines say what happened: {said.strip()[-200:]}"
        )
    return f"Your job has run on {host[1]} ({host[2]}), with {host[3]} cores."
