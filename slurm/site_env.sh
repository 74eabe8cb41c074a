# shellcheck shell=bash disable=SC2034  # what it sets is used by those that source it
# What is special about this site: slurm/site.sh, with a default for all that it leaves out. Sourced by
# every job (job_env.sh) and, on the login node, by submit.py, sweep.py, compare.py and doctor.py.

fail() {
    echo "error: $1" >&2
    exit 1
}

REPOSITORY=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)
SITE_SRUN_ARGS=()
SITE_CONTAINER=()
activate_environment() {
    if [[ -f $REPOSITORY/.venv/bin/activate ]]; then
        source "$REPOSITORY/.venv/bin/activate"
    fi
}

if [[ -f $REPOSITORY/slurm/site.sh ]]; then
    problem=$(bash -n "$REPOSITORY/slurm/site.sh" 2>&1) ||
        fail "slurm/site.sh is not valid shell code, correct it: ${problem%%$'\n'*}"
    source "$REPOSITORY/slurm/site.sh"
fi

DATA_DIR=${SITE_DATA_DIR:-$REPOSITORY/data}
RESULTS_DIR=${SITE_RESULTS_DIR:-$REPOSITORY/results}
JOBS_DIR=${SITE_SCRATCH_DIR:-$RESULTS_DIR/jobs} # a folder for each job: its checkpoints and error notes
PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH} # trainkit, where it is not installed
export PYTHONPATH

# Jobs run with `set -u`, which neither module nor conda can bear.
activate() {
    set +u
    activate_environment || fail "activate_environment of slurm/site.sh failed: try its lines on the login node."
    # Before bash 4.4 an empty array counts as not set.
    ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)) || set -u
}
