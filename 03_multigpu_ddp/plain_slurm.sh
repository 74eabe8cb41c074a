#!/bin/bash
# plain_ddp.py on two nodes with four GPUs each, with nothing of the kit: sbatch plain_slurm.sh --epochs 2
# For a script of yours, put its name in place of plain_ddp.py. What makes your Python ready (module load, conda
# activate) goes before srun, unless you have done it in the shell that you call sbatch from.

#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4       # one process per GPU:
#SBATCH --gpus-per-node=4         # keep these two equal
#SBATCH --cpus-per-task=4         # CPU cores for each process: one for itself, three that load images
#SBATCH --mem=32G                 # of each node
#SBATCH --time=00:30:00
#SBATCH --signal=USR2@60          # 60 seconds before the limit, the ranks receive USR2: they save and stop
#SBATCH --requeue                 # the job may go back to the queue,
#SBATCH --open-mode=append        # and goes on in the same log

set -euo pipefail
# The job has a folder, the same when it comes back from the queue. The script saves there, and finds it in this variable.
# To resume the training of job 123 in a new job: TRAINKIT_JOB_DIR=job-123 sbatch plain_slurm.sh
export TRAINKIT_JOB_DIR=${TRAINKIT_JOB_DIR:-job-$SLURM_JOB_ID}
mkdir -p "$TRAINKIT_JOB_DIR"
rm -f "$TRAINKIT_JOB_DIR/stopped"
# Where the ranks meet: the first node, and a port that no other job on it has.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# Slurm sets each rank's number in the process that srun starts, so it is read there (in single quotes), not here.
# --cpus-per-task is repeated for srun: with Slurm 22.05 to 23.02 srun does not take it over from #SBATCH, and every rank
# would share one core with its loader. With other releases the repetition does no harm.
# If a rank fails, srun ends the others (--kill-on-bad-exit). With -u all that a rank prints is in the log at once, also
# if the rank is killed.
# shellcheck disable=SC2016
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=60 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    exec python -u plain_ddp.py "$@"' bash "$@"

# A training that the signal has stopped has saved, and left this note. The job waits in the queue, and starts again.
if [[ -e $TRAINKIT_JOB_DIR/stopped ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
