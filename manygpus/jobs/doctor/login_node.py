"""The doctor's checks on the login node: the site file, Slurm, the job's environment, data and folders.

It needs only the standard library.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manygpus import files, kit_python, project
from manygpus.errors import REPOSITORY, UserError
from manygpus.jobs import slurm
from manygpus.jobs.doctor import script_imports
from manygpus.jobs.doctor.findings import (
    FAULT,
    OK,
    WARNING,
    Finding,
    fault_from,
    findings_in,
    for_the_cpu_only,
    read_messages,
)
from manygpus.jobs.site import SCRIPTS, Site, read_site, shared_folders_fix
from manygpus.jobs.stages import STAGES, resources
from manygpus.jobs.submit.slurm_options import sbatch_options
from manygpus.jobs.user_program import Program, without_the_kit
from manygpus.record.columns import DDP

# Where a user finds every setting.
EXAMPLE = "slurm/site.example.sh" if project.IS_CHECKOUT else SCRIPTS / "site.example.sh"

# To load PyTorch for the first time from a shared file system may take so long.
IMPORT_SECONDS = 180

# The oldest Python that the ranks of the doctor's job run with.
OLDEST_PYTHON = [3, 10]

# The shell of a job, up to the job's Python, which runs its checks, and reads the data as a job would.
ENVIRONMENT = """
set -euo pipefail
source "$1"; shift
if [[ ${SITE_SRUN_ARGS[*]-} == *--container* ]]; then echo "srun's container"; exit; fi
run_activate_environment
exec "${SITE_CONTAINER[@]}" "$@"
"""
LOOK = """
import runpy, sys
try:
    from manygpus.jobs.doctor import checkup_torch
    from manygpus.errors import entrypoint
except ImportError:
    runpy.run_path(sys.argv[3])["refuse_packages_of_others"]()
    raise

@entrypoint
def main():
    checkup_torch.look_from_login_node(sys.argv[1], int(sys.argv[2]))

main()
"""


def check_site() -> tuple[Site | None, list[Finding]]:
    """Read slurm/site.sh."""
    try:
        site = read_site()
        # It raises an error for words that are no options.
        sbatch_options(site, resources(STAGES[DDP], 2))
    except UserError as error:
        return None, [Finding("site", FAULT, str(error), f"compare it with {EXAMPLE}")]
    message = f"no {project.site_name()}: the defaults apply"
    if project.site_file().exists():
        message = f"{project.site_name()} is valid"
    variables = ", ".join(f"{name}={value}" for name, value in sorted(site.sbatch.items()))
    if variables:
        message += f" ({variables})"
    findings = [Finding("site", OK, message), *_check_memory(site)]
    fix = f"correct it in {project.site_name()}, or in your shell; {EXAMPLE} has every setting"
    findings += [Finding("site", WARNING, sentence, fix) for sentence in site.misspelt]
    return site, findings


def _check_memory(site: Site) -> list[Finding]:
    """Warn of a request for memory that does not reach `sbatch slurm_submit.sh`."""
    scripts = [path.read_text() for path in REPOSITORY.glob("0*/slurm_submit*.sh")]
    if not site.memory_by_part or not any("#SBATCH --mem=" in script for script in scripts):
        return []
    message = (
        f"{site.memory_by_part} applies to submit.py, but not to job scripts: their own --mem overrides it"
    )
    return [Finding("site", WARNING, message, "delete their #SBATCH --mem lines, or set SBATCH_MEM_PER_NODE")]


def check_slurm() -> list[Finding]:
    """Check that Slurm's programs are installed, and its controller answers."""
    why_not = slurm.why_not_here()
    if why_not:
        fix = "go to the login node (some need `module load slurm`)"
        if project.IS_CHECKOUT:
            fix += "; without a cluster, run make cluster-up"
        return [Finding("slurm", FAULT, f"there is no Slurm here: {why_not}", fix)]
    ping = slurm.ask("scontrol", "ping")
    # Of several controllers one will do.
    if "UP" not in ping.stdout.replace("/", " ").split():
        message = (ping.stdout or ping.stderr).partition("\n")[0]
        fix = "try again later, or ask your admin; on the practice cluster, run make cluster-down cluster-up"
        return [Finding("slurm", FAULT, f"Slurm's controller does not answer ({message})", fix)]
    version = slurm.ask("scontrol", "--version").stdout.strip()
    return [Finding("slurm", OK, f"{version} answers")]


def _in_a_jobs_shell(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in this folder as a job would, up to its Python."""
    shell = ("bash", "-c", ENVIRONMENT, "environment", str(SCRIPTS / "site_env.sh"))
    environment = {**os.environ, **project.variables()}
    return slurm.ask(*shell, *command, seconds=IMPORT_SECONDS, cwd=folder, env=environment)


def _most_gpus() -> int:
    """Return the GPUs of the largest node; none of the practice cluster, whose GPUs are virtual."""
    return 0 if slurm.cluster() == "practice" else slurm.most_gpus()


@dataclass(frozen=True)
class ScriptCheck:
    """What was seen of a script that does not use the kit, and of its environment.

    Attributes:
        python: what its ranks are to be tried with: its Python, or "python" for that of the job.
    """

    findings: list[Finding]
    python: str


def check_program(program: Program, arguments: Sequence[str]) -> ScriptCheck:
    """Check that what a script imports is in its environment, and that PyTorch is there for the GPUs.

    Args:
        program: the program that --plain names.
        arguments: the script's arguments, for modules of its own that read them.
    """
    python = str(program.python or "python")
    # A program that is no Python code may start anything.
    file = str(program.path) if program.is_python and program.path.is_file() else ""
    folder = program.user_folder if program.module else program.folder
    command = [python, script_imports.__file__, str(folder), file, program.module, *arguments]
    if program.python:
        # Without --python the kit is on the script's path.
        command = ["env", f"PYTHONPATH={without_the_kit(os.environ.get('PYTHONPATH', ''))}", *command]
    done = _in_a_jobs_shell(*command, folder=program.user_folder)
    facts = next((message["script"] for message in read_messages(done.stdout) if "script" in message), None)
    if facts is None:
        if "srun's container" in done.stdout:
            return ScriptCheck([_only_in_srun()], python)
        return ScriptCheck([_of_no_facts(done, python, program)], python)
    findings = _of_environment(facts, program)
    problems = facts["problems"]
    findings += [_of_problem(problem, facts["python"], " ".join(program.name)) for problem in problems]
    if file and not problems:
        findings.append(Finding("script", OK, f"everything that {file} imports at the top is installed"))
    lacks = _what_ranks_lack(facts)
    if lacks:
        message = f"{facts['python']} {lacks}, so the doctor's job tests ranks with the job's Python"
        findings.append(Finding("environment", WARNING, message))
        python = "python"
    return ScriptCheck(findings, python)


def _of_no_facts(done: subprocess.CompletedProcess[str], python: str, program: Program) -> Finding:
    """Return why script_imports.py did not come to its end."""
    other_python = "activate your environment before, or name its Python with --python"
    if done.returncode == slurm.NOT_FOUND_EXIT_CODE:
        return Finding("script", FAULT, f"there is no {python} for {program.label}", other_python)
    if "future feature annotations" in done.stderr:
        return Finding("script", FAULT, f"{python} for {program.label} is older than 3.7", other_python)
    problem = "; ".join(done.stderr.strip().splitlines()[-2:]) or f"exit code {done.returncode}"
    message = f"{python} could not import what {program.label} imports: {problem}"
    return Finding("script", FAULT, message, "try these imports by hand, with that Python")


def _what_ranks_lack(facts: dict) -> str:
    """Return why the doctor's job cannot try ranks in the environment of a script; "" if it can."""
    if facts["version"] < OLDEST_PYTHON:
        return f"is {'.'.join(map(str, facts['version']))}, older than 3.10"
    if not facts["has_numpy"]:
        # torch.distributed.all_gather_object, by which our ranks meet.
        return "has no NumPy, which PyTorch needs to send objects from rank to rank"
    return ""


def _of_environment(facts: dict, program: Program) -> list[Finding]:
    """Return what is to be said of the PyTorch in the environment of a script."""
    python = facts["python"]
    if not facts["torch"]:
        level = FAULT if program.is_python else WARNING
        return [Finding("environment", level, f"{python} has no PyTorch", _how_to_install(python, "torch"))]
    version = facts["torch"].partition("+")[0]
    findings = [
        Finding("environment", OK, f"for the script: {python}, torch {version} for {facts['torch_is_for']}")
    ]
    most_gpus = _most_gpus()
    if facts["torch_is_for"] == "the CPU only" and most_gpus:
        findings.append(for_the_cpu_only(most_gpus))
    return findings


def _of_problem(problem: dict, python: str, script: str) -> Finding:
    """Return the fault of something that a script imports and cannot have."""
    where = f"line {problem['line']} of {script}" if "line" in problem else script
    if "in_file" in problem:
        where += f", through {problem['in_file']}"
    fix = f"try that line with {shlex.quote(python)}"
    missing = problem.get("missing", "").partition(".")[0]
    if missing == "manygpus":
        install = [python, "-m", "pip", "install", "--no-deps", "-e", str(REPOSITORY)]
        fix = f"install the kit there: {shlex.join(install)}"
        if not project.IS_CHECKOUT:
            install = f"{shlex.quote(python)} -m pip install --no-deps manygpus"
            fix = f"install the kit there, too, with the address that you have it from: {install}"
    elif "without_it" in problem:
        there = problem["without_it"]
        fix = f"{there} has no such module: correct the import, or install a version that has it"
    elif missing:
        fix = _how_to_install(python, missing)
    return Finding("script", FAULT, f"{where}: {problem['error']}", fix)


def _how_to_install(python: str, name: str) -> str:
    install = f"{shlex.quote(python)} -m pip install {name}"
    return f"{install} (or the package that has it), or choose a different --python"


def _only_in_srun() -> Finding:
    message = "Python and data can be checked only inside srun's container"
    return Finding("environment", WARNING, message, "check them with `doctor.py --job`")


def check_environment(site: Site, in_job_too: bool, with_data: bool = True) -> list[Finding]:
    """Check the job's Python and, read with it, the data; `in_job_too` if a job will check again."""
    # It may work on the compute nodes only, which the job will show.
    level = WARNING if in_job_too else FAULT
    data_dir = str(site.data_dir) if with_data else ""
    done = _in_a_jobs_shell("python", "-c", LOOK, data_dir, str(_most_gpus()), kit_python.__file__)
    if "srun's container" in done.stdout:
        return [_only_in_srun()]
    findings = findings_in(read_messages(done.stdout))
    if not findings:
        problem = _last_words(done.stderr) or f"exit code {done.returncode}"
        in_site_file = f"activate_environment in {project.site_name()}"
        fix = f"fix {in_site_file}; for the default, .venv, run make .venv/ready"
        finding = fault_from("environment", f"the job's Python does not work here: {problem}", fix)
        return [finding._replace(level=level)]
    findings = [finding._replace(level=level) if finding.level == FAULT else finding for finding in findings]
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        findings.append(fault_from("data", last_line))
    return findings


def _last_words(complaints: str) -> str:
    """Return the last line of what a shell and its Python have said, with a message before it."""
    lines = [line for line in complaints.splitlines() if not re.match(r"\s|Traceback|$", line)]
    return "; ".join(line.removeprefix("error: ") for line in lines[-2:])


def check_folders(site: Site) -> list[Finding]:
    """Check that the folders that jobs write to are writable."""
    folders = {
        "results": (site.results_dir, shared_folders_fix()),
        "checkpoints": (site.jobs_dir, shared_folders_fix()),
    }
    if project.IS_CHECKOUT:
        # Those of `sbatch slurm_submit.sh`.
        folders["logs"] = (STAGES[DDP].script.parent, "put this checkout into a folder where you may write")
    faults = []
    for contents, (folder, fix) in folders.items():
        try:
            files.check_writable(folder, contents, fix)
        except UserError as error:
            faults.append(fault_from("folders", str(error)))
    if faults:
        return faults
    names = ", ".join(str(folder) for folder, _ in folders.values())
    return [Finding("folders", OK, f"{', '.join(folders)} can be written: {names}")]
