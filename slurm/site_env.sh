# shellcheck shell=bash disable=SC2034  # what it sets is used by those that source it
# What is special about this site: slurm/site.sh, with a default for all that it leaves out. Sourced by
# every job (job_env.sh) and, on the login node, by submit.py, sweep.py, compare.py and doctor.py.

fail() {
    echo "error: $1" >&2
    exit 1
}

if [[ ${TRAINKIT_CHECKS_SITE:-} ]]; then
    echo "problem: it sources site_env.sh, which reads it: leave that out" >&2 && exit 1
fi
REPOSITORY=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)
SITE_SRUN_ARGS=()
SITE_CONTAINER=()
activate_environment() {
    if [[ -f $REPOSITORY/.venv/bin/activate ]]; then
        source "$REPOSITORY/.venv/bin/activate"
    fi
}

# What a site file can turn off or on, and those that source this one cannot bear.
usual_shell() {
    shopt -u failglob nocasematch
    set +o posix
    set +fk -B
    IFS=$' \t\n'
}

# Print why a job cannot read this site file, if so. It is read by another shell first, since what ends or replaces
# a shell, or never ends, would do that to the job without a word.
site_problem() {
    local output code began=$SECONDS most=60
    # \0 is the end of it, also where a process that was left behind could still write.
    # shellcheck disable=SC2016  # for the inner shell
    IFS= read -r -d '' output < <(
        REPOSITORY=$REPOSITORY TRAINKIT_CHECKS_SITE=1 timeout --signal=KILL "$most" bash -c '
            set -euo pipefail
            readonly REPOSITORY
            SITE_SRUN_ARGS=() SITE_CONTAINER=() traps=$(trap)
            activate_environment() { :; }
            fail() { echo "problem: $1" >&2 && exit 1; }
            ours=$(declare -f fail)
            source "$1" >/dev/null </dev/null
            set +o posix # which lists other traps
            shopt -u nocasematch
            if [[ $(trap) != "$traps" ]]; then
                trap - EXIT
                echo "problem: it sets a trap: leave that to the job"
            elif [[ $(jobs -p) ]]; then
                echo "problem: it leaves a process behind: start that in activate_environment"
            elif [[ $(declare -f fail) != "$ours" ]]; then
                echo "problem: it has its own function fail: give that another name"
            elif [[ $- == *[rt]* ]]; then
                echo "problem: it sets an option that ends or restricts a shell (set -t, set -r): leave that out"
            elif ! declare -F activate_environment >/dev/null; then
                echo "problem: it takes away activate_environment: leave that out"
            elif [[ $(readonly -p) =~ \ (IFS|[a-z_]+|[A-Z_]*RANK|[A-Z_]*WORLD_SIZE|TRAINING|SLURM_[A-Z_]*|TRAINKIT_[A-Z_]*|(DATA|RESULTS|JOBS)_DIR|PYTHONPATH|MASTER_(ADDR|PORT)|SITE_[A-Z_]*|OMP_NUM_THREADS|(NCCL|GLOO)_SOCKET_IFNAME)= ]]; then
                echo "problem: it makes ${BASH_REMATCH[1]} read-only, and jobs set that: leave it out"
            else
                echo "read to its end"
            fi' bash "$1" 2>&1
        printf '\n%s\0' "$?"
    )
    code=${output##*$'\n'} output=$(printf '%s' "${output%$'\n'*}")
    if [[ ! $code =~ ^[0-9]+$ ]]; then
        echo "it prints a zero byte, which is no text: leave that out"
    elif ((code == 137 && SECONDS - began >= most)); then
        echo "it does not end, and was stopped after $most seconds"
    elif [[ $output != *"read to its end"* ]]; then
        output=${output##*$'\n'}
        [[ $output == "problem: "* || $output == *"site.sh: line "* ]] ||
            output="it ends the shell that reads it (exit, exec, or a command that fails), with exit code $code${output:+ ($output)}"
        echo "${output#problem: }"
    fi
}

site=$REPOSITORY/slurm/site.sh
if [[ -e $site || -L $site ]]; then
    type timeout >/dev/null 2>&1 || fail "the usual commands are not on PATH ('${PATH-}'): give /usr/bin:/bin, too."
    [[ -f $site && -r $site ]] ||
        fail "slurm/site.sh cannot be read (no file, a link to nowhere, or not yours to read): fix or remove it."
    ! IFS= read -r -d '' _ <"$site" || fail "slurm/site.sh is no text: write it anew, from site.example.sh."
    [[ $(<"$site") != *$'\r'* && $(<"$site") != $'\xef\xbb\xbf'* ]] ||
        fail "slurm/site.sh has the line ends or the byte order mark of Windows, which are text to bash: sed -i 's/\r\$//; 1s/^\xef\xbb\xbf//' slurm/site.sh"
    # Of a here-document without its end bash only warns.
    problem=$(cd / && LC_ALL=C bash -n "$site" 2>&1) && [[ -z $problem ]] ||
        fail "slurm/site.sh is not valid shell code, correct it: ${problem%%$'\n'*}"
    problem=$(site_problem "$site")
    [[ -z $problem ]] || fail "slurm/site.sh fails, correct it: $problem"
    exec {_own_output}>&1 {_own_errors}>&2 # which it may send elsewhere
    _own_words=("$@") # it may set others
    trap 'fail "slurm/site.sh fails where it is read again: it must do the same each time, so leave out what it changes."' EXIT
    source "$REPOSITORY/slurm/site.sh" </dev/null
    trap - EXIT
    set -- ${_own_words[@]+"${_own_words[@]}"}
    usual_shell
    exec >&"$_own_output" 2>&"$_own_errors" {_own_output}>&- {_own_errors}>&-
    type env timeout >/dev/null 2>&1 || fail "slurm/site.sh leaves PATH without the usual commands ('${PATH-}'): add to it."
    env >/dev/null 2>&1 || fail "no command starts after slurm/site.sh: export nothing of 100 KB or more in it."
fi

export TRAINKIT_DATA_DIR=${SITE_DATA_DIR:-$REPOSITORY/data}
export TRAINKIT_RESULTS_DIR=${SITE_RESULTS_DIR:-$REPOSITORY/results}
JOBS_DIR=${SITE_SCRATCH_DIR:-$TRAINKIT_RESULTS_DIR/jobs} # a folder for each job: its checkpoints, samples and error notes
for path in "$TRAINKIT_DATA_DIR" "$TRAINKIT_RESULTS_DIR" "$JOBS_DIR"; do
    [[ $path == /* ]] || fail "slurm/site.sh names the folder $path, which depends on where you are: begin it with / or \$HOME."
done
[[ ${SITE_MONITOR:=on} == on || $SITE_MONITOR == off ]] ||
    fail "SITE_MONITOR is on or off, not $SITE_MONITOR: correct it in slurm/site.sh or in your shell."
PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH} # trainkit, where it is not installed
export PYTHONPATH

ended_from_outside="" # set by the signals that job_env.sh traps
# Jobs run with `set -u`, which neither module nor conda can bear.
_own_activate() {
    set +u
    trap '[[ -z ${ended_from_outside:-} ]] || fail "ended from outside, by scancel or the time limit, in activate_environment."
        fail "activate_environment of slurm/site.sh ends the shell, and the job: leave out exit and set -u."' EXIT
    activate_environment || { trap - EXIT && fail "activate_environment of slurm/site.sh failed: try its lines on the login node."; }
    trap - EXIT
    usual_shell
    # Before bash 4.4 an empty array counts as not set.
    ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)) || set -u
}
