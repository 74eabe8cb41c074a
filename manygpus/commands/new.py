"""Make a folder with a training to begin with, which runs at once, and resumes; with a job script for it.

Where there is Slurm, it also asks how this cluster wants jobs to be requested, and writes slurm/site.sh there
(`manygpus init`).

Try: manygpus new my_project
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import manygpus
from manygpus import project
from manygpus.config.command_line import PROGRAM, Parser, given_path
from manygpus.errors import UserError, entrypoint, print_line
from manygpus.files import explained
from manygpus.jobs import slurm
from manygpus.jobs.site import DEFAULT_MINUTES, Site, read_site
from manygpus.jobs.stages import STAGES, resources
from manygpus.jobs.submit.slurm_options import of_variables, trial_options
from manygpus.record.columns import DDP

TEMPLATE = Path(manygpus.__file__).with_name("template")
JOB_SCRIPT = "job.sh"
# Where and by whom a job runs: such settings of the site are also lines of the job script.
PLACES = ("partition", "account", "qos", "constraint", "reservation")
# The lines of the job script that ask for GPUs, cores, memory and time, with their comments.
REQUEST = re.compile(
    r"^#SBATCH --(nodes|ntasks-per-node|gpus-per-node|cpus-per-task|mem|time)=\S+( +#.*)?\n", re.MULTILINE
)


@entrypoint
def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=given_path, help="the folder to make")
    folder = parser.parse_args().folder
    project.refuse_a_checkout()
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is there already: give the name of a new folder.")
    with explained(f"{folder} cannot be written", "fix the permissions, or go to a folder of yours."):
        shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        readme = folder / "README.md"
        readme.write_text(readme.read_text().replace("PROJECT", folder.absolute().name, 1))
    made = folder.absolute()
    os.chdir(made)  # the project is found by it from now on
    exit_code = _write_site_file()
    script = Path(JOB_SCRIPT)
    try:
        requests = _requests(read_site())
    except UserError:
        shutil.rmtree(made)  # the site file, which is somewhere else, has to be corrected first
        raise
    script.write_text(_with_requests(script.read_text(), requests))
    print_line(f"{folder} is made: cd {shlex.quote(str(folder))}, and README.md says how to go on")
    return exit_code


def _write_site_file() -> int:
    """Have the doctor write the site file, if there is none and it can; return its exit code."""
    if project.site_file().exists():
        print_line(f"the settings of jobs are those of {project.site_file()}")
        return 0
    why_not = slurm.why_not_here()
    if why_not:
        print_line(f"no Slurm here ({why_not}): `{PROGRAM} init`, on a login node, writes the site file")
        return 0
    return subprocess.run([sys.executable, "-m", PROGRAM, "doctor", "--write-site"]).returncode


def _requests(site: Site) -> dict[str, str]:
    """Return the options of sbatch by which a job on two GPUs of one node is requested here."""
    of_site = of_variables(site.sbatch)
    places = {option: of_site[option] for option in PLACES if of_site.get(option)}
    return places | trial_options(site, resources(STAGES[DDP], 2), site.minutes or DEFAULT_MINUTES)


def _with_requests(script: str, requests: Mapping[str, str]) -> str:
    """Return the job script with these options in the place of those by which it requests its job."""
    comments = {line[1]: line[2] or "" for line in REQUEST.finditer(script)}
    lines = ""
    for option, value in requests.items():
        line = f"#SBATCH --{option}={value}"
        lines += f"{line:34}{comments.get(option, '').strip()}".rstrip() + "\n"
    first = REQUEST.search(script).start()
    return script[:first] + lines + REQUEST.sub("", script[first:])
