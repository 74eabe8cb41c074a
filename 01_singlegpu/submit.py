"""Send stage 01 to Slurm as a job: one process on one GPU. Where there is no Slurm, run it here.

Try: python submit.py --wait --epochs 2
"""

from trainkit import errors
from trainkit.jobs import submission
from trainkit.jobs.following import Handle, follow
from trainkit.jobs.submission import Request
from trainkit.jobs.training import Training

import submitit


def submit(request: Request) -> Handle:
    """Send the job, or start it here, and do not wait for its end. Sweeps send their jobs by this, too."""
    with submission.sending(request) as sent:  # checks it first, and puts a refusal into one sentence
        executor = submitit.AutoExecutor(
            request.folder,  # for submitit's files and the log of each rank; all nodes have to see it
            cluster=request.cluster,  # "slurm", or "local": processes of this machine
            # What follows srun goes into the job's shell as it is; job_env.sh has set these variables there.
            slurm_python='--cpus-per-task="$SLURM_CPUS_PER_TASK" "${SITE_SRUN_ARGS[@]}" '
            '"${SITE_CONTAINER[@]}" env PYTHONSAFEPATH=1 python',
        )
        executor.update_parameters(
            name=request.stage.job_name,
            nodes=1,
            tasks_per_node=1,
            timeout_min=request.timeout_min,
            stderr_to_stdout=True,
            slurm_partition=request.partition,
            slurm_signal_delay_s=60,  # USR2 comes a minute before the end: save a checkpoint,
            slurm_additional_parameters={
                "requeue": True,  # and go back to the queue
                # GPUs, cores and memory, named as slurm/site.sh says; without that file:
                # {"gpus-per-node": "1", "cpus-per-task": "2", "mem": "8G"}
                **request.sbatch_options,
            },
            slurm_setup=request.setup,  # bash, before srun: sources slurm/job_env.sh
            slurm_srun_args=[
                "--kill-on-bad-exit=1",
                "--open-mode=append",  # rank 0 writes into the log of the job script
            ],
        )
        # submitit pickles this object, and calls it in every process of the job.
        sent.job = executor.submit(Training(request.stage, request.arguments))
    return sent.handle


def main() -> int:
    request, own_options = submission.parse("single", __doc__)
    if own_options.dry_run:
        errors.tell(submission.preview(request))
        return 0
    job = submit(request)
    submission.announce(request, job)  # its number, its log, and how to stop it
    return follow(job) if own_options.wait else 0


if __name__ == "__main__":
    errors.run(main)
