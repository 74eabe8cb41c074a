#!/bin/bash
# The job of `python slurm/doctor.py --job`, in which every rank tries what a training will do. It has no #SBATCH
# lines, because doctor.py requests what the site file says. Its first argument says where the project is, if that is
# not this checkout (manygpus/project.py); the second is the Python of the ranks.

set -euo pipefail
eval "$1"
shift
source "$SLURM_SUBMIT_DIR/job_env.sh"
begin_job

# Every check of a rank has a time limit, so each rank ends by itself, and a failed one does not end the others
# (--kill-on-bad-exit=0). --wait is for a rank that hangs nevertheless.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=540 "${SITE_SRUN_ARGS[@]}" \
    "${SITE_CONTAINER[@]}" "$1" "$KIT/manygpus/run_alone.py" manygpus.jobs.doctor.checkup \
    --data-dir "$MANYGPUS_DATA_DIR" --results-dir "$MANYGPUS_RESULTS_DIR" "${@:2}"
