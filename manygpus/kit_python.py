"""Start a program again with the kit's own Python: .venv of this checkout. Or say why it cannot run here.

The programs of the kit run this file where an import of theirs fails, as with the Python of a user's own
environment, which has no submitit. It needs no packages, and 3.6 will do.
"""

import os
import re
import site
import sys
import traceback
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = REPOSITORY / ".venv"


def take_over() -> None:
    """Start the program again, with its arguments, or end it with a sentence on what its Python lacks.

    It returns if the kit's own Python is complete: then the traceback tells more.
    """
    python = ENVIRONMENT / "bin" / "python"
    is_own = Path(sys.prefix).resolve() == ENVIRONMENT.resolve()
    if not is_own and python.exists():
        os.execv(str(python), [str(python), *sys.argv])
    refuse_packages_of_others()
    if not is_own or not (ENVIRONMENT / "ready").exists():
        problem = sys.exc_info()[1] or f"{sys.version.split()[0]} is older than Python 3.10"
        sys.exit(
            f"error: {sys.executable} cannot run this ({problem}): first run `make data` in {REPOSITORY}, "
            "which makes .venv, or activate the environment that you have made for it."
        )


def refuse_packages_of_others() -> None:
    """End with a sentence if the error at hand comes from packages that are not of this Python's environment.

    Those of PYTHONPATH, as modules of a cluster set it, and of ~/.local come first (pypa/virtualenv#2118,
    maxplanck-ie/snakepipes#453).
    """
    remedies = {}
    if site.ENABLE_USER_SITE:
        remedies[site.getusersitepackages()] = "export PYTHONNOUSERSITE=1, also in slurm/site.sh"
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and Path(folder).resolve() != REPOSITORY:
            remedies[folder] = "unset PYTHONPATH, also in slurm/site.sh, or load no module that sets it"
    error = str(sys.exc_info()[1]).partition("\n")[0]
    files = re.findall(r"/[^\"'()\n]+", traceback.format_exc())
    for folder, remedy in remedies.items():
        if any(Path(folder) in Path(file).parents for file in files):
            sys.exit(f"error: {folder} has packages that do not fit this Python ({error}): {remedy}.")
