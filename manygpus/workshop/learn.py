"""First steps: does this machine have what the exercises need, which core exercises are done, what is next?

Try: make learn
"""

import platform

import torch

from manygpus.config.known_datasets import DEFAULT_DATA_DIR
from manygpus.data import staging
from manygpus.devices import build, device_name, usable_gpus
from manygpus.errors import REPOSITORY, UserError, entrypoint, print_line
from manygpus.jobs import site, slurm
from manygpus.workshop.exercises import Course, relative


@entrypoint
def main() -> None:
    data_dir = site.read_site().data_dir
    print_line(f"python  {platform.python_version()}, torch {torch.__version__} for {build()}")
    try:
        names = [device_name(gpu) for gpu in usable_gpus()]
        gpus = f"{len(names)}: {', '.join(names)}" if names else "none: everything runs on the CPU"
    except UserError as error:
        gpus = str(error)
    print_line(f"GPUs    {gpus}")
    commands = []
    try:
        staging.check("mnist", data_dir)
        print_line(f"MNIST   in {data_dir}")
    except UserError as error:
        print_line(f"MNIST   {'missing or damaged' if data_dir == DEFAULT_DATA_DIR else error}")
        commands.append("make data")
    if slurm.why_not_here():
        print_line(
            "Slurm   none: submit.py trains on this machine (`make cluster-up` starts a Slurm to practise on)"
        )
    else:
        print_line("Slurm   found: submit.py submits jobs")

    course = Course(REPOSITORY)
    print_line(f"\n{course.core_path()}\n\n{course.progress()}")
    if course.following is None:
        return
    activate = REPOSITORY / ".venv" / "bin" / "activate"
    # A class may share another environment.
    if activate.exists():
        commands.append(f"source {relative(activate)}")
    commands += [f"cd {relative(course.following.stage)}", "python exercises/check.py"]
    print_line("To begin, type these commands:")
    for command in commands:
        print_line(f"  {command}")


if __name__ == "__main__":
    main()
