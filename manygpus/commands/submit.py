"""Submit a training as a job: stage 03 of the course, or a script of your own.

Try: manygpus submit --gpus 4 --nodes 2 --plain train.py --lr 0.1
"""

import runpy

from manygpus import project
from manygpus.errors import REPOSITORY, entrypoint
from manygpus.jobs.submit import executor, submission
from manygpus.jobs.watch.job_status import follow
from manygpus.record.columns import DDP

DESCRIPTION = """Submit a script of yours as a job.

Try: manygpus submit --gpus 4 --nodes 2 train.py --lr 0.1
"""


def main() -> None:
    """Run the submit.py of stage 03, which shows how a job is described; do the same where there is none."""
    if project.IS_CHECKOUT:
        runpy.run_path(str(REPOSITORY / "03_multigpu_ddp" / "submit.py"))["main"]()
    else:
        _submit()


@entrypoint
def _submit() -> int:
    request, own_options = submission.parse(DDP, DESCRIPTION)
    if own_options.dry_run:
        submission.preview(request)
        return 0
    job = executor.submit(request)
    submission.announce(request, job)
    return follow(job) if own_options.wait else 0
