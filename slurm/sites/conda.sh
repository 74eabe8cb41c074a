# shellcheck shell=bash disable=SC2034
# A site where software comes as modules and Python as a conda environment:
#     cp slurm/sites/conda.sh slurm/site.sh
export SBATCH_PARTITION=gpu
export SBATCH_ACCOUNT=my-project

activate_environment() {
    module purge
    module load miniconda3
    # A job's shell does not read your .bashrc, so it learns `conda activate` here.
    source "$(conda info --base)/etc/profile.d/conda.sh"
    conda activate tutorial
}

SITE_DATA_DIR=/shared/datasets/mnist
