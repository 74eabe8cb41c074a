# shellcheck shell=bash disable=SC2034  # what it sets is used by the job scripts
# The part of a job that is the same in every job script, which sources this at its beginning. It asks Slurm
# and the node about the job, reads slurm/site.sh, makes the Python environment ready, and starts the monitor,
# which samples each node while the ranks train (unless SITE_MONITOR is off). When the job script ends, `finish`
# ends the monitor, and sends a job that was stopped by a signal, and has saved, back to the queue.
#
# What there is to decide is decided by trainkit/jobs/in_job.py, in Python: how the job begins
# (trainkit/jobs/beginning.py), why it failed, and its exit code (trainkit/jobs/ending.py).
#
# `choose_training` prints what it trains; in a job of submit.py, which does not call it, `tell_script` does.
#
# For the launch line it sets DATA_DIR, RESULTS_DIR, TRAINKIT_JOB_DIR, SITE_SRUN_ARGS and SITE_CONTAINER, and
# `choose_training` sets TRAINING. For the ranks it exports MASTER_ADDR and MASTER_PORT.
#
# Where the job script's first argument is --plain, or an option for it, they name a script that knows nothing of
# the kit (trainkit/jobs/program.py). A sweep sets `name_in_sweep`, and `array_of_runs` where it sends several runs as an
# array.

launcher=srun         # of the ranks; slurm_submit_torchrun.sh sets another
begun=""              # whether Python has answered how the job begins
ended_from_outside="" # whether it was sent SIGTERM or SIGHUP
resumes_unsaved=""    # whether its script needs no note that it has saved to come back (--when-requeued)
requeued=""           # whether it is on its way back to the queue
monitor=""            # the process id of the monitor
code_folder=""        # that of a plain script, whose git is asked for the commit

# --- what Slurm says of this job --------------------------------------------------------------------
# A job of an array has a number of its own, but for one, which has the array's: by that Slurm means them all.
# A job that is sent by another has that one's SLURM_ARRAY_... in its environment.
this_job=${SLURM_JOB_ID:-none}
if [[ ${SLURM_ARRAY_JOB_ID:-} == "$this_job" ]]; then
    this_job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
unset SLURM_TIME_FORMAT # of times in the answer
facts=$(scontrol --oneliner show job "$this_job" 2>/dev/null) || facts=""

# sbatch gives a job all variables of the shell that it is called from. In a shell within a job (salloc, srun
# --pty, a notebook on a node) some are that job's, and srun would take them for its own options (man srun,
# INPUT ENVIRONMENT VARIABLES): it would put all ranks on the cores of that shell, or refuse them. So srun gets
# none of them until Python has told which are this job's. What slurm/site.sh exports stays.
export -n "${!SRUN_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_CPU_FREQ@}" "${!SLURM_DIST@}" "${!SLURM_GPU_@}" \
    "${!SLURM_GPUS_PER_@}" "${!SLURM_LAUNCH_@}" "${!SLURM_MEM_@}" "${!SLURM_SRUN_@}" "${!SLURM_STEP@}" \
    "${!SLURM_TRES_@}" SLURM_{CPUS_PER_GPU,GPUS,NTASKS_PER_GPU,NTASKS_PER_TRES,EXACT,EXCLUSIVE,OVERLAP} \
    SLURM_{OVERCOMMIT,LABELIO,CONSTRAINT,{,TASK_}{PROLOG,EPILOG},STD{IN,OUT,ERR}MODE,EXPORT_ENV}
# These are of the user's shell. slurm/site.sh may set its own.
unset MASTER_ADDR MASTER_PORT

# --- the site ---------------------------------------------------------------------------------------
source "${BASH_SOURCE[0]%/*}/site_env.sh"
[[ ${SLURM_JOB_ID:-} && ${SLURM_JOB_NODELIST:-} ]] ||
    fail "this is no job of Slurm (no SLURM_JOB_ID): send it with sbatch, or python submit.py."
# The job's own folder, for its checkpoints, samples and notes (trainkit/job_folder.py).
export TRAINKIT_JOB_DIR=$JOBS_DIR/$SLURM_JOB_ID
watching=$TRAINKIT_JOB_DIR/monitor
# If this start fails before Python runs, nobody is to read how an earlier one has ended.
rm -f "$TRAINKIT_JOB_DIR/outcome.json"
plain=""
case ${1:-} in --plain* | --python* | --when-requeued* | --one-process-per-node) plain=1 ;; esac
if [[ $plain ]]; then
    # A queue.py in the folder of the script is not for `python -m`. jobs/plain.py unsets this.
    export PYTHONSAFEPATH=1
else
    # A plain script may have variables of its own with these names.
    DATA_DIR=$TRAINKIT_DATA_DIR
    RESULTS_DIR=$TRAINKIT_RESULTS_DIR
fi
# Into a log Python would write only when 8 KiB have gathered, and lose them when it is killed.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED-1}

# USR2 and SIGTERM ask a rank to save a checkpoint and stop. They wait until it can
# (trainkit/training/checkpoint.py), instead of killing Python while it starts.
hold_signals=(env "--block-signal=USR2,TERM")
if ! "${hold_signals[@]}" true 2>/dev/null; then # before coreutils 8.31, as in RHEL 8
    hold_signals=(bash -c 'trap "" USR2; exec "$@"' bash)
fi
# A container may not pass on the environment. What is set inside of it lets a rank find its job's folder, and
# refuse to train by itself where it does not know the others (trainkit/distributed/launchers.py).
SITE_CONTAINER=("${hold_signals[@]}" "${SITE_CONTAINER[@]}"
    env "TRAINKIT_JOB_DIR=$TRAINKIT_JOB_DIR" TRAINKIT_STARTED_BY=srun)

# --- the log ----------------------------------------------------------------------------------------
# That of the job, if it is a file; and those of submitit for the ranks from 1 on, which are next to it. Each
# may have lines of earlier starts: so many bytes.
own_log=$(readlink -f /proc/$$/fd/2)
declare -A earlier_bytes
for log in "$own_log" "${own_log%_0_log.out}"_[1-9]*_log.out; do
    [[ ! -f $log ]] || earlier_bytes[$log]=$(stat --format=%s "$log")
done

# What this start has printed.
printed() {
    local log
    for log in "$own_log" "${own_log%_0_log.out}"_[1-9]*_log.out; do
        [[ ! -f $log ]] || tail --bytes="+$((${earlier_bytes[$log]:-0} + 1))" "$log"
    done
}

# --- what Python decides ----------------------------------------------------------------------------
# Ask trainkit/jobs/in_job.py: in_job SECONDS SECONDS QUESTION OPTIONS... A node is not held for a Python that
# hangs, as in a file system, so it has so many seconds. Where Python is in the site's container only, it is
# asked there, in a step, and has so many more. Slurm starts no step in a job on its way back to the queue.
in_job() {
    local seconds=$1 seconds_in_container=$2
    local ask=(env PYTHONSAFEPATH=1 python -m trainkit.jobs.in_job "$3" "--folder=$TRAINKIT_JOB_DIR"
        "--facts=$facts" "${@:4}")
    timeout --signal=KILL "$seconds" "${ask[@]}" 2>/dev/null < <(printed) && return
    [[ -z $requeued ]] || return 1
    (
        unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPU_BIND SLURM_TRES_BIND
        timeout --signal=KILL "$seconds_in_container" srun --overlap --mem=0 --nodes=1 --ntasks=1 --gpus=0 \
            "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" "${ask[@]}" < <(printed)
    )
}

# Carry out what Python answers: it sets and unsets variables, and prints the first lines of the log. What
# only the node can be asked is asked here, as a container may have no scontrol, git or nvidia-smi.
begin() { # with the arguments of the job script
    local first_node node gpus version answer
    first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) || first_node=""
    node=$(scontrol --oneliner show node "$first_node" 2>/dev/null) || node=""
    # Where the driver hangs, nothing ends nvidia-smi. This does not wait for its end.
    IFS= read -r -d '' -t 20 gpus < <(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || true
    version=$(timeout 20 git -C "$REPOSITORY" describe --always --dirty 2>/dev/null) || version=""
    answer=$(
        in_job 60 300 begin ${plain:+--plain} ${array_of_runs:+--array-of-runs} "--monitor=$SITE_MONITOR" \
            "--repository=$REPOSITORY" "--version=$version" "--gpus=$gpus" "--first-node=$first_node" "--node=$node" \
            "--addresses=$(hostname -I 2>/dev/null)" "--signal=$(grep -s '^#SBATCH --signal=' "$0")" \
            "--exported=$(compgen -e)" \
            "--variables=$(declare -p "${!SLURM_@}" "${!SRUN_@}" MASTER_ADDR MASTER_PORT OMP_NUM_THREADS \
                SITE_NETWORK_INTERFACE SITE_PORTS 2>/dev/null)" -- "$@"
    ) || true
    [[ $answer == *"# in_job begins"*"# in_job ends"* ]] || # container programs have their words around it
        fail "Python does not start on $(hostname): correct activate_environment or SITE_CONTAINER in \
slurm/site.sh."
    answer=${answer#*"# in_job begins"}
    eval "${answer%"# in_job ends"*}"
}

# --- what watches it --------------------------------------------------------------------------------
# A step next to the ranks, until its input is closed. It shares memory, cores and GPUs with them, and sees
# all GPUs of a node, even if each rank has its own (--gpus-per-task, which newer Slurm tells by
# SLURM_TRES_PER_TASK only). Its outcome never matters to the job, and srun's words about it stay out of the
# job's log, where it would count as a rank.
run_monitor() {
    local gpus=()
    trap : TERM # scancel sends it here, too, and the monitor has a verdict to give
    if [[ ${SLURM_GPUS_PER_TASK:-} || ${SLURM_TRES_PER_TASK:-} == *gpu* ]]; then
        gpus=("--gpus-per-node=${SLURM_GPUS_ON_NODE:-0}")
    fi
    unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPU_BIND SLURM_TRES_BIND
    if ! srun --job-name=monitor --overlap --mem=0 --input=all --nodes="$SLURM_JOB_NUM_NODES" \
        --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "${gpus[@]}" "${SITE_SRUN_ARGS[@]}" \
        "${SITE_CONTAINER[@]}" python "$REPOSITORY/slurm/monitor.py" --sample "$watching" 2>"$watching/log" &&
        [[ ! -e $watching/verdict.json ]]; then
        cat >/dev/null # The job is to end before it says so.
        tell_no_verdict "not sampled to the end: see $watching/log"
    fi
}

tell_no_verdict() { echo "watch   $1" | tee "$watching/told"; }

start_monitor() {
    [[ $SITE_MONITOR == on ]] || return 0
    # A coprocess has a pipe from here for its input, and would have one for its output, too.
    exec {log}>&1
    coproc MONITOR { run_monitor >&"$log"; }
    exec {log}>&-
    monitor=$MONITOR_PID
    monitor_input=${MONITOR[1]} # bash forgets it when the coprocess ends
    # Else a `wait` in the job script, for processes of its own, would wait for this one, too.
    disown "$monitor"
}

# End the monitor, which prints its verdict.
stop_monitor() {
    local tenths
    [[ -n $monitor ]] || return
    echo "$1" >"$watching/ended" # this is the exit code
    exec {monitor_input}>&-
    for ((tenths = 0; tenths < 100; tenths++)); do
        kill -0 "$monitor" 2>/dev/null || return
        sleep 0.1
    done
    tell_no_verdict "no verdict within 10 seconds: python slurm/monitor.py --verdict $SLURM_JOB_ID"
}

# --- what it trains ---------------------------------------------------------------------------------
# Set TRAINING, what Python runs: the stage's script $1, or the one that the arguments of the job name, and
# its options.
choose_training() {
    local script=$1 correction="correct its name"
    shift
    if [[ $plain ]]; then
        TRAINING=(-m trainkit.jobs.plain "$@")
        tell_script "$@"
        return
    fi
    if [[ ${1:-} == *.py ]]; then
        script=$1
        shift
    fi
    [[ $PWD == "${SLURM_SUBMIT_DIR:-$PWD}" ]] || correction="leave out --chdir"
    [[ -f $script ]] || fail "there is no script $script in $PWD: $correction."
    TRAINING=("$script" --data-dir "$TRAINKIT_DATA_DIR" --results-dir "$TRAINKIT_RESULTS_DIR"
        --checkpoint-dir "$TRAINKIT_JOB_DIR/checkpoints" --resume auto "$@")
    tell_script "$(realpath --no-symlinks -- "$script")" "$@"
}

# Print the script that the job runs, its arguments and the commit of its code, and keep them in the job's folder.
tell_script() {
    local folder top_folder version answer
    folder=${code_folder:-$(dirname "$(readlink -f -- "$1")")} # `begin` has set it for a plain script
    top_folder=$(timeout 20 git -C "$folder" rev-parse --show-toplevel 2>/dev/null) || top_folder=""
    version=$(timeout 20 git -C "$folder" describe --always --dirty 2>/dev/null) || version=""
    answer=$(in_job 20 60 script ${plain:+--plain} "--run-name=${name_in_sweep:-}" "--version=$version" \
        "--top-folder=$top_folder" "--repository=$REPOSITORY" -- "$@") || answer=""
    [[ $answer != *"# in_job script"* ]] || # container programs have their words before it
        echo "${answer#*"# in_job script"$'\n'}"
    echo
}

# --- how it ends ------------------------------------------------------------------------------------
# Whether a job that can resume may go back to the queue. There may be seconds only, so Python is not asked where
# it is certain: at the time limit, and where it has saved after a signal that only the ranks got.
may_go_back() {
    ((${SLURM_RESTART_COUNT:-0} < SITE_MOST_RESTARTS)) || return 1 # in a trap `return` alone has an older status
    [[ $facts == *" Reason=TimeLimit "* ]] || ((code == 0)) || [[ $(in_job_end back) == *yes ]]
}

# Set `requeued`, or `refusal` to why Slurm refuses. Its controller may be restarting.
requeue() {
    if [[ $stopped ]]; then
        echo "stopped; back to the queue, to resume from the checkpoint"
    else
        echo "ended by its time limit or a preemption; back to the queue, to resume with --when-requeued"
    fi
    if ! scontrol requeue "$this_job" >/dev/null 2>&1; then
        sleep 10
        if ! refusal=$(scontrol requeue "$this_job" 2>&1); then
            refusal=${refusal:-scontrol gives no reason}
            return
        fi
        refusal="" # it may have said something, and done it all the same
    fi
    requeued=1
}

in_job_end() {
    in_job 10 20 "$@" "--log=$own_log" "--launcher=$launcher" "--code=$code" "--seconds=$SECONDS" \
        "--restart=${SLURM_RESTART_COUNT:-0}" "--most-restarts=$SITE_MOST_RESTARTS" "--failure=$failure" \
        ${begun:+--begun} ${ended_from_outside:+--from-outside} \
        ${resumes_unsaved:+--resumes-unsaved} 2>/dev/null
}

finish() {
    local code=$? stopped="" refusal="" tried=() answer
    set +e
    trap - EXIT
    trap '' TERM # requeue sends it to this script, too
    if [[ $ends && ! $ended_from_outside ]]; then
        echo "error: $ends" >&2
        failure=$ends
        code=1
    fi
    echo
    [[ ! $begun || ! -e $TRAINKIT_JOB_DIR/stopped ]] || stopped=1 # an earlier start may have left it
    if ((code || ${SLURM_RESTART_COUNT:-0})) || [[ $stopped ]]; then
        facts=$(scontrol --oneliner show job "$this_job" 2>/dev/null)
    fi
    if [[ $stopped ]] || { [[ $resumes_unsaved ]] && ((code)); } && may_go_back; then
        requeue
        tried=("--refusal=${refusal%%$'\n'*}")
    fi
    stop_monitor "$code"
    answer=$(in_job_end end "${tried[@]}") # the exit code, and what to say
    if [[ $answer == *"code    "[0-9]* ]]; then
        answer=${answer#*code    } # container programs have their words before it
        code=${answer%%$'\n'*}
        [[ $answer != *$'\n'* ]] || echo "${answer#*$'\n'}"
    elif ((code)) || [[ $stopped && ! $requeued ]]; then
        ((code)) || code=1
        echo "${refusal:+error: $refusal; }its checkpoints, if it has saved, are in $TRAINKIT_JOB_DIR/checkpoints"
    fi
    echo "ended   $(date +%FT%T%z) after $SECONDS s with exit code $code"
    exit "$code"
}

listen_to_signals() {
    trap 'ended_from_outside=1; exit 143' TERM HUP
    trap : USR1 USR2 # with --signal=B:USR2@60 they come here, and not to the ranks
}

# --- the job begins ---------------------------------------------------------------------------------
trap finish EXIT
listen_to_signals
run_activate_environment
listen_to_signals # what the site runs may have changed that
type srun scontrol >/dev/null 2>&1 ||
    fail "srun and scontrol are not on PATH ($PATH): add their folder in slurm/site.sh."
begin "$@"
start_monitor
