"""Send stage 01 to Slurm as a job: one process on one GPU. Where there is no Slurm, run it here.

Try: python submit.py --wait --epochs 2
"""

from pathlib import Path
from runpy import run_path

try:
    import submitit

    from manygpus import errors
    from manygpus.jobs.inside.job_task import Training
    from manygpus.jobs.submit import submission
    from manygpus.jobs.submit.request import Request
    from manygpus.jobs.watch.job_status import Handle, follow
except ImportError:
    # Where the environment of a different project is active, the kit's own Python takes over.
    run_path(str(Path(__file__).resolve().parents[1] / "manygpus" / "kit_python.py"))["take_over"]()
    raise


def submit(request: Request) -> Handle:
    """Send the job, or start it here, and do not wait for its end. Without Slurm, a sweep calls this, too."""
    # It checks the request before, and puts a refusal by Slurm into one sentence.
    with submission.sending(request) as sent:
        executor = submitit.AutoExecutor(
            # For submitit's files and the log of each rank: all nodes have to see it.
            request.folder,
            # "slurm", or "local": processes of this machine.
            cluster=request.cluster,
            # What follows srun goes into the job's shell as it is; job_env.sh has set these variables there.
            slurm_python='--cpus-per-task="$SLURM_CPUS_PER_TASK" "${SITE_SRUN_ARGS[@]}" '
            '"${SITE_CONTAINER[@]}" env PYTHONSAFEPATH=1 python',
        )
        executor.update_parameters(
            name=request.job_name,
            nodes=1,
            tasks_per_node=1,
            timeout_min=request.timeout_min,
            stderr_to_stdout=True,
            slurm_partition=request.partition,
            # USR2 comes a minute before the end: the ranks save a checkpoint, and the job is queued again.
            slurm_signal_delay_s=60,
            slurm_additional_parameters={
                "requeue": True,
                # GPUs, cores and memory, named as slurm/site.sh says. Without that file they are
                # {"gpus-per-node": "1", "cpus-per-task": "2", "mem": "8G"}.
                **request.sbatch_options,
            },
            # Bash, before srun: it sources slurm/job_env.sh.
            slurm_setup=request.setup,
            slurm_srun_args=[
                # If the process fails, the job fails at once.
                *request.srun_options,
                # Rank 0 writes into the log of the job script.
                "--open-mode=append",
            ],
        )
        # submitit pickles this object, and calls it in every process of the job.
        sent.job = executor.submit(Training(request.stage, request.arguments))
    return sent.handle


@errors.entrypoint
def main() -> int:
    request, own_options = submission.parse("single", __doc__)
    if own_options.dry_run:
        submission.preview(request)
        return 0
    job = submit(request)
    # Its number, its log, and how to stop it.
    submission.announce(request, job)
    return follow(job) if own_options.wait else 0


if __name__ == "__main__":
    main()
