#!/bin/bash
# Stage 03 as a Slurm job, from this folder: sbatch slurm_submit.sh --epochs 10
# On two nodes: sbatch --nodes=2 slurm_submit.sh
# On four GPUs: sbatch --ntasks-per-node=4 --gpus-per-node=4 --mem=32G slurm_submit.sh
# Options of sbatch go before the name of the script, options of the training after it.
# A copy of mnist_ddp.py with a model of yours goes first: sbatch slurm_submit.sh my_training.py --epochs 10

#SBATCH --job-name=mnist-ddp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2       # one process per GPU:
#SBATCH --gpus-per-node=2         # keep these two equal
#SBATCH --cpus-per-task=2         # CPU cores for each process and its data loader
#SBATCH --mem=16G                 # of each node, 8 for each GPU: a process with CUDA takes 2 to 4
#SBATCH --time=00:30:00           # the job is ended after this
#SBATCH --output=%x-%j.log        # job name and number
#SBATCH --signal=USR2@60          # a minute before the end: save a checkpoint,
#SBATCH --requeue                 # go back to the queue,
#SBATCH --open-mode=append        # and continue in the same log

set -euo pipefail
[[ -f ${SLURM_SUBMIT_DIR:-}/mnist_ddp.py ]] || { echo "error: submit it with sbatch from its folder: cd 03_multigpu_ddp" >&2; exit 1; }
source "$SLURM_SUBMIT_DIR/../slurm/job_env.sh"
choose_training mnist_ddp.py "$@"

# srun starts every rank. If a rank fails, srun ends the others at once (--kill-on-bad-exit), and if one leaves early,
# after 60 seconds (--wait). Otherwise they would notice late, or never if they are outside any collective.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=60 "${SITE_SRUN_ARGS[@]}" \
    "${SITE_CONTAINER[@]}" python "${TRAINING[@]}"
