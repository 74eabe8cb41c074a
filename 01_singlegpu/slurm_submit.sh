#!/bin/bash
# Stage 01 as a Slurm job, from this folder: sbatch slurm_submit.sh --epochs 10
# Options of sbatch go before the name of the script, options of the training after it.
# A copy of mnist_singlegpu.py with a model of yours goes first: sbatch slurm_submit.sh my_training.py --epochs 10

#SBATCH --job-name=mnist-single
#SBATCH --nodes=1
#SBATCH --ntasks=1                # one process
#SBATCH --gpus-per-node=1         # with one GPU
#SBATCH --cpus-per-task=2         # CPU cores for that process and its data loader
#SBATCH --mem=8G                  # of the node, 8 for each GPU: a process with CUDA takes 2 to 4
#SBATCH --time=00:30:00           # the job is ended after this
#SBATCH --output=%x-%j.log        # job name and number
#SBATCH --signal=USR2@60          # a minute before the end: save a checkpoint,
#SBATCH --requeue                 # go back to the queue,
#SBATCH --open-mode=append        # and continue in the same log

set -euo pipefail
[[ -f ${SLURM_SUBMIT_DIR:-}/mnist_singlegpu.py ]] || { echo "error: submit it with sbatch from its folder: cd 01_singlegpu" >&2; exit 1; }
source "$SLURM_SUBMIT_DIR/../slurm/job_env.sh"
choose_training mnist_singlegpu.py "$@"

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 "${SITE_SRUN_ARGS[@]}" \
    "${SITE_CONTAINER[@]}" python "${TRAINING[@]}"
