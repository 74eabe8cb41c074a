# shellcheck shell=bash disable=SC2034
# A site with NVIDIA's pyxis and enroot: srun itself starts the container.
#     cp slurm/sites/pyxis.sh slurm/site.sh
export SBATCH_PARTITION=gpu
export SBATCH_ACCOUNT=my-project

# Save the image of slurm/containers once: enroot import --output ~/images/tutorial.sqsh dockerd://tutorial
# --no-container-mount-home keeps packages in your home apart from those of the image.
SITE_SRUN_ARGS=(
    --container-image="$HOME/images/tutorial.sqsh"
    --container-mounts="${REPOSITORY:-}:${REPOSITORY:-},/shared/datasets:/shared/datasets"
    --container-workdir="$PWD"
    --no-container-mount-home
)
SITE_DATA_DIR=/shared/datasets/mnist
