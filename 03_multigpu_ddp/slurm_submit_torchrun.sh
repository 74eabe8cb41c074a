#!/bin/bash
# Stage 03 as a Slurm job in which torchrun starts the ranks: srun starts one torchrun per node, and
# each torchrun one process per GPU of its node. From this folder: sbatch slurm_submit_torchrun.sh --epochs 10
# On two nodes: sbatch --nodes=2 slurm_submit_torchrun.sh
# Options of sbatch go before the name of the script, options of the training after it.
# A copy of mnist_ddp.py with a model of yours goes first: sbatch slurm_submit_torchrun.sh my_training.py --epochs 10

#SBATCH --job-name=mnist-torchrun
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1       # one torchrun
#SBATCH --gpus-per-node=2         # torchrun starts as many processes
#SBATCH --cpus-per-task=4         # CPU cores for all processes of a node
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
[[ ${SLURM_TASKS_PER_NODE:-1} =~ ^1(\(x[0-9]+\))?$ ]] ||
    fail "torchrun starts the ranks of a node, so there is one task on each: leave out --ntasks-per-node."

# manygpus/distributed/torchrun.py runs torchrun with a rank for each GPU of its node; they share the CPU cores of the
# one task. On most clusters Slurm signals only what srun has started, and it hands USR2 and SIGTERM on to the ranks.
# shellcheck disable=SC2034 # for the end of the job: torchrun says which of its ranks died, and srun does not
launcher=torchrun

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=60 "${SITE_SRUN_ARGS[@]}" \
    "${SITE_CONTAINER[@]}" python -m manygpus.distributed.torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
    "${TRAINING[@]}"
