#!/bin/bash
# My first job script. Submit it from the folder of the stage: sbatch exercises/05_jobscript/mine/job.sh

#SBATCH --job-name=first
#SBATCH --nodes=1
#SBATCH --ntasks=1              # how many processes has stage 01?
#SBATCH --gpus-per-node=1       # how many GPUs does it use?
#SBATCH --cpus-per-task=2       # CPU cores: one for the training, and at least one for its loader
#SBATCH --mem=8G
#SBATCH --time=00:15:00         # HH:MM:SS; the training takes some minutes
#SBATCH --output=first-%j.log   # with the number of the job: no job overwrites the log of another

set -euo pipefail # end at the first error, also if a variable is not set
source "$SLURM_SUBMIT_DIR/../slurm/job_env.sh" # what is special about this site: slurm/site.sh

# Since Slurm 22.05 srun needs the number of cores per task again.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" \
    python mnist_singlegpu.py --data-dir "$DATA_DIR" --results-dir "$RESULTS_DIR" --epochs 2 --train-size 6000
