#!/bin/bash
# Resume without a handler: end the training before the time limit, and go back to the queue.
# It loses the epoch that it is in. Try: sbatch exercises/07_time_limit/mine/requeue.sh --epochs 50

#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2       # one process per GPU
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --mem=16G
#SBATCH --time=00:30:00
#SBATCH --requeue                 # the job may go back to the queue,
#SBATCH --open-mode=append        # and continue in the same log

set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# `timeout` ends the training after 25 of the 30 minutes, with the exit code 124.
code=0
# shellcheck disable=SC2016
timeout "${TRAIN_FOR:-25m}" srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=60 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    exec python -u exercises/07_time_limit/mine/train.py "$@"' bash "$@" || code=$?
if ((code == 124)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
