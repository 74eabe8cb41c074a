# shellcheck shell=bash disable=SC2034  # the scripts that source this use its variables
# The settings of this site: those of slurm/site.sh, and a default for each that it leaves out. Every job sources
# this file (through job_env.sh), and so do submit.py, sweep.py, compare.py and doctor.py on the login node.

failure="" # the error that ends the shell
fail() {
    failure=$1
    echo "error: $failure" >&2
    exit 1
}

# The error to report if a sourced file ends this shell, which would otherwise make the job COMPLETED.
ends=""
trap '[[ -z $ends ]] || fail "$ends"' EXIT

# --- the defaults -----------------------------------------------------------------------------------
KIT=$(cd "${BASH_SOURCE[0]%/*}/../../.." && pwd) # where the code is: the checkout, or a job's frozen copy of it
# Where the kit is installed without a checkout, these say where the user's project is, and which Python has the kit
# (manygpus/project.py).
REPOSITORY=${MANYGPUS_PROJECT:-${MANYGPUS_CHECKOUT:-$KIT}}
site=${MANYGPUS_SITE_FILE:-$REPOSITORY/slurm/site.sh}
NAME_OF_SITE=${site#"$REPOSITORY/"} # as messages name it
SITE_SRUN_ARGS=()
SITE_CONTAINER=()
activate_environment() {
    if [[ -f $REPOSITORY/.venv/bin/activate ]]; then
        source "$REPOSITORY/.venv/bin/activate"
    fi
}

# Containers and cron leave it unset, and folders in site.sh have it in their names (seen: /scratch/$USER).
: "${USER:=$(id -un)}"

# --- the site file ----------------------------------------------------------------------------------
if [[ -e $site || -L $site ]]; then
    # An editor on Windows writes these characters, and bash takes them for a part of the last word of each line.
    if grep -q -e $'\r' -e $'^\xef\xbb\xbf' "$site"; then
        fail "$NAME_OF_SITE has the line ends or the byte order mark of Windows, which are text to bash: \
sed -i 's/\r\$//; 1s/^\xef\xbb\xbf//' $NAME_OF_SITE"
    fi
    # bash only warns about a here-document without an end, and exits with 0.
    problem=$(LC_ALL=C bash -n "$site" 2>&1) && [[ -z $problem ]] ||
        fail "$NAME_OF_SITE is not valid shell code, correct it: ${problem%%$'\n'*}"
    ends="$NAME_OF_SITE ends the shell that reads it: leave out exit, exec, commands that fail, and variables \
that are not set."
    # shellcheck source=/dev/null
    source "$site"
    ends=""
fi

# --- what follows from the site file ----------------------------------------------------------------
export MANYGPUS_DATA_DIR=${SITE_DATA_DIR:-$REPOSITORY/data}
export MANYGPUS_RESULTS_DIR=${SITE_RESULTS_DIR:-$REPOSITORY/results}
# Here each job has a folder for its checkpoints, samples and error notes.
JOBS_DIR=${SITE_SCRATCH_DIR:-$MANYGPUS_RESULTS_DIR/jobs}
for path in "$MANYGPUS_DATA_DIR" "$MANYGPUS_RESULTS_DIR" "$JOBS_DIR"; do
    [[ $path == /* ]] ||
        fail "$NAME_OF_SITE names the folder $path, relative to where you are: begin it with / or \$HOME."
done
[[ ${SITE_MONITOR:=on} == on || $SITE_MONITOR == off ]] ||
    fail "SITE_MONITOR is on or off, not $SITE_MONITOR: correct it in $NAME_OF_SITE or in your shell."
[[ ${SITE_MOST_RESTARTS:=50} =~ ^(0|[1-9][0-9]*)$ ]] ||
    fail "SITE_MOST_RESTARTS is a number, not $SITE_MOST_RESTARTS: correct it in $NAME_OF_SITE or in your shell."
[[ ${SITE_RESTARTS_IN_JOB:=1} =~ ^(0|[1-9][0-9]*)$ ]] ||
    fail "SITE_RESTARTS_IN_JOB is a number, not $SITE_RESTARTS_IN_JOB: correct it in $NAME_OF_SITE or in your shell."
[[ ${SITE_STALLED_SECONDS:=0} =~ ^(0|[1-9][0-9]*)$ ]] ||
    fail "SITE_STALLED_SECONDS is a number, not $SITE_STALLED_SECONDS: correct it in $NAME_OF_SITE or in your shell."
[[ $SITE_STALLED_SECONDS == 0 || $SITE_MONITOR == on ]] ||
    fail "SITE_STALLED_SECONDS needs the monitor: leave out SITE_MONITOR=off, or SITE_STALLED_SECONDS."
[[ ${SITE_NODE_CHECK:=off} =~ ^(off|on|avoid)$ ]] ||
    fail "SITE_NODE_CHECK is off, on or avoid, not $SITE_NODE_CHECK: correct it in $NAME_OF_SITE or in your shell."
# Below the ports that the system assigns by itself (from 32768 on).
: "${SITE_PORTS:=10000-29999}"
if [[ ! $SITE_PORTS =~ ^[1-9][0-9]*-[1-9][0-9]*$ ]] || ((${SITE_PORTS%-*} > ${SITE_PORTS#*-})); then
    fail "SITE_PORTS is a range such as 10000-29999, not $SITE_PORTS: correct it in $NAME_OF_SITE or in your shell."
fi
# gloo takes names only, and looks for an interface that is called so (seen: ^lo,docker0 and =eth0, for NCCL).
[[ ${SITE_NETWORK_INTERFACE:-} != [=^]* ]] ||
    fail "SITE_NETWORK_INTERFACE names interfaces, such as ib0, and $SITE_NETWORK_INTERFACE is notation of NCCL \
that gloo does not know: correct it in $NAME_OF_SITE, or export NCCL_SOCKET_IFNAME there in its place."
: "${SITE_STAGE_ENV:=}"
if [[ $SITE_STAGE_ENV ]]; then
    [[ ! ${SITE_CONTAINER[*]} ]] ||
        fail "SITE_STAGE_ENV is an environment outside of containers, and SITE_CONTAINER would not use it: leave one \
of them out in $NAME_OF_SITE."
    [[ $SITE_STAGE_ENV == /* && -f $SITE_STAGE_ENV ]] ||
        fail "SITE_STAGE_ENV=$SITE_STAGE_ENV is not there: it is the whole path of an archive (slurm/DATA.md says how \
to make it), or leave it out."
fi
if [[ ! ${MANYGPUS_PROJECT:-} ]]; then
    export PYTHONPATH=$KIT${PYTHONPATH:+:$PYTHONPATH} # finds manygpus if it is not installed
fi
# What decides for the job, and surrounds its script: the Python of the job, or that in which the kit is installed. In a
# container only its own Python can surround the script.
PYTHON_OF_NODE=${MANYGPUS_PYTHON:-python}
if [[ ! ${MANYGPUS_PROJECT:-} || ${SITE_CONTAINER[*]} ]]; then
    MANYGPUS_PYTHON=python
fi

# Activate the job's Python. Jobs run with `set -u`, under which both module and conda fail.
run_activate_environment() {
    ends="activate_environment of $NAME_OF_SITE ends the shell, and the job: leave out exit and set -u."
    set +u
    if ! activate_environment; then
        ends=""
        fail "activate_environment of $NAME_OF_SITE failed: try its lines on the login node."
    fi
    set -u
    ends=""
}
