"""The commands of the kit, from any folder. On a checkout each is also a script.

    manygpus submit --gpus 4 --nodes 2 --plain train.py --lr 0.1

`manygpus COMMAND --help` explains one, with an example. `manygpus compare` reads the records of your
runs, and trains nothing: that is `make compare`, which runs the three stages (results/compare.py).

Pages and folders that a message names, such as slurm/SITE.md, are in the repository of the kit.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from manygpus import project
from manygpus.config.command_line import PROGRAM, Parser
from manygpus.errors import entrypoint, missing_package
from manygpus.kit_python import take_over


class Command(NamedTuple):
    """The module with the command's `main`, the script that starts the same, and what it does."""

    module: str
    script: str
    purpose: str


COMMANDS = {
    "new": Command("commands.new", "", "make a folder with a training to begin with, and a job script"),
    "init": Command("commands.init", "", "begin a project of your own: write its slurm/site.sh"),
    "submit": Command(
        "commands.submit", "03_multigpu_ddp/submit.py", "submit a training, or a script of your own"
    ),
    "sweep": Command(
        "commands.sweep", "slurm/sweep.py", "run every combination of options as a job, and compare"
    ),
    "jobs": Command("commands.jobs", "slurm/jobs.py", "list the jobs: what each one runs, and its state"),
    "why": Command("commands.why", "slurm/jobs.py", "tell why a job failed, with the end of its log"),
    "doctor": Command("jobs.doctor.cli", "slurm/doctor.py", "check whether a job can work here"),
    "monitor": Command(
        "commands.monitor", "slurm/monitor.py", "watch what a job does with GPUs, cores and memory"
    ),
    "compare": Command(
        "commands.compare_runs",
        "results/plot_results.py",
        "compare the runs that you have",
    ),
    "how-many": Command(
        "commands.how_many_gpus", "results/how_many_gpus.py", "recommend how many GPUs to ask for"
    ),
}


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    try:
        Path.cwd()
    except FileNotFoundError:
        sys.exit("error: the folder that you are in has been deleted: cd to another one.")
    if name in COMMANDS:
        try:
            command = import_module(f"manygpus.{COMMANDS[name].module}")
        except ImportError as error:
            if not project.IS_CHECKOUT:
                incomplete = f"{sys.executable} cannot run this ({error}): install manygpus without --no-deps"
                sys.exit(f"error: {missing_package(error) or incomplete}")
            # Where the environment of a different project is active, the kit's own Python takes over.
            sys.argv = ["-m", PROGRAM, name, *arguments]
            take_over()
            raise
        # The name by which its --help and its mistakes speak of it.
        sys.argv = [f"{PROGRAM} {name}", *arguments]
        if COMMANDS[name].script:
            command.__doc__ = command.__doc__.replace(f"python {COMMANDS[name].script}", sys.argv[0])
        command.main()
    else:
        _list_commands([name, *arguments])


@entrypoint
def _list_commands(arguments: list[str]) -> None:
    """Print the list of commands, or refuse what is none."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {_described(command)}" for name, command in COMMANDS.items())
    parser = Parser(
        prog=PROGRAM, description=__doc__, usage="%(prog)s COMMAND ...", epilog=f"commands:\n{rows}"
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.parse_args(arguments)


def _described(command: Command) -> str:
    has_script = command.script and project.IS_CHECKOUT
    return f"{command.purpose} ({command.script})" if has_script else command.purpose


if __name__ == "__main__":
    main()
