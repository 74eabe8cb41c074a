#!/bin/bash
# My first job script. Fill in every gap, and fix the line that Slurm would not read.
# Submit it from the folder of the stage: sbatch exercises/01_jobscript/mine/job.sh

#SBATCH --job-name=first
#SBATCH --nodes=1
#SBATCH --ntasks=____           # how many processes has stage 01?
#SBATCH --gpus-per-node=____    # how many GPUs does it use?
#SBATCH --cpus-per-task=____    # CPU cores: one for the training, and at least one for its loader
# SBATCH --mem=8G
#SBATCH --time=____             # HH:MM:SS; the training takes some minutes
#SBATCH --output=first-____.log # with the number of the job: no job overwrites the log of another

set -____ pipefail # end at the first error, also if a variable is not set
source "$SLURM_SUBMIT_DIR/../slurm/job_env.sh" # what is special about this site: slurm/site.sh

# With Slurm 22.05 to 23.02 srun needs the number of cores per task again; with others it does no harm.
srun ____ "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" \
    python mnist_singlegpu.py --data-dir "$DATA_DIR" --results-dir "$RESULTS_DIR" --epochs 2 --train-size 6000
