"""What submitit calls in every process of a job: the stage script, as `srun python` would start it."""

import os
import runpy
import signal
import sys
from dataclasses import dataclass

from manygpus import job_folder, launchers
from manygpus.jobs.inside import run_plain
from manygpus.jobs.local_job import GPUS, VISIBLE
from manygpus.jobs.stages import Stage
from manygpus.process import end_with


@dataclass(frozen=True)
class Training:
    """One rank of a job: the script of `stage` with these `arguments`.

    submitit pickles this object, and calls it in every process that srun, or here its own controller, has
    started. Three things that submitit offers are not used, and these are the reasons:

    - Its answer to USR2, and so `checkpoint()`: its handler runs in the middle of a step, saves on rank 0
      only and requeues at once. Ranks that train together have to stop at the same step, so the stage itself
      answers the signal (checkpoint/checkpointer.py), and scripts/job_env.sh requeues when all have ended.
    - Its results, the pickle with the return value or the traceback of each rank: a rank that is killed
      leaves none, and where a rank fails all others do, too. Which one was first is in the ranks' notes in
      the job's folder (manygpus.job_folder). So this ends by SystemExit, of which submitit makes no
      result, and Slurm sees the stage's exit code.
    - `TorchDistributedEnvironment`: it shows each process only one GPU, does not expect MASTER_PORT to be
      set, and takes ports that the system assigns itself.
    """

    stage: Stage
    arguments: tuple[str, ...]

    def __call__(self) -> None:
        import submitit

        # A queue.py beside the script was not for submitit, but it is for the script.
        os.environ.pop("PYTHONSAFEPATH", None)
        # submitit has set these: SIGTERM would no longer end a process.
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        job = submitit.JobEnvironment()
        os.environ["RANK"] = str(job.global_rank)
        os.environ["WORLD_SIZE"] = str(job.num_tasks)
        os.environ["LOCAL_RANK"] = str(job.local_rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(
            launchers.local_world_size_of_step(os.environ, job.num_tasks, job.num_nodes)
        )
        os.environ["GROUP_WORLD_SIZE"] = str(job.num_nodes)
        on_this_machine = job.cluster == "local"
        if on_this_machine:
            controller = int(job.job_id)
            end_with(controller, signal.SIGTERM)
            # submitit numbers GPUs from 0; the user may have chosen others.
            os.environ |= dict.fromkeys(VISIBLE, os.environ[GPUS])
        if self.stage.plain:
            run_plain.run(self.stage.program, self.arguments, noted=on_this_machine)
        sys.path.insert(0, str(self.stage.script.parent))
        sys.argv = [
            str(self.stage.script),
            "--data-dir",
            os.environ["MANYGPUS_DATA_DIR"],
            "--results-dir",
            os.environ["MANYGPUS_RESULTS_DIR"],
            "--checkpoint-dir",
            str(job_folder.here() / job_folder.CHECKPOINTS),
            "--resume",
            "auto",
            *self.arguments,
        ]
        runpy.run_path(sys.argv[0], run_name="__main__")
