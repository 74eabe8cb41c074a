#!/bin/bash
# Run train.py on two GPUs, without the kit: sbatch job.sh --epochs 2
# Put the commands that prepare your Python (module load, conda activate) before
# srun, unless you have run them in the shell from which you call sbatch.

#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4       # one process per GPU:
#SBATCH --gpus-per-node=4         # keep these two equal
#SBATCH --cpus-per-task=4         # CPU cores of each process: one to train, the others to load images
#SBATCH --mem=32G                 # of each node
#SBATCH --time=00:30:00
#SBATCH --signal=USR2@60          # 60 seconds before the limit, the ranks receive USR2: they save and stop
#SBATCH --requeue                 # the job may go back to the queue,
#SBATCH --open-mode=append        # and continue in the same log

set -euo pipefail
# The training saves in the folder that this variable names. The folder stays the same when the job is requeued.
# To resume the training of job 123 in a new job: MANYGPUS_JOB_DIR=job-123 sbatch job.sh
export MANYGPUS_JOB_DIR=${MANYGPUS_JOB_DIR:-job-$SLURM_JOB_ID}
mkdir -p "$MANYGPUS_JOB_DIR"
rm -f "$MANYGPUS_JOB_DIR/stopped"
# Some sites count the cores by the GPU, and srun takes one of the two.
SLURM_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_PER_GPU:-1}}
unset SLURM_CPUS_PER_GPU
# The ranks meet on the first node, at a port that follows from the job's number.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# Slurm sets the number of a rank in the process that srun starts. With single quotes that process reads it, not this
# shell. --cpus-per-task is repeated, because with Slurm 22.05 to 23.02 srun does not take it from #SBATCH, and every
# rank would share one core with its loader. If a rank fails, srun ends the others (--kill-on-bad-exit). With -u every
# line is in the log at once, even if the rank is killed.
# shellcheck disable=SC2016
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=60 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    exec python -u train.py "$@"' bash "$@"

# If the signal has stopped the training, the script has saved and left this file. The job returns to the queue.
if [[ -e $MANYGPUS_JOB_DIR/stopped ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
