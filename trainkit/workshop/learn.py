"""First steps: does this machine have what the exercises need, which are done, and which comes next?

Try: make learn
"""

import platform

import torch

from trainkit.data import staging
from trainkit.devices import build, device_name, usable_gpus
from trainkit.errors import UserError, entrypoint, print_line
from trainkit.jobs import site, slurm, stages
from trainkit.workshop.exercises import Workbook, relative


@entrypoint
def main() -> None:
    data_dir = site.read_site().data_dir
    print_line(f"python  {platform.python_version()}, torch {torch.__version__} for {build()}")
    try:
        names = [device_name(gpu) for gpu in usable_gpus()]
        gpus = f"{len(names)}: {', '.join(names)}" if names else "none: the CPU stands in"
    except UserError as error:
        gpus = str(error)
    print_line(f"GPUs    {gpus}")
    commands = []
    try:
        staging.check("mnist", data_dir)
        print_line(f"MNIST   in {data_dir}")
    except UserError as error:
        print_line(f"MNIST   {'missing or damaged' if data_dir == staging.DEFAULT_DIR else error}")
        commands.append("make data")
    if slurm.why_not_here():
        print_line(
            "Slurm   none here: submit.py runs on this machine; make cluster-up starts one to practise on"
        )
    else:
        print_line("Slurm   here: submit.py sends jobs")

    workbooks = [Workbook(stage.script.parent / "exercises") for stage in stages.STAGES.values()]
    for workbook in workbooks:
        print_line(f"\n{workbook.folder.parent.name}\n{workbook.listed()}")
    unfinished = [workbook for workbook in workbooks if workbook.next and workbook.next.kind == "core"]
    if not unfinished:
        print_line(
            "\nThe core path is done. Next: a training of your own, YOUR_TRAINING.md, or an extra exercise."
        )
        return
    workbook = min(unfinished, key=lambda workbook: workbook.next.step)
    stage = workbook.folder.parent
    print_line(f"\n{workbook.bar()}\nThe lesson around it: {relative(stage / 'README.md')}. Go on with:")
    activate = stages.REPOSITORY / ".venv" / "bin" / "activate"
    # A class may share another environment.
    if activate.exists():
        commands.append(f"source {relative(activate)}")
    commands += [f"cd {relative(stage)}", "python exercises/check.py"]
    for command in commands:
        print_line(f"  {command}")


if __name__ == "__main__":
    main()
