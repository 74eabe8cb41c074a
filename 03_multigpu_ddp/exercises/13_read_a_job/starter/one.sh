#!/bin/bash
# One node, on both its GPUs.

#SBATCH --job-name=one
#SBATCH --nodes=1
#SBATCH --ntasks=2                # one for each GPU
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=1
#SBATCH --mem=16G
#SBATCH --time=00:15:00
#SBATCH --output=one-%j.log

set -euo pipefail
source "$SLURM_SUBMIT_DIR/../slurm/job_env.sh"
begin_job mnist_ddp.py "$@"

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=60 "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" \
    python mnist_ddp.py \
    --data-dir "$DATA_DIR" --results-dir "$RESULTS_DIR" --batch-size 256 --train-size 12000 --epochs 10 --precision fp32 "$@"
