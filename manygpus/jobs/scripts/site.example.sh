# shellcheck shell=bash disable=SC2034
# All settings of your cluster. Copy this file, then edit the copy, which git ignores:
#     cp slurm/site.example.sh slurm/site.sh
# Complete examples for conda, venv, Apptainer, Podman and pyxis are in slurm/sites/.
# slurm/SITE.md explains every option. A line that you leave out keeps its default.

# --- 1. What to request from Slurm --------------------------------------------------------------
# submit.py, sweep.py and doctor.py read this file themselves. For plain `sbatch`, first run
# `source slurm/site.sh` in your shell. These variables override the #SBATCH lines of the job scripts;
# options on sbatch's command line override both.
#export SBATCH_PARTITION=gpu
#export SBATCH_ACCOUNT=my-project
#export SBATCH_RESERVATION=workshop
#export SBATCH_QOS=normal
#export SBATCH_CONSTRAINT=a100
#export SBATCH_TIMELIMIT=10                # minutes, if the partition allows less than our 30

# How submit.py, sweep.py and doctor.py request GPUs, CPU cores and memory. %d stands for the number,
# which the option counts per node, per task, per GPU or for the whole job. An empty value requests none.
#SITE_GPUS=--gres=gpu:a100:%d              # default: --gpus-per-node=%d
#SITE_CPUS=--cpus-per-gpu=%d               # default: --cpus-per-task=%d
#SITE_MEM=--mem-per-gpu=%dG                # default: --mem=%dG

# --- 2. The Python environment, activated inside every job --------------------------------------
# Default: .venv of this checkout if there is one, else the `python` of the shell you submit from.
#activate_environment() {
#    module purge
#    module load cuda
#    conda activate tutorial
#}

# A command placed before `python`, for sites that run it in a container; slurm/containers builds the image.
#SITE_CONTAINER=(apptainer exec --nv "$HOME/images/tutorial.sif")

# An archive of the environment, which each job unpacks on the disks of its nodes; slurm/DATA.md says how to make it.
#SITE_STAGE_ENV=$HOME/env.tar
#SITE_STAGE_DIR=/local/$USER               # a disk of each node's own; default: $SLURM_TMPDIR, $TMPDIR or /tmp

# --- 3. Folders, all on a file system that every node sees --------------------------------------
#SITE_DATA_DIR=/shared/datasets/mnist      # default: data/ of this checkout
#SITE_RESULTS_DIR=$HOME/results            # default: results/ of this checkout
#SITE_SCRATCH_DIR=/scratch/$USER           # checkpoints, samples, error notes; default: results/jobs/

# --- 4. How the processes start and meet --------------------------------------------------------
#SITE_SRUN_ARGS=(--mpi=none)               # additional arguments of srun
#SITE_NETWORK_INTERFACE=ib0                # the network between nodes, for NCCL and gloo
#SITE_PORTS=20000-20999                    # the job's number selects a port where the ranks meet; default: 10000-29999
#SITE_MOST_RESTARTS=20                     # how often a job may return to the queue; default: 50
#SITE_RESTARTS_IN_JOB=0                    # how often a job whose rank crashes may start again in its nodes; default: 1
#SITE_STALLED_SECONDS=1200                 # a rank that does nothing for so long is ended; default: 0, none is
#SITE_NODE_CHECK=on                        # measure a job's nodes; avoid: and go back to the queue without slow ones; default: off

# --- 5. What a job reports about itself ---------------------------------------------------------
#SITE_MONITOR=off                          # no samples, and no verdict in the log; default: on
