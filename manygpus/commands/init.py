"""Begin a project: ask Slurm how this cluster wants jobs to be requested, and write slurm/site.sh.

It also writes slurm/hello.py, an example of a job. Files that are there already stay as they are. A project
without a site file begins with ~/.config/manygpus/site.sh, if that is there.

Try: manygpus init
"""

import shutil
import sys
from pathlib import Path

from manygpus import project
from manygpus.config.command_line import Parser
from manygpus.errors import UserError, entrypoint, print_line
from manygpus.files import explained
from manygpus.jobs import hello, slurm
from manygpus.jobs.doctor import cli

EXAMPLE = Path(hello.__file__)


def main() -> None:
    """Have the doctor write the site file, after the example."""
    _write_example()
    sys.argv = ["manygpus doctor", "--write-site"]
    cli.main()


@entrypoint
def _write_example() -> None:
    Parser(description=__doc__).parse_args()
    project.refuse_a_checkout()
    why_not = slurm.why_not_here()
    if why_not:
        raise UserError(f"there is no Slurm here ({why_not}): run this on a login node of your cluster.")
    example = project.folder() / project.SITE_FILE.with_name(EXAMPLE.name)
    if not example.exists():
        with explained(f"{example} cannot be written", "fix the permissions, or go to a folder of yours."):
            example.parent.mkdir(exist_ok=True)
            shutil.copyfile(EXAMPLE, example)
    site_file = project.folder() / project.SITE_FILE
    if project.site_file() != site_file:
        shutil.copyfile(project.site_file(), site_file)
        print_line(f"{site_file} is a copy of {project.site_file()}")
    print_line(f"{example} is an example of a job: manygpus submit --gpus 2 slurm/{EXAMPLE.name}\n")
