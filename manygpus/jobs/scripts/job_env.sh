# shellcheck shell=bash disable=SC2034  # the job scripts use the variables that this sets
# Every job script sources this file at its beginning. It asks Slurm about the job, reads slurm/site.sh, and activates
# the Python environment. Then the job script says what it runs: `choose_training` sets TRAINING for its launch line,
# and calls `begin_job`, which a job script without TRAINING calls itself. That asks the node about the job, and starts
# the monitor, which samples each node while the ranks train (unless SITE_MONITOR is off). When the job script ends,
# `finish` ends the monitor, and requeues a job that has saved after a signal.
#
# Python makes the decisions (manygpus/jobs/inside/in_job.py): how the job begins (start_plan.py there), why it failed,
# and which exit code it has (outcome_rules.py).
#
# For the launch line this file sets DATA_DIR, RESULTS_DIR, MANYGPUS_JOB_DIR, SITE_SRUN_ARGS and SITE_CONTAINER. For
# the ranks `begin_job` exports MASTER_ADDR and MASTER_PORT.
#
# If the first argument of the job script is --plain, or an option that belongs to --plain, the arguments name a
# script that knows nothing of the kit (manygpus/jobs/user_program.py). The array of a sweep sets `name_in_sweep`.

launcher=srun         # what starts the ranks; slurm_submit_torchrun.sh sets torchrun
begun=""              # whether Python has decided how the job begins
ended_from_outside="" # whether this shell has received SIGTERM or SIGHUP
resumes_unsaved=""    # whether the job is requeued without a note that it has saved (--when-requeued)
requeued=""           # whether the job is on its way back to the queue
monitor=""            # the process id of the monitor
staging=""            # the process id of what removes the environment from the nodes
checks_nodes=""       # whether this start measures its nodes, if the site wants that
first_folder=$PWD     # a job of a sweep goes on in the folder of its run

# --- what Slurm knows about this job ----------------------------------------------------------------
# Each job of an array has a number of its own, except one, which has the number of the array. Slurm takes that
# number to mean all jobs of the array. A job that an array's job has submitted inherits its SLURM_ARRAY_... variables.
this_job=${SLURM_JOB_ID:-none}
if [[ ${SLURM_ARRAY_JOB_ID:-} == "$this_job" ]]; then
    this_job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
unset SLURM_TIME_FORMAT # it would change the times in the answer
facts=$(scontrol --oneliner show job "$this_job" 2>/dev/null) || facts=""

# A job inherits all variables of the shell in which sbatch was called. If that shell was within a job (salloc,
# srun --pty, a notebook on a node), some of them describe that job, and srun would take them for its own options
# (man srun, INPUT ENVIRONMENT VARIABLES): it would put all ranks on the cores of that shell, or refuse them. So srun
# gets none of them until Python has determined which are this job's. What slurm/site.sh exports stays.
export -n "${!SRUN_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_CPU_FREQ@}" "${!SLURM_DIST@}" "${!SLURM_GPU_@}" \
    "${!SLURM_GPUS_PER_@}" "${!SLURM_LAUNCH_@}" "${!SLURM_MEM_@}" "${!SLURM_SRUN_@}" "${!SLURM_STEP@}" \
    "${!SLURM_TRES_@}" SLURM_{CPUS_PER_GPU,GPUS,NTASKS_PER_GPU,NTASKS_PER_TRES,EXACT,EXCLUSIVE,OVERLAP} \
    SLURM_{OVERCOMMIT,LABELIO,CONSTRAINT,{,TASK_}{PROLOG,EPILOG},STD{IN,OUT,ERR}MODE,EXPORT_ENV}
# The user's shell may export these; slurm/site.sh may set its own.
unset MASTER_ADDR MASTER_PORT

# --- the site ---------------------------------------------------------------------------------------
source "${BASH_SOURCE[0]%/*}/site_env.sh"
[[ ${SLURM_JOB_ID:-} && ${SLURM_JOB_NODELIST:-} ]] ||
    fail "this is not a Slurm job (no SLURM_JOB_ID): submit it with sbatch, or python submit.py."
# The job's own folder, for its checkpoints, samples and notes (manygpus/job_folder.py).
export MANYGPUS_JOB_DIR=$JOBS_DIR/$SLURM_JOB_ID
watching=$MANYGPUS_JOB_DIR/monitor
# If this start fails before Python runs, nobody must take the outcome of an earlier start for its own.
mv -f "$MANYGPUS_JOB_DIR/"{,earlier-}outcome.json 2>/dev/null || true
plain=""
proctrack="" # of a plain script: how Slurm finds the processes that it signals (manygpus/jobs/inside/run_plain.py)
case ${1:-} in --plain* | --python* | --when-requeued* | --one-process-per-node | --frozen) plain=1 ;; esac
if [[ $plain ]]; then
    # `python -m` must not import a queue.py from the folder of the script. jobs/inside/run_plain.py unsets this.
    export PYTHONSAFEPATH=1
    proctrack=$(scontrol show config 2>/dev/null | sed -n 's/^ProctrackType *= proctrack.//p') || proctrack=""
else
    # Not for a plain script, which may have variables of its own with these names.
    DATA_DIR=$MANYGPUS_DATA_DIR
    RESULTS_DIR=$MANYGPUS_RESULTS_DIR
fi
# Otherwise Python writes to a log in blocks of 8 KiB, and loses the last one when it is killed.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED-1}

# USR2 and SIGTERM ask a rank to save a checkpoint and stop. They are held back until it can
# (manygpus/checkpoint/checkpointer.py); otherwise they would kill Python while it starts.
hold_signals=(env "--block-signal=USR2,TERM")
if ! "${hold_signals[@]}" true 2>/dev/null; then # before coreutils 8.31, as in RHEL 8
    hold_signals=(bash -c 'trap "" USR2; exec "$@"' bash)
fi
# A container may not pass on the environment. With the first two variables a rank finds its job's folder, and refuses
# to train alone if it does not know the other ranks (manygpus/launchers.py). `begin_job` adds PYTHONPATH.
has_container=${SITE_CONTAINER[*]}
SITE_CONTAINER=("${hold_signals[@]}" "${SITE_CONTAINER[@]}"
    env "MANYGPUS_JOB_DIR=$MANYGPUS_JOB_DIR" MANYGPUS_STARTED_BY=srun ${proctrack:+"MANYGPUS_PROCTRACK=$proctrack"})

# --- the log ----------------------------------------------------------------------------------------
# The log of the job, if it is a file, and the logs of submitit for the ranks from 1 on, which lie beside it. Each
# may begin with lines of earlier starts, whose bytes are counted here.
own_log=$(readlink -f /proc/$$/fd/2)
declare -A earlier_bytes
for log in "$own_log" "${own_log%_0_log.out}"_[1-9]*_log.out; do
    [[ ! -f $log ]] || earlier_bytes[$log]=$(stat --format=%s "$log")
done

# Print the end of what this start has printed so far, each log after a line with its name (manygpus/jobs/job_log.py).
# A whole log of half a GB (NCCL_DEBUG=INFO) would take Python longer than it may.
printed() {
    local log first last_part
    for log in "$own_log" "${own_log%_0_log.out}"_[1-9]*_log.out; do
        [[ -f $log ]] || continue
        first=$((${earlier_bytes[$log]:-0} + 1))
        last_part=$(($(stat --format=%s "$log") - (4 << 20) + 1))
        printf '\n# in_job log %s\n' "${log##*/}"
        tail --bytes="+$((first > last_part ? first : last_part))" "$log"
    done
}

# --- what Python decides ----------------------------------------------------------------------------
# Ask manygpus/jobs/inside/in_job.py: in_job SECONDS SECONDS_IN_CONTAINER QUESTION NAME=VALUE... What it has to know
# is its input, as `ps` would show a command line to everybody. Python's time is limited, because a Python that hangs,
# for instance in a file system, must not hold a node. If only the site's container has Python, it is asked there, in a
# step, with a limit of its own. Slurm starts no step in a job that is being requeued.
in_job() {
    local seconds=$1 seconds_in_container=$2
    local ask=(-m manygpus.jobs.inside.in_job "$3")
    shift 3
    timeout --signal=KILL "$seconds" env PYTHONSAFEPATH=1 "$PYTHON_OF_NODE" "${ask[@]}" < <(in_job_input "$@") && return
    [[ -z $requeued ]] || return 1
    (
        unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPU_BIND SLURM_TRES_BIND
        timeout --signal=KILL "$seconds_in_container" srun --overlap --mem=0 --nodes=1 --ntasks=1 --gpus=0 \
            "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" env PYTHONSAFEPATH=1 "$MANYGPUS_PYTHON" "${ask[@]}" < <(in_job_input "$@")
    )
}

# Print NAME=VALUE..., each with a NUL after it, one more NUL, and the end of the logs.
in_job_input() {
    printf '%s\0' "folder=$MANYGPUS_JOB_DIR" "facts=$facts" "plain=$plain" "repository=$KIT" \
        "log=$own_log" "$@" ""
    printed
}

# Begin the job that runs the script $1 with its arguments, or what the arguments of --plain name: carry out Python's
# answer, which sets and unsets variables, and prints the first lines of the log. What only the node knows is asked
# here, because a container may have no scontrol, git or nvidia-smi.
begin_job() {
    local first_node node gpus version code_folder code_top code_version name variables=() answer complaints complaint
    # By it a rank in a container finds the frozen copy of the kit.
    [[ ! ${MANYGPUS_CHECKOUT:-} || ! $has_container ]] || SITE_CONTAINER+=("PYTHONPATH=$PYTHONPATH")
    first_node=$(node_of_rank_0)
    node=$(scontrol --oneliner show node "$first_node" 2>/dev/null) || node=""
    # If the driver hangs, nothing can end nvidia-smi, so this does not wait for its end.
    IFS= read -r -d '' -t 20 gpus < <(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || true
    version=$(git_here "$KIT" describe --always --dirty)
    code_folder=$(folder_of_code "$@")
    code_top=$(git_here "$code_folder" rev-parse --show-toplevel)
    code_version=$version
    [[ $code_top -ef $KIT ]] || code_version=$(git_here "$code_folder" describe --always --dirty)
    for name in "${!SLURM_@}" "${!SRUN_@}" MASTER_{ADDR,PORT} OMP_NUM_THREADS SITE_{NETWORK_INTERFACE,PORTS} \
        MANYGPUS_SPARE_NODES; do
        [[ ! ${!name+set} ]] || variables+=("variable=$name=${!name}")
    done
    complaints=$(mktemp 2>/dev/null) || complaints=/dev/null
    answer=$(
        in_job 60 300 begin "run_name=${name_in_sweep:-}" "monitor=$SITE_MONITOR" "version=$version" \
            "gpus=$gpus" "first_node=$first_node" "node=$node" "addresses=$(hostname -I 2>/dev/null)" \
            "signal=$(grep -s '^#SBATCH --signal=' "$0")" "exported=$(compgen -e)" "${variables[@]}" \
            "code_top=$code_top" "code_version=$code_version" "${@/#/word=}" 2>"$complaints"
    ) || true
    complaint=$(grep --invert-match --extended-regexp '^(srun|slurmstepd|$)' "$complaints" | tail --lines=1) || true
    [[ $complaints == /dev/null ]] || rm "$complaints"
    [[ $answer == *"# in_job begins"*"# in_job ends"* ]] || # container programs may print lines around it
        fail "the job's Python does not work on $(hostname) (${complaint:-no answer}): correct \
activate_environment or SITE_CONTAINER in $NAME_OF_SITE."
    answer=${answer#*"# in_job begins"}
    eval "${answer%"# in_job ends"*}"
    stage_environment
    [[ ! $checks_nodes || $SITE_NODE_CHECK == off ]] || check_nodes "$first_node"
    start_monitor
}

# Print the name of the node where the ranks meet. It is the first one, unless the cluster's topology numbers the tasks
# in a different order (seen: topology/ring of Slurm 26.05, with several tasks on each node), so a step asks for it.
node_of_rank_0() {
    local node=""
    if ((${SLURM_JOB_NUM_NODES:-1} > 1)) && [[ ${SLURM_DISTRIBUTION:-block} == block* ]] && numbers_by_topology; then
        # Without --mem=0, which would change the order.
        # shellcheck disable=SC2016 # the shell of the task expands it
        node=$(timeout 60 srun --overlap --gpus=0 "${SITE_SRUN_ARGS[@]}" \
            sh -c '[ "$SLURM_PROCID" != 0 ] || echo "$SLURMD_NODENAME"' 2>/dev/null | tail -n 1) || true
    fi
    [[ $node ]] || node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) || true
    echo "$node"
}

# Return whether this release may number tasks in the order of the cluster's topology.
numbers_by_topology() {
    [[ $(scontrol --version) =~ ([0-9]+)\.([0-9]+) ]] && ((10#${BASH_REMATCH[1]}${BASH_REMATCH[2]} >= 2605))
}

git_here() { timeout 20 git -C "$@" 2>/dev/null || true; }

# Print the folder with the code of what these words name: of the first file among them. Modules are found from the
# folder in which the job has begun, and an installed program works on what is there.
folder_of_code() {
    local word named=1
    [[ ! $plain ]] || named=""
    for word in "$@"; do
        [[ $word != --plain* ]] || named=1
        word=${word#--plain=}
        [[ $word != -m* ]] || break
        if [[ $named && -f $word && $word != */bin/* ]]; then
            dirname "$(readlink -f -- "$word")"
            return
        fi
    done
    echo "$first_folder"
}

# --- the environment on the nodes -------------------------------------------------------------------
# Put SITE_STAGE_ENV on each node's own disk, in a folder of this start, and its Python first on PATH. A step beside the
# ranks removes it when its input is closed: after the end of a job, Slurm starts no step. SIGTERM does not end this
# step, since ranks may import what saves a checkpoint only when they receive it.
stage_environment() {
    local folder start on_each_node told
    [[ $SITE_STAGE_ENV ]] || return 0
    folder=${SITE_STAGE_DIR:-${SLURM_TMPDIR:-${TMPDIR:-/tmp}}}/manygpus-env-$SLURM_JOB_ID
    start=${MANYGPUS_RESTARTS_IN_JOB:-0}
    folder+=-${SLURM_RESTART_COUNT:-0}-${start#*:}
    set_on_each_node --gpus=0
    # shellcheck disable=SC2016 # the shell of the step expands it
    exec {staging_input}> >(
        trap : TERM
        "${on_each_node[@]}" --job-name=stage-env --input=all \
            sh -c 'trap "" TERM; mkdir -p "${1%/*}" && exec 9>"$1.lock" && flock 9
                cat >/dev/null; rm -rf "$1" "$1.lock"' sh "$folder" >/dev/null 2>&1
    )
    staging=$!
    true & # the latest child, or a `wait` in the job script, meant for its own processes, would wait for that one, too
    told=$(env PYTHONSAFEPATH=1 "$MANYGPUS_PYTHON" -m manygpus.jobs.inside.stage_env "$SITE_STAGE_ENV" "$folder" "${on_each_node[@]}") ||
        fail "${told:-SITE_STAGE_ENV could not be unpacked}"
    echo "$told"
    export PATH=$folder/bin:$PATH
    # Tools look there for the environment that is active, as uv and conda do.
    [[ ! ${VIRTUAL_ENV:-} ]] || export VIRTUAL_ENV=$folder
    [[ ! ${CONDA_PREFIX:-} ]] || export CONDA_PREFIX=$folder
    hash -r
}

# Remove it, which takes a minute if it has 60,000 files on a slow disk. Slurm ends the step earlier when the job was
# cancelled or goes back to the queue, 30 seconds (KillWait) after its request; what is then left goes with the next
# environment that is unpacked there (manygpus/jobs/inside/stage_env.py).
unstage_environment() {
    local tenths
    [[ -n $staging ]] || return
    exec {staging_input}>&-
    for ((tenths = 0; tenths < 3000; tenths++)); do
        kill -0 "$staging" 2>/dev/null || return
        sleep 0.1
    done
}

# --- the nodes --------------------------------------------------------------------------------------
# Measure the nodes before the ranks start, and print which are sick: slow, or without an answer. The processes of the
# step meet at the node $1. What srun says, and what a process says that dies, stays out of the job's log.
check_nodes() {
    local began=$SECONDS patience=200 line measured="" answers step answer="" excluded trial=() avoids=""
    set_on_each_node
    exec {answers}< <(exec timeout --kill-after=10 180 "${on_each_node[@]}" --job-name=node-check \
        --kill-on-bad-exit=0 --wait=0 "${SITE_CONTAINER[@]}" env PYTHONSAFEPATH=1 \
        python "$KIT/manygpus/run_alone.py" manygpus.jobs.doctor.node_check "$1" 2>"$MANYGPUS_JOB_DIR/node-check.log" </dev/null)
    step=$!
    while IFS= read -r -t "$patience" -u "$answers" line; do
        measured+=$line$'\n'
        [[ $line != *'"ended": true'* ]] || patience=5 # a node that hangs would delay the end of the step
    done
    kill "$step" 2>/dev/null || true
    wait "$step" || true
    exec {answers}<&-
    answer=$(in_job 30 120 nodes "node_check=$SITE_NODE_CHECK" \
        "measured=$measured" "check_seconds=$((SECONDS - began))" \
        "restart=${SLURM_RESTART_COUNT:-0}" "most_restarts=$SITE_MOST_RESTARTS" \
        "nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n "$SLURM_JOB_NUM_NODES" | tr '\n' ' ')") || true
    [[ $answer == *"# in_job begins"*"# in_job ends"* ]] || return 0
    answer=${answer#*"# in_job begins"}
    eval "${answer%"# in_job ends"*}"
    [[ ! $avoids ]] || avoid_nodes
}

# Put the job back into the queue without the nodes that `check_nodes` has excluded, unless Slurm would then not start
# it. Slurm changes what a job excludes only while that is in the queue, as this one is then until its script ends
# (seen: 22.05, 24.11, 26.05).
avoid_nodes() {
    local refusal
    if ! refusal=$(unset "${!SBATCH_@}" && sbatch --test-only "${trial[@]}" --wrap true 2>&1); then
        echo "check   it trains with them: Slurm would not start it without them (${refusal##*$'\n'})"
        return
    fi
    trap '' TERM # `scontrol requeue` sends it
    requeue "$avoids"
    if [[ $requeued ]]; then
        scontrol update JobId="$this_job" ExcNodeList="$excluded" || true
        echo "${excluded//,/ }" >>"$MANYGPUS_JOB_DIR/avoided-nodes"
        failure=$avoids
        exit 1
    fi
    listen_to_signals
    echo "check   it trains with them: Slurm does not put it back into the queue ($refusal)"
}

# Set `on_each_node` to the words that start a process on each node. It shares memory, cores and GPUs with the ranks,
# and sees all GPUs of a node, even if each rank sees one (--gpus-per-task, which newer releases of Slurm show in
# SLURM_TRES_PER_TASK only), unless the arguments say otherwise.
set_on_each_node() {
    local gpus=("$@")
    if ((!$#)) && [[ ${SLURM_GPUS_PER_TASK:-} || ${SLURM_TRES_PER_TASK:-} == *gpu* ]]; then
        gpus=("--gpus-per-node=${SLURM_GPUS_ON_NODE:-0}")
    fi
    on_each_node=(env --unset=SLURM_{GPUS_PER_TASK,TRES_PER_TASK,GPU_BIND,TRES_BIND} srun --overlap --mem=0
        --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "${gpus[@]}"
        "${SITE_SRUN_ARGS[@]}")
}

# --- the monitor ------------------------------------------------------------------------------------
# It is a step beside the ranks, and runs until its input is closed. Its outcome never changes that of the job. What
# srun says about it stays out of the job's log, where it would be taken for a rank.
run_monitor() {
    trap : TERM # scancel sends it here, too, and the monitor still has to give its verdict
    [[ -z $staging ]] || exec {staging_input}>&- # only the job script is to keep it open
    set_on_each_node
    if ! "${on_each_node[@]}" --job-name=monitor --input=all "${SITE_CONTAINER[@]}" \
        env PYTHONSAFEPATH=1 "$MANYGPUS_PYTHON" -m manygpus monitor --sample "$watching" \
        --most-idle-seconds "$SITE_STALLED_SECONDS" 2>"$watching/log" &&
        [[ ! -e $watching/verdict.json ]]; then
        cat >/dev/null # wait for the end of the job before printing this
        tell_no_verdict "not sampled to the end: see $watching/log"
    fi
}

tell_no_verdict() { echo "watch   $1" | tee "$watching/told"; }

start_monitor() {
    [[ $SITE_MONITOR == on ]] || return 0
    # A coprocess reads from a pipe of this shell. It would also write to one, so it gets the job's output instead.
    exec {log}>&1
    coproc MONITOR { run_monitor >&"$log"; }
    exec {log}>&-
    monitor=$MONITOR_PID
    monitor_input=${MONITOR[1]} # bash forgets it when the coprocess ends
    # Otherwise a `wait` in the job script, meant for its own processes, would wait for this one, too.
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
    tell_no_verdict "no verdict within 10 seconds: manygpus monitor --verdict $SLURM_JOB_ID"
}

# --- the training -----------------------------------------------------------------------------------
# Set TRAINING to what Python runs: the stage's script $1, or the script that the arguments of the job name, and
# its options.
choose_training() {
    local script=$1 correction="correct its name"
    shift
    if [[ $plain ]]; then
        TRAINING=(-m manygpus.jobs.inside.run_plain "$@")
        begin_job "$@"
        return
    fi
    if [[ ${1:-} == *.py ]]; then
        script=$1
        shift
    fi
    [[ $PWD == "${SLURM_SUBMIT_DIR:-$PWD}" ]] || correction="leave out --chdir"
    [[ -f $script ]] || fail "there is no script $script in $PWD: $correction."
    TRAINING=("$script" --data-dir "$MANYGPUS_DATA_DIR" --results-dir "$MANYGPUS_RESULTS_DIR"
        --checkpoint-dir "$MANYGPUS_JOB_DIR/checkpoints" --resume auto "$@")
    begin_job "$script" "$@"
}

# --- the end of the job -----------------------------------------------------------------------------
# Return whether a job that can resume may return to the queue. Only seconds may remain, so Python is not asked if
# the answer is certain: if the ranks have saved, at the time limit or after a signal that only they received.
may_go_back() {
    ((${SLURM_RESTART_COUNT:-0} < SITE_MOST_RESTARTS)) || return 1 # in a trap, `return` alone returns an earlier status
    [[ $stopped && $facts == *" Reason=TimeLimit "* ]] || ((code == 0)) || [[ $(in_job_end back) == *yes ]]
}

# Print $1, and set `requeued`, or set `refusal` to the reason why Slurm refuses. Its controller may be restarting.
requeue() {
    echo "$1"
    if ! scontrol requeue "$this_job" >/dev/null 2>&1; then
        sleep 10
        if ! refusal=$(scontrol requeue "$this_job" 2>&1); then
            refusal=${refusal:-scontrol gives no reason}
            return
        fi
        refusal="" # scontrol may print a warning although it has succeeded
    fi
    requeued=1
}

in_job_end() {
    in_job 10 20 "$@" "launcher=$launcher" "code=$code" "seconds=$SECONDS" "failure=$failure" "begun=$begun" \
        "restart=${SLURM_RESTART_COUNT:-0}" "most_restarts=$SITE_MOST_RESTARTS" \
        "most_restarts_in_job=$SITE_RESTARTS_IN_JOB" "from_outside=$ended_from_outside" \
        "nodes=${SLURM_JOB_NUM_NODES:-1}" "job=$SLURM_JOB_ID" \
        "resumes_unsaved=$resumes_unsaved" 2>/dev/null
}

# Start the job script anew as Slurm has started it: with its arguments, its variables and its folder. What differs
# is $1, which says how often that has happened (manygpus/job_folder.py).
start_again() {
    local command entry name
    cd "$first_folder" || return
    mapfile -d "" -t command <"/proc/$$/cmdline"
    for name in $(compgen -e); do
        unset "$name" 2>/dev/null || true # bash lets no one unset some of its own
    done
    while IFS= read -r -d "" entry; do
        export "${entry?}" 2>/dev/null || true # an exported function is not a variable, and is still there
    done <"/proc/$$/environ"
    export MANYGPUS_RESTARTS_IN_JOB=$1
    trap - TERM HUP # a signal that is ignored stays so
    exec "${command[@]}"
}

finish() {
    local code=$? stopped="" refusal="" tried=() answer first_line again="" back
    set +e
    trap - EXIT
    trap '' TERM # `scontrol requeue` sends it to this script, too
    if [[ $ends && ! $ended_from_outside ]]; then
        echo "error: $ends" >&2
        failure=$ends
        code=1
    fi
    echo
    back="ended by its time limit or a preemption; back to the queue, as --when-requeued asks"
    if [[ $begun && -e $MANYGPUS_JOB_DIR/stopped ]]; then # an earlier start may have left the note
        stopped=1
        back="stopped; back to the queue, to resume from the checkpoint"
    fi
    if ((code || ${SLURM_RESTART_COUNT:-0})) || [[ $stopped ]]; then
        facts=$(scontrol --oneliner show job "$this_job" 2>/dev/null)
    fi
    if [[ $requeued ]]; then # by avoid_nodes
        tried=("refusal=")
    elif [[ $stopped ]] || { [[ $resumes_unsaved ]] && ((code)); } && may_go_back; then
        requeue "$back"
        tried=("refusal=${refusal%%$'\n'*}")
    fi
    stop_monitor "$code"
    answer=$(in_job_end end "${tried[@]}") # the exit code, and what to print
    if [[ $answer == *"# in_job exit code "[0-9]* ]]; then
        answer=${answer#*"# in_job exit code "} # container programs may print lines before it
        first_line=${answer%%$'\n'*}
        code=${first_line%% *}
        [[ $first_line == "$code" ]] || again=${first_line#* }
        [[ $answer != *$'\n'* ]] || echo "${answer#*$'\n'}"
    elif ((code)) || [[ $stopped && ! $requeued ]]; then
        ((code)) || code=1
        echo "${refusal:+error: $refusal; }its checkpoints, if it has saved, are in $MANYGPUS_JOB_DIR/checkpoints"
    fi
    unstage_environment
    echo "ended   $(date +%FT%T%z) after $SECONDS s with exit code $code"
    [[ -z $again ]] || start_again "$again"
    exit "$code"
}

listen_to_signals() {
    trap 'ended_from_outside=1; exit 143' TERM HUP
    trap : USR1 USR2 # with --signal=B:USR2@60 the signal comes here, and not to the ranks
}

# --- the job is prepared ----------------------------------------------------------------------------
trap finish EXIT
listen_to_signals
run_activate_environment
listen_to_signals # the site's commands may have changed the traps
if [[ ${MANYGPUS_CHECKOUT:-} && :${PYTHONPATH:-}: != *":$KIT:"* ]]; then
    export PYTHONPATH=$KIT${PYTHONPATH:+:$PYTHONPATH} # and this; a stage in a frozen copy refuses another kit
fi
type srun scontrol >/dev/null 2>&1 ||
    fail "srun and scontrol are not on PATH ($PATH): add their folder in $NAME_OF_SITE."
