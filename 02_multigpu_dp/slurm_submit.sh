#!/bin/bash
# Stage 02 as a Slurm job, from this folder: sbatch slurm_submit.sh --epochs 10
# Options of sbatch go before the name of the script, options of the training after it.
# A copy of mnist_multigpu.py with a model of yours goes first: sbatch slurm_submit.sh my_training.py --epochs 10

#SBATCH --job-name=mnist-dp
#SBATCH --nodes=1                 # DataParallel cannot leave its node
#SBATCH --ntasks=1                # one process, which drives all GPUs
#SBATCH --gpus-per-node=2         # for four: sbatch --gpus-per-node=4 --mem=32G slurm_submit.sh
#SBATCH --cpus-per-task=4         # CPU cores for that process and its data loader
#SBATCH --mem=16G                 # of the node, 8 for each GPU: a process with CUDA takes 2 to 4
#SBATCH --time=00:30:00           # the job is ended after this
#SBATCH --output=%x-%j.log        # job name and number
#SBATCH --signal=USR2@60          # a minute before the end: save a checkpoint,
#SBATCH --requeue                 # go back to the queue,
#SBATCH --open-mode=append        # and continue in the same log

set -euo pipefail
[[ -f ${SLURM_SUBMIT_DIR:-}/mnist_multigpu.py ]] || { echo "error: submit it with sbatch from its folder: cd 02_multigpu_dp" >&2; exit 1; }
source "$SLURM_SUBMIT_DIR/../slurm/job_env.sh"
choose_training mnist_multigpu.py "$@"

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 "${SITE_SRUN_ARGS[@]}" \
    "${SITE_CONTAINER[@]}" python "${TRAINING[@]}"
