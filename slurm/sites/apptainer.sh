# shellcheck shell=bash disable=SC2034
# A site where Python runs in an Apptainer (Singularity) container, with the image of slurm/containers:
#     cp slurm/sites/apptainer.sh slurm/site.sh
export SBATCH_PARTITION=gpu

activate_environment() {
    module load apptainer
    export PYTHONNOUSERSITE=1 # the container sees your home: ignore the packages in ~/.local
}

# --nv brings the node's GPU driver into the container, and --bind the checkout and the data.
SITE_CONTAINER=(apptainer exec --nv --bind "${REPOSITORY:-},/shared/datasets" "$HOME/images/tutorial.sif")
SITE_DATA_DIR=/shared/datasets/mnist
