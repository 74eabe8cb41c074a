"""Where the call of submitit is: in the submit.py of a stage, or here, without stages."""

import runpy
from collections.abc import Callable

from manygpus import project
from manygpus.errors import REPOSITORY
from manygpus.jobs.inside.job_task import Training
from manygpus.jobs.stages import STAGE_FOLDERS, Stage
from manygpus.jobs.submit import submission
from manygpus.jobs.submit.request import Request
from manygpus.jobs.submit.slurm_options import CPUS, OF_SITE, PYTHON
from manygpus.jobs.watch.job_status import Handle


def submitter(stage: Stage) -> Callable[[Request], Handle]:
    """Return `submit` of the stage's submit.py, or the one below."""
    if not project.IS_CHECKOUT:
        return submit
    return runpy.run_path(str(REPOSITORY / STAGE_FOLDERS[stage.name] / "submit.py"))["submit"]


def submit(request: Request) -> Handle:
    """Send the job, or start it here, and do not wait for its end.

    In a checkout the submit.py of stage 03 does it, and explains each line.
    """
    import submitit

    shape = request.resources
    with submission.sending(request) as sent:
        executor = submitit.AutoExecutor(
            request.folder,
            cluster=request.cluster,
            slurm_python=f"{CPUS} {OF_SITE} env PYTHONSAFEPATH=1 {PYTHON}",
        )
        executor.update_parameters(
            name=request.job_name,
            nodes=shape.nodes,
            tasks_per_node=shape.tasks_per_node,
            timeout_min=request.timeout_min,
            stderr_to_stdout=True,
            slurm_partition=request.partition,
            slurm_signal_delay_s=60,
            slurm_additional_parameters={"requeue": True, **request.sbatch_options},
            slurm_setup=request.setup,
            slurm_srun_args=[*request.srun_options, "--open-mode=append"],
        )
        sent.job = executor.submit(Training(request.stage, request.arguments))
    return sent.handle
