# shellcheck shell=bash disable=SC2034
# A site with Podman on its nodes, 4.3 or newer, and the image of slurm/containers:
#     cp slurm/sites/podman.sh slurm/site.sh
export SBATCH_PARTITION=gpu

# Each node has its own images. A node that lacks the image loads it from a file that all nodes see.
activate_environment() {
    local on_each=()
    [[ -z ${SLURM_JOB_ID:-} ]] || on_each=(srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
    # shellcheck disable=SC2016  # the shell that this starts replaces "$0"
    "${on_each[@]}" bash -c 'podman image exists tutorial || podman load --quiet --input "$0"' \
        "$HOME/images/tutorial.tar"
}

# The container gets the job's variables, the node's network and GPUs, and the checkout and the data at the same
# paths. --cgroups=disabled lets Slurm find it, and end it with its step. PATH leads to the `python` of the image.
SITE_CONTAINER=(
    podman run --rm --network=host --ipc=host --cgroups=disabled --security-opt=label=disable
    --env-host --env=PATH=/usr/local/bin:/usr/bin:/bin --unsetenv=LD_LIBRARY_PATH
    --volume="${REPOSITORY:-}:${REPOSITORY:-}" --volume=/shared/datasets:/shared/datasets --workdir="$PWD"
    --device=nvidia.com/gpu=all
    tutorial
)
SITE_DATA_DIR=/shared/datasets/mnist
SITE_MONITOR=off # the monitor would not find the ranks, because each container numbers its own processes
