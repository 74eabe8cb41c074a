"""The settings of slurm/site.sh, for the programs on the login node; needs only the standard library."""

import math
import re
from pathlib import Path
from typing import NamedTuple

from trainkit.errors import UserError
from trainkit.jobs import slurm
from trainkit.jobs.stages import REPOSITORY

# How a job asks for GPUs, cores and memory where the site does not say; so do the stages' job scripts.
WORDS = {"SITE_GPUS": "--gpus-per-node=%d", "SITE_CPUS": "--cpus-per-task=%d", "SITE_MEM": "--mem=%dG"}


class Site(NamedTuple):
    """The settings of slurm/site.sh, with the defaults of slurm/site_env.sh and `WORDS`.

    `sbatch` has the SBATCH_* variables, including this shell's. `jobs_dir` has a folder per job.
    `words` has SITE_GPUS, SITE_CPUS and SITE_MEM, which sbatch_options.py explains. `monitor` is whether
    jobs are sampled.
    """

    sbatch: dict[str, str]
    data_dir: Path
    results_dir: Path
    jobs_dir: Path
    words: dict[str, str]
    monitor: bool

    @property
    def memory_by_part(self) -> str:
        """Return the variable by which it asks for memory per CPU or GPU, "" if by none.

        To sbatch, --mem in a script comes before that.
        """
        return next(filter(self.sbatch.get, ("SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU")), "")

    @property
    def minutes(self) -> int | None:
        """Return SBATCH_TIMELIMIT in minutes, rounded up; None if it is not set, or no number of them.

        Its forms are those of sbatch --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
        days-hours:minutes and days-hours:minutes:seconds.
        """
        limit = self.sbatch.get("SBATCH_TIMELIMIT", "")
        found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
        if not found:
            return None
        days, *parts = (int(part or 0) for part in found.groups())
        if found[1] is None and found[4] is None:
            parts = [0, *parts[:2]]
        hours, minutes, seconds = parts
        return (days * 24 + hours) * 60 + minutes + math.ceil(seconds / 60)


def read_site() -> Site:
    """Run slurm/site.sh, if there is one, as a job does.

    Raises:
        UserError: if it cannot be read to its end; slurm/site_env.sh gives the reason.
    """
    script = """
set -euo pipefail
set -a
SITE_GPUS=$2 SITE_CPUS=$3 SITE_MEM=$4
source "$1" >&2
export ${!SBATCH_*} JOBS_DIR SITE_MONITOR
# Here they may also be arrays, which cannot be exported.
env -0 SITE_GPUS="${SITE_GPUS[*]}" SITE_CPUS="${SITE_CPUS[*]}" SITE_MEM="${SITE_MEM[*]}"
"""
    site_env = REPOSITORY / "slurm" / "site_env.sh"
    done = slurm.ask("bash", "-c", script, "site", str(site_env), *WORDS.values(), seconds=120)
    if done.returncode == 124:
        raise UserError("slurm/site.sh leaves a process behind: start that in activate_environment.")
    if done.returncode:
        words = done.stderr.strip().splitlines()
        sentence = words[-1].removeprefix("error: ")
        # Where a line of the file ends the shell, bash has said before which one.
        lines = [line.partition("site.sh: ")[2] for line in words if "site.sh: line " in line]
        if lines and lines[-1] not in sentence:
            sentence = f"{sentence} ({lines[-1]})"
        raise UserError(sentence)
    variables = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)
    folders = ("TRAINKIT_DATA_DIR", "TRAINKIT_RESULTS_DIR", "JOBS_DIR")
    return Site(
        {name: value for name, value in variables.items() if name.startswith("SBATCH_")},
        *(Path(variables[name]).absolute() for name in folders),
        words={name: variables[name] for name in WORDS},
        monitor=variables["SITE_MONITOR"] == "on",
    )
