# shellcheck shell=bash disable=SC2034  # what it sets is used by the job scripts
# The part of a job that is the same in every job script, which sources this at its beginning. It reads
# slurm/site.sh, makes the Python environment ready, chooses where the ranks meet, and prints what this job
# runs on. While the ranks train, each node is sampled, unless SITE_MONITOR is off. When the job
# script ends, `finish` prints the verdict of the samples, says why the job failed if it did, and sends a job
# that was stopped by a signal, and has saved, back to the queue.
#
# For the launch line it sets DATA_DIR, RESULTS_DIR, TRAINKIT_JOB_DIR, SITE_SRUN_ARGS and SITE_CONTAINER, and
# `choose_training` sets TRAINING. For the ranks it exports MASTER_ADDR and MASTER_PORT.
#
# Where the job script's first argument is --plain, its second is a script that knows nothing of the kit.

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
# INPUT ENVIRONMENT VARIABLES): it would put all ranks on the cores of that shell, or refuse them. What
# slurm/site.sh sets comes later, and stays.
leave_out_options_of_another_job() {
    local name field
    # Only srun sets or reads these.
    unset "${!SRUN_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_SRUN_@}" "${!SLURM_LAUNCH_@}" \
        SLURM_{EXACT,EXCLUSIVE,OVERLAP,LABELIO,CONSTRAINT,{,TASK_}{PROLOG,EPILOG},STD{IN,OUT,ERR}MODE}
    # sbatch may have set these, and the record of a job does not have them. But no job script has a step's
    # number of its own, so all of these are of another job then.
    if [[ ${SLURM_STEP_ID:-} ]]; then
        unset "${!SLURM_DIST@}" "${!SLURM_MEM_BIND@}" "${!SLURM_CPU_FREQ@}" "${!SLURM_STEP@}" SLURM_OVERCOMMIT
    fi
    # sbatch has set these if the record of this job has them.
    [[ $facts == JobId=* ]] || return 0
    while read -r name field; do
        # shellcheck disable=SC2053 # a pattern
        [[ "$facts " == *" "$field* ]] || unset "$name"
    done <<END
SLURM_GPUS TresPerJob=
SLURM_GPUS_PER_NODE TresPerNode=
SLURM_GPUS_PER_SOCKET TresPerSocket=
SLURM_GPUS_PER_TASK TresPerTask=
SLURM_TRES_PER_TASK TresPerTask=
SLURM_NTASKS_PER_GPU NtasksPerTRES=
SLURM_NTASKS_PER_TRES NtasksPerTRES=
SLURM_CPUS_PER_TASK CPUs/Task=${SLURM_CPUS_PER_TASK:-}[!0-9]
SLURM_CPUS_PER_GPU CpusPerTres=
SLURM_MEM_PER_NODE MinMemoryNode=[1-9]
SLURM_MEM_PER_CPU MinMemoryCPU=
SLURM_MEM_PER_GPU MemPerTres=
SLURM_GPU_BIND TresBind=
SLURM_TRES_BIND TresBind=
SLURM_GPU_FREQ TresFreq=
END
}
leave_out_options_of_another_job
# sbatch --export=NONE sets this, by which srun would keep from the ranks what is exported here.
unset SLURM_EXPORT_ENV
# A job that is sent by another has the other's number of restarts in its environment.
if [[ $facts =~ \ Restarts=([0-9]+) ]]; then
    SLURM_RESTART_COUNT=${BASH_REMATCH[1]}
fi

# --- the site ---------------------------------------------------------------------------------------
# These are of the user's shell. slurm/site.sh may set its own.
unset MASTER_ADDR MASTER_PORT
source "${BASH_SOURCE[0]%/*}/site_env.sh"
[[ ${SLURM_JOB_ID:-} && ${SLURM_JOB_NODELIST:-} ]] ||
    fail "this is no job of Slurm (no SLURM_JOB_ID): send it with sbatch, or python submit.py."
plain=""
if [[ ${1:-} == --plain ]]; then
    plain=1
    # A queue.py in the folder of the script is not for `python -m`. jobs/plain.py unsets this.
    export PYTHONSAFEPATH=1
else
    # A plain script may have variables of its own with these names.
    DATA_DIR=$TRAINKIT_DATA_DIR
    RESULTS_DIR=$TRAINKIT_RESULTS_DIR
fi
[[ $facts != *" ArrayTaskId="* || $plain ]] ||
    fail "this is a job of an array, all of which would train the same: leave out --array."

# --- the job's own folder: checkpoints, samples, and a note of every rank on how it ended -----------
export TRAINKIT_JOB_DIR=$JOBS_DIR/$SLURM_JOB_ID
watching=$TRAINKIT_JOB_DIR/monitor
if [[ -e $TRAINKIT_JOB_DIR && ${SLURM_RESTART_COUNT:-0} == 0 ]]; then
    # An older job has the same number, as after each new start of the practice cluster. Its checkpoints are
    # not ours.
    mv "$TRAINKIT_JOB_DIR" "$TRAINKIT_JOB_DIR-$(date -r "$TRAINKIT_JOB_DIR" +%Y%m%d-%H%M%S)"
fi
problem=$(mkdir -p "$TRAINKIT_JOB_DIR" 2>&1) ||
    fail "$TRAINKIT_JOB_DIR cannot be made (${problem##*: }): set SITE_RESULTS_DIR or SITE_SCRATCH_DIR in \
slurm/site.sh to a shared folder of yours."
# Slurm may start a preempted job once more after it has ended well: trainkit/jobs/in_job.py says when.
if [[ -e $TRAINKIT_JOB_DIR/ended-for-good ]]; then
    echo "this job has already ended well, and does nothing more: to train again, submit it again"
    exit
fi
rm -f "$TRAINKIT_JOB_DIR"/{rank-*.{started,finished,failed,lost},first-failed,stopped} \
    "$TRAINKIT_JOB_DIR/outcome.json" "$watching"/{verdict.json,told,asked,ended,log}
if [[ $plain ]]; then
    mkdir -p "$TRAINKIT_JOB_DIR/checkpoints"
    touch "$TRAINKIT_JOB_DIR/plain"
fi

# --- the Python environment ---------------------------------------------------------------------------
run_activate_environment
# A shell that torchrun or mpirun has started leaves these, and the ranks would take them for theirs. The same
# list is in trainkit/distributed/launchers.py.
unset {,LOCAL_,GROUP_,ROLE_}{RANK,WORLD_SIZE} ROLE_NAME PMIX_RANK PMIX_NAMESPACE \
    "${!TORCHELASTIC_@}" "${!PET_@}" "${!OMPI_COMM_@}" "${!PMI_@}"
type srun scontrol >/dev/null 2>&1 ||
    fail "srun and scontrol are not on PATH ($PATH): add their folder in slurm/site.sh."

# --- the time and the cores it has ------------------------------------------------------------------
# A job that is asked to save as soon as it begins would come back without end, and train a step each time.
if [[ ! $plain && $facts =~ \ EndTime=([0-9][^ ]*) ]]; then
    seconds_left=$(($(date -d "${BASH_REMATCH[1]}" +%s) - $(date +%s)))
    seconds_to_save=$(sed -n 's/^#SBATCH --signal=.*@\([0-9]*\).*/\1/p' "$0" | tail -n 1)
    ((seconds_left > ${seconds_to_save:-0})) ||
        fail "this job is to save and stop $seconds_to_save s before its time limit, so it could not train: \
give it more --time."
fi
# A number of GPUs for the whole job (--gpus) would be that of each step, also where a step is on one node,
# which has less; and where a node has one task, Slurm hands out fewer.
if [[ ${SLURM_GPUS:-} && ${SLURM_GPUS##*:} == "$((${SLURM_GPUS_ON_NODE:-0} * SLURM_JOB_NUM_NODES))" ]]; then
    export SLURM_GPUS_PER_NODE=$SLURM_GPUS_ON_NODE
    unset SLURM_GPUS
fi
# Without --cpus-per-task, as with --cpus-per-gpu, a task has its share of what the job has on a node. Where
# nodes differ ("4(x2),2"), it is that of the fewest CPUs and the most tasks: srun refuses what one of them
# does not have.
if [[ -z ${SLURM_CPUS_PER_TASK:-} ]]; then
    cpus=$(tr , '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-1}" | sort -n | sed -n '1s/(.*//; 1p')
    tasks=$(tr , '\n' <<<"${SLURM_NTASKS:+${SLURM_TASKS_PER_NODE:-}}" | sort -n | sed -n '$s/(.*//; $p')
    SLURM_CPUS_PER_TASK=$((cpus / ${tasks:-1}))
    ((SLURM_CPUS_PER_TASK)) || SLURM_CPUS_PER_TASK=1
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
export OMP_NUM_THREADS=${OMP_NUM_THREADS%%,*} # OpenMP takes a list, for threads within threads
[[ $OMP_NUM_THREADS =~ ^[1-9][0-9]*$ ]] ||
    fail "OMP_NUM_THREADS is '$OMP_NUM_THREADS', which is no number of threads: unset it."
# Into a log Python would write only when 8 KiB have gathered, and lose them when it is killed.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED-1}

# --- where the ranks meet ---------------------------------------------------------------------------
# A site may give its own address of the first node, such as that of a faster network.
if [[ -n ${MASTER_ADDR:-} ]]; then
    address=$(getent ahosts "$MASTER_ADDR" | sed -n '1s/ .*//p') || address=""
    [[ -n $address && " $(hostname -I) " == *" $address "* ]] ||
        fail "MASTER_ADDR=$MASTER_ADDR of slurm/site.sh is ${address:-unknown}, no address of $(hostname), \
where rank 0 runs: correct it, or leave it out."
else
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) ||
        fail "scontrol does not name the nodes of this job ($SLURM_JOB_NODELIST): report it to your admin."
fi
if ! getent ahosts "$MASTER_ADDR" >/dev/null; then
    name=$MASTER_ADDR
    MASTER_ADDR=$(scontrol show node "$name" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    getent ahosts "$MASTER_ADDR" >/dev/null ||
        fail "neither $name nor its address in Slurm ($MASTER_ADDR) can be resolved on $(hostname): \
report it to your admin."
fi
# The port comes from the job's number, so that two jobs on one node do not collide.
first_port=${SITE_PORTS%-*}
last_port=${SITE_PORTS#*-}
MASTER_PORT=${MASTER_PORT:-$((first_port + SLURM_JOB_ID % (last_port - first_port + 1)))}
export MASTER_ADDR MASTER_PORT
if [[ -n ${SITE_NETWORK_INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$SITE_NETWORK_INTERFACE GLOO_SOCKET_IFNAME=$SITE_NETWORK_INTERFACE
fi

# --- what starts Python -----------------------------------------------------------------------------
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

# --- what this job runs on --------------------------------------------------------------------------
echo "job     $SLURM_JOB_ID ${SLURM_JOB_NAME:-}, restart ${SLURM_RESTART_COUNT:-0}, $(date +%FT%T%z)"
tasks_per_node=${SLURM_TASKS_PER_NODE:-1}
echo "nodes   $SLURM_JOB_NODELIST, tasks per node $tasks_per_node, CPUs per task $SLURM_CPUS_PER_TASK"
gpu_names=$(
    timeout 20 nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort | uniq -c | xargs
) || gpu_names=""
echo "GPUs    ${SLURM_GPUS_ON_NODE:-0} per node: ${gpu_names:-no nvidia-smi on this node}"
code_version=$(timeout 20 git -C "$REPOSITORY" describe --always --dirty 2>/dev/null) ||
    code_version="not a git checkout"
echo "code    $code_version in $REPOSITORY"

echo "meet at $MASTER_ADDR:$MASTER_PORT; checkpoints and notes in $TRAINKIT_JOB_DIR"
echo

# --- what it trains ---------------------------------------------------------------------------------
# Set TRAINING, what Python runs: the stage's script $1, or the one that the arguments of the job name, and
# its options.
choose_training() {
    local script=$1 correction="correct its name"
    shift
    if [[ $plain ]]; then
        script=${2:-}
        shift
    fi
    if [[ ${1:-} == *.py ]]; then
        script=$1
        shift
    fi
    [[ $script != -m ]] ||
        fail "--plain takes a file, not a module: YOUR_TRAINING.md shows one that runs a module."
    [[ $PWD == "${SLURM_SUBMIT_DIR:-$PWD}" ]] || correction="leave out --chdir"
    [[ $script == *.py && -f $script ]] ||
        fail "there is no script ${script:-behind --plain} in $PWD: $correction."
    TRAINING=("$script" --data-dir "$TRAINKIT_DATA_DIR" --results-dir "$TRAINKIT_RESULTS_DIR"
        --checkpoint-dir "$TRAINKIT_JOB_DIR/checkpoints" --resume auto "$@")
    if [[ $plain ]]; then
        TRAINING=(-m trainkit.jobs.plain "$script" "$@")
    fi
}

# --- what watches it --------------------------------------------------------------------------------
# A step next to the ranks, until its input is closed. It shares memory, cores and GPUs with them, and sees
# all GPUs of a node, even if each rank has its own (--gpus-per-task, which newer Slurm tells by
# SLURM_TRES_PER_TASK only). Its outcome never matters to the job, and srun's words about it stay out of the
# job's log, where it would count as a rank.
sample() {
    local gpus=()
    trap : TERM # scancel sends it here, too, and the sampler has a verdict to give
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

sampler=""
if [[ $SITE_MONITOR == on ]]; then
    mkdir -p "$watching"
    echo "$SLURM_CPUS_PER_TASK ${tasks_per_node%%[(,]*} ${SLURM_MEM_PER_NODE:-0}" >"$watching/asked"
    # A coprocess has a pipe from here for its input, and would have one for its output, too.
    exec {log}>&1
    coproc SAMPLER { sample >&"$log"; }
    exec {log}>&-
    sampler=$SAMPLER_PID
    sampler_input=${SAMPLER[1]} # bash forgets it when the coprocess ends
    # Else a `wait` in the job script, for processes of its own, would wait for this one, too.
    disown "$sampler"
fi

# End the sampling, which prints its verdict.
stop_sampling() {
    local tenths
    [[ -n $sampler ]] || return
    echo "$1" >"$watching/ended" # this is the exit code
    exec {sampler_input}>&-
    for ((tenths = 0; tenths < 100; tenths++)); do
        kill -0 "$sampler" 2>/dev/null || return
        sleep 0.1
    done
    tell_no_verdict "no verdict within 10 seconds: python slurm/monitor.py --verdict $SLURM_JOB_ID"
}

# --- how it ends ------------------------------------------------------------------------------------
own_log=$(readlink -f /proc/$$/fd/2) # it is no file in a terminal

# Its log, which may hold earlier starts; and those of submitit for the ranks from 1 on, which are next to it.
printed() {
    [[ ! -f $own_log ]] || cat "$own_log" "${own_log%_0_log.out}"_[1-9]*_log.out 2>/dev/null
}

# Ask trainkit/jobs/in_job.py, which decides all that there is to decide at the end of a job. Where Python is in
# the site's container only, it runs there, but Slurm starts nothing in a job on its way back to the queue. It
# answers in less than a second; a node is not held for one that hangs, as in a file system.
in_job() {
    local launcher=srun ask
    [[ -z ${ranks:-} ]] || launcher=torchrun # by slurm_submit_torchrun.sh
    ask=(python -m trainkit.jobs.in_job "$@" "--facts=$facts" "--folder=$TRAINKIT_JOB_DIR" "--log=$own_log"
        "--launcher=$launcher" "--code=$code" "--seconds=$SECONDS" "--restart=${SLURM_RESTART_COUNT:-0}"
        "--most-restarts=$SITE_MOST_RESTARTS")
    [[ -z $ended_from_outside ]] || ask+=(--from-outside)
    timeout --signal=KILL 10 "${ask[@]}" 2>/dev/null < <(printed) && return
    [[ -z $requeued ]] || return
    (
        unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPU_BIND SLURM_TRES_BIND
        timeout --signal=KILL 20 srun --overlap --mem=0 --nodes=1 --ntasks=1 --gpus=0 \
            "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" "${ask[@]}" 2>/dev/null < <(printed)
    )
}

# Whether a job that has saved may go back to the queue. There may be seconds only, so Python is not asked where
# it is certain: at the time limit, and after a signal that only the ranks got.
may_go_back() {
    ((${SLURM_RESTART_COUNT:-0} < SITE_MOST_RESTARTS)) || return 1 # in a trap `return` alone has an older status
    [[ $facts == *" Reason=TimeLimit "* ]] || ((code == 0)) || [[ $(in_job back) == *yes ]]
}

# Set `requeued`, or `refusal` to why Slurm refuses. Its controller may be restarting.
requeue() {
    echo "stopped; back to the queue, to go on from the checkpoint"
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

finish() {
    local code=$? facts="" requeued="" refusal="" tried=() answer
    set +e
    trap - EXIT
    trap '' TERM # requeue sends it to this script, too
    echo
    if ((code || ${SLURM_RESTART_COUNT:-0})) || [[ -e $TRAINKIT_JOB_DIR/stopped ]]; then
        facts=$(scontrol --oneliner show job "$this_job" 2>/dev/null)
    fi
    if [[ -e $TRAINKIT_JOB_DIR/stopped ]] && may_go_back; then
        requeue
        tried=("--refusal=${refusal%%$'\n'*}")
    fi
    stop_sampling "$code"
    answer=$(in_job end "${tried[@]}") # the exit code, and what to say
    if [[ $answer == *"code    "[0-9]* ]]; then
        answer=${answer#*code    } # container programs have their words before it
        code=${answer%%$'\n'*}
        [[ $answer != *$'\n'* ]] || echo "${answer#*$'\n'}"
    elif ((code)) || [[ -e $TRAINKIT_JOB_DIR/stopped && ! $requeued ]]; then
        ((code)) || code=1
        echo "${refusal:+error: $refusal; }its checkpoints, if it has saved, are in $TRAINKIT_JOB_DIR/checkpoints"
    fi
    echo "ended   $(date +%FT%T%z) after $SECONDS s with exit code $code"
    exit "$code"
}
ended_from_outside=""
trap finish EXIT
trap 'ended_from_outside=1; exit 143' TERM HUP
# With --signal=B:USR2@60 they come here, and not to the ranks.
trap : USR1 USR2
