"""The settings of slurm/site.sh, for the programs on the login node; needs only the standard library."""

from pathlib import Path
from typing import NamedTuple

from trainkit.jobs import slurm
from trainkit.jobs.stages import REPOSITORY
from trainkit.runtime.errors import UserError


class Site(NamedTuple):
    """The settings of slurm/site.sh, with the defaults of slurm/site_env.sh.

    `sbatch` has the SBATCH_* variables, including this shell's. `jobs_dir` has a folder per job.
    `monitor` is whether jobs are sampled.
    """

    sbatch: dict[str, str]
    data_dir: Path
    results_dir: Path
    jobs_dir: Path
    monitor: bool = True

    @property
    def memory_by_part(self) -> str:
        """Return the variable by which it asks for memory per CPU or GPU, "" if by none.

        To sbatch, --mem in a script comes before that.
        """
        return next(filter(self.sbatch.get, ("SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU")), "")


def read_site() -> Site:
    """Run slurm/site.sh, if there is one, as a job does.

    Raises:
        UserError: if it cannot be read to its end; slurm/site_env.sh gives the reason.
    """
    script = 'set -euo pipefail; set -a; source "$1" >&2; export ${!SBATCH_*} JOBS_DIR SITE_MONITOR; env -0'
    done = slurm.ask("bash", "-c", script, "site", str(REPOSITORY / "slurm" / "site_env.sh"), seconds=120)
    if done.returncode == 124:
        raise UserError("slurm/site.sh leaves a process behind: start that in activate_environment.")
    if done.returncode:
        words = done.stderr.strip().splitlines()
        sentence = words[-1].removeprefix("error: ")
        # Where a line of the file ends the shell, bash has said before which one.
        lines = [line.partition("site.sh: ")[2] for line in words if "site.sh: line " in line]
        raise UserError(f"{sentence} ({lines[-1]})" if lines else sentence)
    variables = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)
    folders = ("TRAINKIT_DATA_DIR", "TRAINKIT_RESULTS_DIR", "JOBS_DIR")
    return Site(
        {name: value for name, value in variables.items() if name.startswith("SBATCH_")},
        *(Path(variables[name]).absolute() for name in folders),
        monitor=variables["SITE_MONITOR"] == "on",
    )
