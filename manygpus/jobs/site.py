"""The settings of slurm/site.sh, for the programs on the login node; needs only the standard library."""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from manygpus import project
from manygpus.errors import UserError
from manygpus.jobs import slurm

# The parts of a job that are shell code, and the example of a site file.
SCRIPTS = Path(__file__).with_name("scripts")

# How a job asks for GPUs, cores and memory where the site does not say; so do the stages' job scripts.
OPTION_TEMPLATES = {
    "SITE_GPUS": "--gpus-per-node=%d",
    "SITE_CPUS": "--cpus-per-task=%d",
    "SITE_MEM": "--mem=%dG",
}
# The time limit of a job where neither its user nor the site gives one; so in the stages' job scripts.
DEFAULT_MINUTES = 30

# Reading slurm/site.sh may take so long: some sites load modules there.
SITE_FILE_SECONDS = 120
# It prints the settings; its arguments are site_env.sh and the defaults of `OPTION_TEMPLATES`.
READ_SITE = """
set -euo pipefail
before=" ${!SITE_*} "
set -a
SITE_GPUS=$2 SITE_CPUS=$3 SITE_MEM=$4
source "$1" >&2
export ${!SBATCH_*} JOBS_DIR SITE_MONITOR
set_here=""
for name in ${!SITE_*}; do [[ $before == *" $name "* ]] || set_here+=" $name"; done
# Here they may also be arrays, which cannot be exported.
env -0 SITE_NAMES="$set_here" \\
    SITE_GPUS="${SITE_GPUS[*]}" SITE_CPUS="${SITE_CPUS[*]}" SITE_MEM="${SITE_MEM[*]}"
"""

# The variables that sbatch knows, behind SBATCH_ (22.05 to 26.05).
SBATCH_NAMES = """
    ACCOUNT ACCTG_FREQ ARRAY_INX BATCH BURST_BUFFER CLUSTERS CLUSTER_CONSTRAINT CONSOLIDATE_SEGMENTS
    CONSTRAINT CONTAINER CONTAINER_ID CONTAINER_TYPE CORE_SPEC CPUS_PER_GPU CPU_FREQ_REQ DEBUG
    DELAY_BOOT DISTRIBUTION ERROR EXCLUSIVE EXPORT GET_USER_ENV GPUS GPUS_PER_NODE GPUS_PER_SOCKET
    GPUS_PER_TASK GPU_BIND GPU_FREQ GRES GRES_FLAGS HINT IGNORE_PBS INPUT JOB_NAME MEM_BIND MEM_PER_CPU
    MEM_PER_GPU MEM_PER_NODE NETWORK NO_KILL NO_REQUEUE OPEN_MODE OUTPUT OVERCOMMIT PARTITION POWER
    PROFILE QOS REQUEUE REQ_SWITCH RESERVATION SEGMENT_SIZE SIGNAL SPREAD_JOB SPREAD_SEGMENTS
    THREADS_PER_CORE THREAD_SPEC TIMELIMIT TRES_BIND TRES_PER_TASK USE_MIN_NODES WAIT WAIT4SWITCH
    WAIT_ALL_NODES WCKEY
"""


class Site(NamedTuple):
    """The settings of slurm/site.sh, with the defaults of scripts/site_env.sh and `OPTION_TEMPLATES`.

    Attributes:
        sbatch: the SBATCH_* variables, including this shell's.
        jobs_dir: the folder that has one for each job.
        option_templates: SITE_GPUS, SITE_CPUS and SITE_MEM, which submit/slurm_options.py explains.
        monitor: whether jobs are sampled.
        names: the names of the SITE_* variables that slurm/site.sh sets; those with a default are among them.
    """

    sbatch: dict[str, str]
    data_dir: Path
    results_dir: Path
    jobs_dir: Path
    option_templates: dict[str, str]
    monitor: bool
    names: tuple[str, ...] = ()

    @property
    def misspelt(self) -> list[str]:
        """Return a sentence on each variable that has no effect, as SBATCH_PARTITON."""
        # The example has every setting.
        example = (SCRIPTS / "site.example.sh").read_text()
        known = set(re.findall(r"^#(SITE_\w+)=", example, re.MULTILINE))
        known |= {f"SBATCH_{name}" for name in SBATCH_NAMES.split()}
        sentences = []
        for name in sorted({*self.names, *self.sbatch} - known):
            nearest = "".join(f": is it {other}?" for other in get_close_matches(name, known, n=1))
            sentences.append(f"{name} is no setting of sbatch or of this kit{nearest}")
        return sentences

    @property
    def memory_by_part(self) -> str:
        """Return the variable by which it asks for memory per CPU or GPU, "" if by none.

        To sbatch, --mem in a script comes before that.
        """
        for name in ("SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"):
            if self.sbatch.get(name):
                return name
        return ""

    @property
    def minutes(self) -> int | None:
        """Return SBATCH_TIMELIMIT in minutes, rounded up; None if it is not set, or no number of them."""
        return slurm.in_minutes(self.sbatch.get("SBATCH_TIMELIMIT", ""))


def shared_folders_fix() -> str:
    """Return what to do where the nodes do not see the same folders as the login node."""
    return (
        f"set SITE_RESULTS_DIR and SITE_SCRATCH_DIR in {project.site_name()} to folders that every node sees"
    )


def read_site(environment: Mapping[str, str] | None = None) -> Site:
    """Run the site file (manygpus/project.py), if there is one, as a job does.

    Args:
        environment: the variables of its shell, by default those of this process.

    Raises:
        UserError: if it cannot be read to its end; scripts/site_env.sh gives the reason.
    """
    site_env = SCRIPTS / "site_env.sh"
    environment = {**(os.environ if environment is None else environment), **project.variables()}
    done = slurm.ask(
        *("bash", "-c", READ_SITE, "site", str(site_env), *OPTION_TEMPLATES.values()),
        seconds=SITE_FILE_SECONDS,
        env=environment,
    )
    if done.returncode == slurm.TIMED_OUT_EXIT_CODE:
        raise UserError(f"{project.site_name()} leaves a process behind: start that in activate_environment.")
    if done.returncode:
        raise UserError(_why_unreadable(done.stderr))
    variables = {}
    for assignment in done.stdout.split("\0"):
        name, is_assignment, value = assignment.partition("=")
        if is_assignment:
            variables[name] = value
    return Site(
        sbatch={name: value for name, value in variables.items() if name.startswith("SBATCH_")},
        data_dir=Path(variables["MANYGPUS_DATA_DIR"]).absolute(),
        results_dir=Path(variables["MANYGPUS_RESULTS_DIR"]).absolute(),
        jobs_dir=Path(variables["JOBS_DIR"]).absolute(),
        option_templates={name: variables[name] for name in OPTION_TEMPLATES},
        monitor=variables["SITE_MONITOR"] == "on",
        names=tuple(variables["SITE_NAMES"].split()),
    )


def _why_unreadable(complaints: str) -> str:
    """Return the last of the complaints of the shell, and where one is known the line of the file."""
    lines = complaints.strip().splitlines()
    sentence = lines[-1].removeprefix("error: ")
    # Where a line of the file ends the shell, bash has said before which one.
    lines_of_the_file = [line.partition("site.sh: ")[2] for line in lines if "site.sh: line " in line]
    if lines_of_the_file and lines_of_the_file[-1] not in sentence:
        sentence += f" ({lines_of_the_file[-1]})"
    return sentence
