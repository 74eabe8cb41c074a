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
from manygpus.workshop.exercises import CorePath, relative


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

    path = CorePath(REPOSITORY)
    name_width = max(len(exercise.name) for exercise in path.exercises)
    print_line(f"\nThe core path, {len(path.exercises)} exercises ({path.extras} more are extra):")
    for exercise in path.exercises:
        print_line(
            f"[{' ' if exercise in path.open else 'x'}] {exercise.step:2}  {exercise.stage.name:16}  "
            f"{exercise.name:{name_width}}  {exercise.minutes:3} min  {exercise.title}"
        )
    print_line(f"\n{path.bar()}")
    if not path.open:
        print_line(path.next_step(path.stages[0]))
        return
    following = path.open[0]
    stage = following.stage
    print_line(f"Next: {following.name}. Its lesson is {relative(stage / 'README.md')}. Type these commands:")
    activate = REPOSITORY / ".venv" / "bin" / "activate"
    # A class may share another environment.
    if activate.exists():
        commands.append(f"source {relative(activate)}")
    commands += [f"cd {relative(stage)}", "python exercises/check.py"]
    for command in commands:
        print_line(f"  {command}")


if __name__ == "__main__":
    main()
