"""Reads the job script as Slurm and the shell would, asks Slurm where it is, and looks for the log."""

import argparse
import glob
import re
from pathlib import Path

from trainkit.config.command_line import time_limit
from trainkit.jobs import slurm
from trainkit.workshop.work import Workspace, Wrong, ask_slurm, requested

JOB = "job.sh"
ANSWERS = """\
# Before you submit: will the output of the job come to the terminal or into a file?
prediction = file

# Slurm would have ignored one line of job.sh as it was. What was that line about?
# One word: name, nodes, memory or time
ignored = memory
"""
HINTS = """\
## 1

`--ntasks` and `--gpus-per-node` ask for just this: one process with one GPU. The process itself needs a
core, and so does each loader worker. And what is the difference between `#SBATCH` and `# SBATCH`?

## 2

In `--output`, Slurm replaces `%j` with the number of the job. `set` needs `-e` (end at an error) and `-u` (a
variable that is not set is an error); `pipefail` needs `-o`: together `-euo pipefail`. The time of a short
job is some minutes, such as 00:15:00.

## 3

`srun --cpus-per-task="$SLURM_CPUS_PER_TASK"` passes on the number from the `#SBATCH` line. The ignored line
is the one that asks for memory: remove the space after `#`.
"""
SOLUTION = {
    "job.sh": r"""@@
-# My first job script. Fill in every gap, and fix the line that Slurm would not read.
-# Submit it from the folder of the stage: sbatch exercises/01_jobscript/mine/job.sh
+# My first job script. Submit it from the folder of the stage: sbatch exercises/01_jobscript/mine/job.sh
@@
-#SBATCH --ntasks=____           # how many processes has stage 01?
-#SBATCH --gpus-per-node=____    # how many GPUs does it use?
-#SBATCH --cpus-per-task=____    # CPU cores: one for the training, and at least one for its loader
-# SBATCH --mem=8G
-#SBATCH --time=____             # HH:MM:SS; the training takes some minutes
-#SBATCH --output=first-____.log # with the number of the job: no job overwrites the log of another
+#SBATCH --ntasks=1              # how many processes has stage 01?
+#SBATCH --gpus-per-node=1       # how many GPUs does it use?
+#SBATCH --cpus-per-task=2       # CPU cores: one for the training, and at least one for its loader
+#SBATCH --mem=8G
+#SBATCH --time=00:15:00         # HH:MM:SS; the training takes some minutes
+#SBATCH --output=first-%j.log   # with the number of the job: no job overwrites the log of another
@@
-set -____ pipefail # end at the first error, also if a variable is not set
+set -euo pipefail # end at the first error, also if a variable is not set
@@
-srun ____ "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" \
+srun --cpus-per-task="$SLURM_CPUS_PER_TASK" "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" \
""",
}
STARTS_WITH = "`prediction`"
WRONG = [
    ("job.sh", "--ntasks=1 ", "--ntasks=____ ", "still has a gap"),
    ("job.sh", "#SBATCH --mem", "# SBATCH --mem", "a comment like any other"),
    ("job.sh", "#SBATCH --mem=8G\n", "", "`#SBATCH --mem=...` is missing"),
    ("job.sh", "set -euo", "sleep 1\n#SBATCH --mem=9G\nset -euo", "after the first command"),
    ("job.sh", "--nodes=1", "--nodes=1 --partition=gpu", "slurm/site.sh"),
    ("job.sh", "--ntasks=1 ", "--ntasks=2 ", "the same training twice"),
    ("job.sh", "--gpus-per-node=1 ", "--gpus-per-node=2 ", "uses one GPU"),
    ("job.sh", "--cpus-per-task=2 ", "--cpus-per-task=1 ", "share one core"),
    ("job.sh", "00:15:00", "00:00:15", "5 minutes or more"),
    ("job.sh", "00:15:00", "2-00:00:00", "waits longer in the queue"),
    ("job.sh", "00:15:00", "soon", "neither HH:MM:SS"),
    ("job.sh", "--mem=8G", "--mem=8", "in MB"),
    ("job.sh", "#!/bin/bash\n", "#!/bin/sh\n", "sbatch refuses it"),
    ("job.sh", "#!/bin/bash\n", "\ufeff#!/bin/bash\n", "sbatch refuses it"),
    ("job.sh", "-euo pipefail", "-eu", "goes on after an error"),
    ("job.sh", "first-%j.log", "first.log", "would write into the same log"),
    ("job.sh", '"$RESULTS_DIR"', '"$RESULTS_DIR', "bash cannot read it"),
    ("job.sh", '"$DATA_DIR"', "/home/me/data", "one user's home"),
    ("job.sh", '"$DATA_DIR"', "~/data", "one user's home"),
    ("job.sh", "set -euo", "set -uo", "goes on after an error"),
    ("job.sh", 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"', "srun --ntasks=1", "gets only one core"),
    ("job.sh", '"$SLURM_CPUS_PER_TASK"', "1", "#SBATCH asks for 2"),
    ("job.sh", '"$RESULTS_DIR"', '"$RESULTS_DIR" || true', "no & and no ||"),
    ("job.sh", '"$SLURM_CPUS_PER_TASK"', '"$SLURM_CPUS_PER_TASK" -n 2', "leave `-n 2` out"),
    ("job.sh", "mnist_singlegpu", "mnist_singelgpu", "is no longer there"),
    ("job.sh", "first-%j.log", "logs/first-%j.log", "no folder logs"),
    ("job.sh", "srun --c", "exec --c", "no line begins with srun"),
    ("answers.txt", "ignored = memory", "ignored = time", "Slurm reads that line"),
]


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", "terminal", "file")
    ignored = answers.word("ignored", "name", "nodes", "memory", "time")
    text = workspace.text(JOB)
    content = (workspace.folder / JOB).read_bytes()
    if not content.startswith(b"#!/bin/bash\n") or b"\r" in content or b"\0" in content:
        raise Wrong(
            f"mine/{JOB} begins with the line #!/bin/bash, and no line ends as in Windows: sbatch refuses it."
        )
    _check_lines(text.splitlines())
    options = requested(text)
    _check_options(options, workspace.folder.parents[2])
    _check_commands(
        workspace.folder / JOB, options["cpus-per-task"], re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "))
    )
    _check_rest(text)
    if ignored != "memory":
        raise Wrong(
            f"`ignored = {ignored}`: Slurm reads that line of the starter. `reset` shows the starter again."
        )
    stage = workspace.folder.parents[2]
    as_expected = "as you expected" if prediction == "file" else "not to the terminal"
    return (
        f"The script keeps every rule. {ask_slurm(workspace.folder / JOB, stage)} The output goes into the "
        "file "
        f"that --output names, {as_expected}: sbatch returns before the job begins. {_log(options, stage)}"
    )


def _check_lines(lines: list[str]) -> None:
    has_begun = False
    for number, line in enumerate(lines, start=1):
        where = f"mine/{JOB}, line {number}"
        if "____" in line:
            raise Wrong(f"{where} still has a gap: {line.split('  ')[0]}")
        if re.match(r"#\s+SBATCH", line):
            raise Wrong(
                f"{where}: with a space, `# SBATCH` is a comment like any other. Slurm ignores it without a "
                "warning."
            )
        if line.startswith("#SBATCH") and has_begun:
            raise Wrong(f"{where}: Slurm ignores #SBATCH lines after the first command, without a warning.")
        if re.match(r"#SBATCH[^#]*\s(--(partition|account|qos|reservation)|-[pAq])\b", line):
            raise Wrong(
                f"{where}: what only one cluster has belongs in slurm/site.sh. Then the script runs on every "
                "cluster."
            )
        has_begun |= bool(line.strip()) and not line.startswith("#")


def _check_options(options: dict[str, str], stage: Path) -> None:
    for name in ("ntasks", "gpus-per-node", "cpus-per-task", "mem", "time", "output"):
        if name not in options:
            raise Wrong(f"mine/{JOB}: a line `#SBATCH --{name}=...` is missing.")
    if not re.fullmatch(r"[1-9]\d*([GT]|\d{3}M?|\d{6}K)B?", options["mem"], re.IGNORECASE):
        raise Wrong(
            f"--mem={options['mem']}: without a unit it is in MB. Python and PyTorch take several GB: 8G."
        )
    if options["ntasks"] != "1":
        raise Wrong(
            f"--ntasks={options['ntasks']}: srun would start the same training twice or more. This training "
            "is one process."
        )
    if re.search(r"(^|:)(0|1\d+|[2-9]\d*)$", options["gpus-per-node"]):
        raise Wrong(
            f"--gpus-per-node={options['gpus-per-node']}: stage 01 uses one GPU. You would pay for the "
            "others, and they would be idle."
        )
    if not re.fullmatch(r"[2-9]|1\d", options["cpus-per-task"]):
        raise Wrong(
            f"--cpus-per-task={options['cpus-per-task']}: ask for 2 or a few more. With 1, the training and "
            "its loader share one core; of very many cores, most stay idle."
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
            f"--output={options['output']}: every job would write into the same log. %j is the job's number."
        )
    folder = Path(options["output"]).parent
    if not (stage / folder).is_dir():
        raise Wrong(f"There is no folder {folder}: a job whose log cannot be written fails without a word.")


def _check_commands(path: Path, cpus: str, commands: str) -> None:
    """`commands` are the script without comments, each in a line."""
    syntax = slurm.ask("bash", "-n", str(path))
    if syntax.returncode:
        raise Wrong(
            f"mine/{JOB}: bash cannot read it: {syntax.stderr.strip().splitlines()[0].partition(': ')[2]}"
        )
    home = re.search(r"((/home|/users|/root|\$HOME)\b|~/)\S*", commands, re.IGNORECASE)
    if home:
        raise Wrong(
            f"mine/{JOB}: {home[0]} is in one user's home. The variables of job_env.sh work on every site."
        )
    flags = " ".join(re.findall(r"^set (.*)", commands.partition("\nsrun")[0], re.MULTILINE))
    if not all(re.search(flag, flags) for flag in (r"-\w*e|errexit", r"-\w*u|nounset", "pipefail")):
        raise Wrong(
            f"mine/{JOB}: without `set -euo pipefail` the job goes on after an error, and ends as if nothing "
            "had happened."
        )
    starts = re.findall(r"^srun\b(.*)", commands, re.MULTILINE)
    if not starts:
        raise Wrong(f"mine/{JOB}: no line begins with srun, so Slurm does not start the training as a task.")
    srun_options, _, site = starts[-1].partition('"${SITE_SRUN_ARGS')
    passed = re.search(r"\s(?:--cpus-per-task|-c)[= ]*(\S+)", srun_options)
    if not passed:
        raise Wrong(
            f"mine/{JOB}: with Slurm 22.05 to 23.02 srun does not take over --cpus-per-task from #SBATCH, so "
            "the training gets only one core."
        )
    number = passed[1].strip('"')
    is_variable = re.fullmatch(r"\$\{?SLURM_CPUS_PER_TASK(:-\d+)?\}?", number)
    if number != cpus and not is_variable:
        raise Wrong(
            f"mine/{JOB}: srun starts the training with {number} core(s), and #SBATCH asks for {cpus}. Pass "
            "on $SLURM_CPUS_PER_TASK."
        )
    other_options = srun_options.replace(passed[0], "").strip()
    if site and other_options:
        raise Wrong(f"mine/{JOB}: leave `{other_options}` out: srun takes all but the cores from #SBATCH.")
    if re.search(r"\|\||(?<!&)&\s*$", starts[-1]):
        raise Wrong(
            f"mine/{JOB}: the script has to wait for srun, and end with its exit code: no & and no || there."
        )


def _check_rest(text: str) -> None:
    """What has no gap in the starter is needed as it is."""
    for line in (Path(__file__).parent / "starter" / JOB).read_text().splitlines():
        if line and not line.startswith("#") and "____" not in line and line not in text:
            raise Wrong(f"mine/{JOB}: the line `{line.strip()}` of the starter is no longer there.")


def _log(options: dict[str, str], stage: Path) -> str:
    pattern = glob.escape(options["output"]).replace("%x", options.get("job-name", "*"))
    pattern = re.sub("(%j)+", "[0-9]*", pattern)
    folder = Path("/") if pattern.startswith("/") else stage
    logs = [log for log in folder.glob(pattern.strip("/") or "*") if log.is_file()]
    logs.sort(key=lambda log: log.stat().st_mtime)
    if not logs:
        return "Submit it now, if you have a cluster."
    code = re.findall(r"with exit code (\d+)", logs[-1].read_text(errors="replace"))
    if not code:
        return f"{logs[-1].name} has no line `ended` yet: the job is running, or its script was killed."
    if code[-1] != "0":
        return f"Your job ran and failed: the line `why` in {logs[-1].name} has the reason."
    return f"Your job has run: {logs[-1].name} ends with exit code 0."
