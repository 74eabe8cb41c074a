# shellcheck shell=bash disable=SC2034
# A site with a Python module, and a virtual environment that was created with it:
#     cp slurm/sites/venv.sh slurm/site.sh
export SBATCH_PARTITION=gpu
export SBATCH_QOS=short

activate_environment() {
    module load python/3.11
    source "$HOME/venvs/tutorial/bin/activate"
}

SITE_SCRATCH_DIR=/scratch/$USER/tutorial-jobs
SITE_NETWORK_INTERFACE=ib0
