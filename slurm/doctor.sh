#!/bin/bash
# The job of `python slurm/doctor.py --job`, in which every rank tries what a training will do. It asks for
# nothing by itself: doctor.py asks, in the words of the site. Its first argument is the Python of the ranks.

set -euo pipefail
source "$SLURM_SUBMIT_DIR/job_env.sh"

# Each rank ends by itself, as each of its steps has a limit, and it does not end the others
# (--kill-on-bad-exit). --wait is for a rank that hangs even then.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=540 "${SITE_SRUN_ARGS[@]}" \
    "${SITE_CONTAINER[@]}" "$1" -m trainkit.doctor.checkup \
    --data-dir "$TRAINKIT_DATA_DIR" --results-dir "$TRAINKIT_RESULTS_DIR" "${@:2}"
