#!/bin/bash
# One node, on both its GPUs, by torchrun.

#SBATCH --job-name=launch
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1       # torchrun, which starts a rank for each GPU
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --mem=16G
#SBATCH --time=00:15:00
#SBATCH --output=launch-%j.log

set -euo pipefail
source "$SLURM_SUBMIT_DIR/../slurm/job_env.sh"
begin_job mnist_ddp.py "$@"

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=60 "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" \
    python -m torch.distributed.run --nproc-per-node="$SLURM_GPUS_ON_NODE" \
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID" mnist_ddp.py \
    --data-dir "$DATA_DIR" --results-dir "$RESULTS_DIR" --batch-size 256 --train-size 12000 --epochs 10 --precision fp32 "$@"
