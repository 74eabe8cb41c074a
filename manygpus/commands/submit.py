"""Submit a training as a job: stage 03 of the course, or a script of your own.

Try: manygpus submit --gpus 4 --nodes 2 --plain train.py --lr 0.1
"""

import runpy

from manygpus.errors import REPOSITORY, UserError, entrypoint

SCRIPT = REPOSITORY / "03_multigpu_ddp" / "submit.py"


def main() -> None:
    """Run the submit.py of stage 03, which shows how a job is described."""
    _check()
    runpy.run_path(str(SCRIPT))["main"]()


@entrypoint
def _check() -> None:
    if not SCRIPT.is_file():
        raise UserError(f"{SCRIPT} is missing: the command needs a checkout of the kit, installed by `make`.")
