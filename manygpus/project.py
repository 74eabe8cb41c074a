"""Where the settings, the results and the jobs are: in the checkout of the kit, or in a project of its user.

Who has installed the package alone has no checkout. A project is then the nearest folder, from the current
one upwards, that has slurm/site.sh, and without one the current folder. For a project without slurm/site.sh,
$XDG_CONFIG_HOME/manygpus/site.sh holds (~/.config, if that variable is not set).

It needs only the standard library.
"""

import os
import shlex
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from manygpus.errors import IS_CHECKOUT, REPOSITORY, UserError

# From the folder of a project.
SITE_FILE = Path("slurm", "site.sh")


@cache
def folder() -> Path:
    """Return the folder of the project, by the folder in which the program first asks."""
    if IS_CHECKOUT:
        return REPOSITORY
    here = Path.cwd()
    return next((above for above in (here, *here.parents) if (above / SITE_FILE).exists()), here)


def site_file() -> Path:
    """Return the path of the site file; where there is none, that of the one which would be written."""
    of_project = folder() / SITE_FILE
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    of_user = config / "manygpus" / "site.sh"
    if IS_CHECKOUT or of_project.exists() or not of_user.exists():
        return of_project
    return of_user


def refuse_a_checkout() -> None:
    """Raise a UserError if this is not the package alone."""
    if IS_CHECKOUT:
        raise UserError(
            f"{REPOSITORY} is the checkout of the kit, whose site file `manygpus doctor --write-site` "
            "writes; a project of your own needs the package alone (YOUR_TRAINING.md)."
        )


def version() -> str:
    """Return the version of the kit that is installed; "" for a checkout, of which git tells more."""
    return "" if IS_CHECKOUT else f"manygpus {metadata.version('manygpus')}"


def site_name() -> str:
    """Return how messages name the site file: by its path from the project's folder, if it is in there."""
    file = site_file()
    return str(file.relative_to(folder()) if file.is_relative_to(folder()) else file)


def hide_results(results_dir: Path) -> None:
    """Have git overlook jobs and sweeps among the results of a project. What is there already stays as it is.

    Otherwise every copy of the project's code would have them, too.
    """
    if IS_CHECKOUT or results_dir != folder() / "results":
        return
    for name in ("jobs", "sweeps"):
        hides = results_dir / name / ".gitignore"
        if not hides.exists():
            with suppress(OSError):  # whether results can be written is checked later
                hides.parent.mkdir(parents=True, exist_ok=True)
                hides.write_text("*\n")


def variables() -> dict[str, str]:
    """Return what tells the shell code of a job where all this is; nothing in a checkout, where it is found.

    The job's own decisions are made with this Python (scripts/site_env.sh).
    """
    if IS_CHECKOUT:
        return {}
    return {
        "MANYGPUS_PROJECT": str(folder()),
        "MANYGPUS_SITE_FILE": str(site_file()),
        "MANYGPUS_PYTHON": sys.executable,
    }


def assignments() -> list[str]:
    """Return `variables` as lines of a job script."""
    return [f"{name}={shlex.quote(value)}" for name, value in variables().items()]
