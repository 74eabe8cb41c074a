"""The commands of the kit. On a checkout each is also a script in slurm/, results/ or a stage.

    manygpus submit --gpus 4 --nodes 2 --plain train.py --lr 0.1

`manygpus COMMAND --help` explains one, with an example.
"""

import sys
from importlib import import_module
from typing import NamedTuple

from manygpus.config.command_line import Parser
from manygpus.errors import entrypoint


class Command(NamedTuple):
    """The module with the command's `main`, and what it does, for the list of all."""

    module: str
    purpose: str


COMMANDS = {
    "submit": Command(
        "commands.submit", "submit a training as a job: of the course, or your own script (--plain)"
    ),
    "sweep": Command(
        "commands.sweep", "run every combination of the given options as a job, and compare them"
    ),
    "jobs": Command("commands.jobs", "list the jobs: what each one runs, its state, and why it failed"),
    "why": Command("commands.jobs", "tell why a job failed, with the end of its log: manygpus why JOB"),
    "doctor": Command("jobs.doctor.cli", "check whether a job can work here, before it waits in the queue"),
    "monitor": Command("commands.monitor", "watch what a job does with its GPUs, cores and memory"),
    "compare": Command("commands.plot_results", "compare runs: speedup, efficiency, cost, figures"),
    "how-many": Command("commands.how_many_gpus", "recommend how many GPUs to ask for, from your runs"),
}


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        # The name by which its --help and its mistakes speak of it.
        sys.argv = [f"manygpus {name}", *arguments]
        import_module(f"manygpus.{COMMANDS[name].module}").main()
    else:
        _list_commands([name, *arguments])


@entrypoint
def _list_commands(arguments: list[str]) -> None:
    """Print the list of commands, or refuse what is none."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {command.purpose}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="manygpus", description=__doc__, usage="%(prog)s COMMAND ...", epilog=f"commands:\n{rows}"
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.parse_args(arguments)


if __name__ == "__main__":
    main()
