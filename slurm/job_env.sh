# shellcheck shell=bash disable=SC2034  # what it sets is used by the job scripts
# The part of a job that is the same in every job script, sourced at its beginning: reads
# slurm/site.sh, makes the Python environment ready, checks it, chooses where the ranks meet, and
# prints what this job runs on. When the script ends, it says why if it failed, and sends a job
# that was stopped by a signal, and has saved, back to the queue.
#
# Unless SITE_MONITOR is off, each node is sampled meanwhile, and a verdict stands among the job's last lines.
#
# For the launch line it sets DATA_DIR, RESULTS_DIR, TRAINKIT_JOB_DIR, SITE_SRUN_ARGS and
# SITE_CONTAINER, and `choose_training` sets TRAINING; for the ranks it exports MASTER_ADDR and MASTER_PORT.
#
# Where the job script's first argument is --plain, its second is a script that knows nothing of the kit.

_began_in=$PWD
declare -A _own_inherited=() # of Slurm's variables, before slurm/site.sh sets some
for name in ${!SRUN_@} ${!SLURM_@}; do
    _own_inherited[$name]=${!name}
done
unset MASTER_ADDR MASTER_PORT # those of the user's shell; slurm/site.sh may set its own
source "${BASH_SOURCE[0]%/*}/site_env.sh"
[[ ${SLURM_JOB_ID:-} =~ ^[1-9][0-9]*$ && ${SLURM_JOB_NODELIST:-} ]] ||
    fail "this is no job of Slurm (SLURM_JOB_ID, SLURM_JOB_NODELIST): send it with sbatch, or python submit.py."
# A shell that srun started also leaves its number to the jobs that are sent from there.
[[ ! ${SLURM_STEP_ID:-} =~ ^[0-9]{1,9}$ || $(tr '\0' ' ' <"/proc/$PPID/cmdline") == *.batch\]* ]] ||
    fail "a job script starts srun itself, and would wait for this one: send it with sbatch, or run it in salloc, without srun."
sent_from_step=${SLURM_STEP_ID:-}
plain="" needed=(torch numpy tqdm psutil trainkit)
if [[ ${1:-} == --plain ]]; then
    plain=1 needed=(trainkit)
    export PYTHONSAFEPATH=1 # a queue.py in the folder of the script is not for `python -m`; runtime/plain.py unsets it
else
    DATA_DIR=$TRAINKIT_DATA_DIR RESULTS_DIR=$TRAINKIT_RESULTS_DIR # a plain script may have its own of these names
fi
# sbatch gives a job all variables of the shell that it is called from. In a shell within a job (salloc, srun --pty,
# a notebook on a node) some are that job's, and srun would take them for its own options (man srun, INPUT ENVIRONMENT
# VARIABLES): it would put all ranks on the cores of that shell, or refuse them. So what only srun sets or reads goes;
# what an option of sbatch sets, too, stays if the record of this job has that option. Of the few that the record does
# not have, those of a step go, which is told by its number: no job script has one of its own. What slurm/site.sh has set,
# such as SLURM_GPU_BIND=none, stays.
leave_out_options_of_another_job() {
    local name asked
    for name in ${!SRUN_@} ${!SLURM_@}; do
        [[ ${!name} == "${_own_inherited[$name]-}" ]] || continue
        case $name in
            SRUN_* | SLURM_CPU_BIND* | SLURM_STEP* | SLURM_SRUN_* | SLURM_LAUNCH_* | SLURM_EX[AC]* | SLURM_OVERLAP) asked=nowhere ;;
            SLURM_LABELIO | SLURM_STD*MODE | SLURM_*PROLOG | SLURM_*EPILOG | SLURM_CONSTRAINT) asked=nowhere ;;
            SLURM_DIST* | SLURM_MEM_BIND* | SLURM_OVERCOMMIT | SLURM_CPU_FREQ*) asked=${sent_from_step:+nowhere} ;;
            SLURM_GPUS) asked="TresPerJob=" ;;
            SLURM_GPUS_PER_NODE) asked="TresPerNode=" ;;
            SLURM_GPUS_PER_SOCKET) asked="TresPerSocket=" ;;
            SLURM_GPUS_PER_TASK | SLURM_TRES_PER_TASK) asked="TresPerTask=" ;;
            SLURM_NTASKS_PER_GPU | SLURM_NTASKS_PER_TRES) asked="NtasksPerTRES=" ;;
            SLURM_CPUS_PER_TASK) asked="CPUs/Task=${SLURM_CPUS_PER_TASK} " ;;
            SLURM_CPUS_PER_GPU) asked="CpusPerTres=" ;;
            SLURM_MEM_PER_NODE) asked="MinMemoryNode=[1-9]" ;;
            SLURM_MEM_PER_CPU) asked="MinMemoryCPU=" ;;
            SLURM_MEM_PER_GPU) asked="MemPerTres=" ;;
            SLURM_GPU_BIND | SLURM_TRES_BIND) asked="TresBind=" ;;
            SLURM_GPU_FREQ) asked="TresFreq=" ;;
            *) asked="" ;;
        esac
        # Without a record, where Slurm does not answer, nothing is known of these.
        [[ -z $asked || $asked != nowhere && $facts != JobId=* || $facts =~ \ $asked ]] || unset "$name"
    done
}

hear_signals() {
    trap 'ended_from_outside=1; exit 143' TERM HUP
    trap : USR1 USR2 # of --signal=B:USR2@60, which the ranks do not get
}
hear_signals
run_activate_environment
hear_signals # the script of an environment may trap some, too
cd "$_began_in" || fail "slurm/site.sh has removed $_began_in."
# slurm_submit_torchrun.sh sets `ranks`, by which `tell_who_failed` knows that srun's tasks are torchruns.
unset ranks facts log_begin TRAINING
[[ ${SLURM_JOB_ID:-} ]] || fail "activate_environment takes away Slurm's variables, which srun needs: leave that out."
# A shell that torchrun or mpirun has started leaves these, and the ranks would take them for theirs: as in place.py.
# shellcheck disable=SC2086 # these are names
unset {,LOCAL_,GROUP_,ROLE_}{RANK,WORLD_SIZE} ROLE_NAME ${!TORCHELASTIC_@} ${!PET_@} ${!OMPI_COMM_@} ${!PMI_@} PMIX_RANK PMIX_NAMESPACE
type srun scontrol >/dev/null 2>&1 || fail "srun and scontrol are not on PATH ($PATH): add their folder in slurm/site.sh."
# One job of an array has the array's own number, by which Slurm means them all. The variables may be of another job,
# which has sent this one.
this_job=${SLURM_ARRAY_JOB_ID:-}_${SLURM_ARRAY_TASK_ID:-}
[[ $this_job != _ && $(scontrol --oneliner show job "$this_job" 2>/dev/null) == "JobId=$SLURM_JOB_ID "* ]] || this_job=$SLURM_JOB_ID
[[ $this_job != *_* || -n $plain ]] || fail "this is a job of an array, all of which would train the same: leave out --array."
facts=$(scontrol --oneliner show job "$this_job") || facts=""
# A job that is sent by another has the other's number of restarts in its environment.
[[ ! $facts =~ \ Requeue=[01]\ Restarts=([0-9]+)\ BatchFlag= ]] || SLURM_RESTART_COUNT=${BASH_REMATCH[1]}
leave_out_options_of_another_job
# A number of GPUs for the whole job (--gpus) would be that of each step, also where a step is on one node, which has
# less; and where a node has one task, Slurm hands out fewer.
if [[ ${SLURM_GPUS:-} && ${SLURM_GPUS##*:} == "$((${SLURM_GPUS_ON_NODE:-0} * SLURM_JOB_NUM_NODES))" ]]; then
    export SLURM_GPUS_PER_NODE=$SLURM_GPUS_ON_NODE
    unset SLURM_GPUS
fi
[[ -n $plain || $facts != *" TimeLimit=00:01:00 TimeMin="* ]] ||
    fail "a job saves and stops a minute before its time limit, so this one could not train: give --time=00:02:00 or more."
was_preempted() { [[ $(scontrol show job "$this_job" 2>/dev/null) == *PreemptTime=[0-9]* ]]; }
at_time_limit() { [[ $(scontrol show job "$this_job" 2>/dev/null) == *" Reason=TimeLimit Dependency="* ]]; }
unset SLURM_EXPORT_ENV # of sbatch --export=NONE: srun would keep from the ranks what is exported here
if [[ -z ${SLURM_CPUS_PER_TASK:-} ]]; then
    # Without --cpus-per-task, as with --cpus-per-gpu, a task has its share of what the job has on a node. Where nodes
    # differ ("4(x2),2"), it is that of the fewest CPUs and the most tasks: srun refuses what one of them does not have.
    cpus=$(tr , '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-1}" | sort -n | sed -n '1s/(.*//; 1p')
    tasks=$(tr , '\n' <<<"${SLURM_NTASKS:+${SLURM_TASKS_PER_NODE:-}}" | sort -n | sed -n '$s/(.*//; $p')
    SLURM_CPUS_PER_TASK=$((cpus / ${tasks:-1}))
    ((SLURM_CPUS_PER_TASK)) || SLURM_CPUS_PER_TASK=1
fi

# The job's own folder: checkpoints, and a note of every rank on how it ended.
export TRAINKIT_JOB_DIR=$JOBS_DIR/$SLURM_JOB_ID
if [[ -e $TRAINKIT_JOB_DIR && ${SLURM_RESTART_COUNT:-0} == 0 ]]; then
    # An older job with the same number; its checkpoints are not ours.
    mv "$TRAINKIT_JOB_DIR" "$TRAINKIT_JOB_DIR-$(date -r "$TRAINKIT_JOB_DIR" +%Y%m%d-%H%M%S)" ||
        fail "$TRAINKIT_JOB_DIR is there already, and not yours: set SITE_SCRATCH_DIR in slurm/site.sh to a folder of yours."
fi
[[ -e $TRAINKIT_JOB_DIR || ${SLURM_RESTART_COUNT:-0} == 0 ]] ||
    echo "warning: $TRAINKIT_JOB_DIR, with what an earlier start has saved, is not there: it begins anew. Is there a date in slurm/site.sh?"
problem=$(mkdir -p "$TRAINKIT_JOB_DIR" 2>&1) ||
    fail "$TRAINKIT_JOB_DIR cannot be made (${problem##*: }): set SITE_RESULTS_DIR or SITE_SCRATCH_DIR in slurm/site.sh to a shared folder of yours."
# Slurm before 26.05 (seen: 24.11; SchedMD's ticket 25682) starts a job that was preempted once more after it has come
# back, and ended.
if [[ -e $TRAINKIT_JOB_DIR/ended-after-preemption ]]; then
    echo "this job has already ended, without an error, and does nothing more: to train again, submit it again"
    exit
fi
problem=$(rm -f "$TRAINKIT_JOB_DIR"/{rank-*.{started,finished,failed,lost},first-failed,stopped,monitor/verdict.json} 2>&1) ||
    fail "what the start before has left cannot be removed (${problem%%$'\n'*}): remove it, and submit again."
[[ -z $plain ]] || { mkdir -p "$TRAINKIT_JOB_DIR/checkpoints" && touch "$TRAINKIT_JOB_DIR/plain"; } 2>/dev/null ||
    fail "$TRAINKIT_JOB_DIR cannot have a folder checkpoints and a file plain: move away what has these names."
# Where this start of the job begins in its logs, which may hold earlier ones: the job's own (no file in a terminal),
# and next to it submitit's of the ranks from 1 on.
own_log=$(readlink -f /proc/$$/fd/2)
declare -A log_begin
for log in "$own_log" "${own_log%_0_log.out}"_[1-9]*_log.out; do
    if [[ -f $log ]]; then log_begin[$log]=$(stat -c %s "$log"); fi
done

# USR2 and SIGTERM ask a rank to save a checkpoint and stop. They wait until it can (trainkit/rank/checkpoint.py),
# instead of killing Python while it starts.
hold_signals=(env "--block-signal=USR2,TERM")
"${hold_signals[@]}" true 2>/dev/null || hold_signals=(bash -c 'trap "" USR2; exec "$@"' bash) # before coreutils 8.31
SITE_CONTAINER=("${hold_signals[@]}" "${SITE_CONTAINER[@]}")

# --- where the ranks meet ---------------------------------------------------------------------------
# A site may give its own address of the first node, such as that of a faster network.
if [[ -n ${MASTER_ADDR:-} ]]; then
    address=$(getent ahosts "$MASTER_ADDR" | sed -n '1s/ .*//p') || address=""
    [[ -n $address && " $(hostname -I) " == *" $address "* ]] ||
        fail "MASTER_ADDR=$MASTER_ADDR of slurm/site.sh is ${address:-unknown}, no address of $(hostname), where rank 0 runs: correct it, or leave it out."
else
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) ||
        fail "scontrol does not name the nodes of this job ($SLURM_JOB_NODELIST): report it to your admin."
fi
if ! getent ahosts "$MASTER_ADDR" >/dev/null; then
    name=$MASTER_ADDR
    MASTER_ADDR=$(scontrol show node "$name" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    getent ahosts "$MASTER_ADDR" >/dev/null ||
        fail "neither $name nor its address in Slurm ($MASTER_ADDR) can be resolved on $(hostname): report it to your admin."
fi
# By the job's number, so that two jobs on one node do not collide, and below the ports that the
# system hands out by itself (32768 and up).
MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
export MASTER_ADDR MASTER_PORT
if [[ -n ${SITE_NETWORK_INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$SITE_NETWORK_INTERFACE GLOO_SOCKET_IFNAME=$SITE_NETWORK_INTERFACE
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS%%,*} # OpenMP takes a list, for threads within threads
[[ $OMP_NUM_THREADS =~ ^[1-9][0-9]*$ ]] || fail "OMP_NUM_THREADS is '$OMP_NUM_THREADS', which is no number of threads: unset it."
# Into a log Python would write only when 8 KiB have gathered, and lose them when it is killed.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED-1}

# --- what this job runs on --------------------------------------------------------------------------
job_name=${SLURM_JOB_NAME:-}
echo "job     $SLURM_JOB_ID ${job_name//[[:cntrl:]]/?}, restart ${SLURM_RESTART_COUNT:-0}, $(date +%FT%T%z)"
echo "nodes   $SLURM_JOB_NODELIST, tasks per node ${SLURM_TASKS_PER_NODE:-1}, CPUs per task ${SLURM_CPUS_PER_TASK:-1}"
# A driver that hangs holds nvidia-smi even from being killed, so nobody waits for its end.
IFS= read -r -d '' -t 20 gpu_names < <(
    nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort | uniq -c | xargs || true
    printf '\0'
) || gpu_names="nvidia-smi does not answer"
gpu_names=${gpu_names%$'\n'}
echo "GPUs    ${SLURM_GPUS_ON_NODE:-0} per node: ${gpu_names:-no nvidia-smi on this node}"
echo "code    $(timeout 20 git -C "$REPOSITORY" describe --always --dirty 2>/dev/null || echo 'not a git checkout') in $REPOSITORY"
# By srun, as the ranks will be started, since the batch shell itself is outside of a site's container. It needs no GPU.
if ! checked=$(srun --nodes=1 --ntasks=1 --gpus=0 "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" python -c '
import importlib.metadata, importlib.util, os, sys
if lost := [name for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "TRAINKIT_JOB_DIR") if name not in os.environ]:
    sys.exit("error: the container does not pass on the variables " + " ".join(lost))
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: {sys.executable} has no " + " ".join(missing))
torch = importlib.util.find_spec("torch") and importlib.metadata.version("torch")
print(f"python  {sys.executable}, torch {torch}")' "${needed[@]}" 2>&1) ||
    [[ $'\n'$checked != *$'\npython  '* ]]; then
    echo "$checked" >&2
    # Preemption ends the check, which does not hold signals back yet, and leaves the job to itself.
    if [[ ! -e $TRAINKIT_JOB_DIR/preempted ]] && was_preempted && scontrol requeue "$this_job" 2>/dev/null; then
        touch "$TRAINKIT_JOB_DIR/preempted"
        echo "a job of higher priority took its place before it began; back to the queue"
        exit 1
    fi
    if [[ $checked =~ Unable\ to\ create\ step[^$'\n']* ]]; then
        fail "srun starts nothing in this job (${BASH_REMATCH[0]}): correct what it asks for, in the #SBATCH lines, by sbatch or \
in slurm/site.sh, or unset what another job has left in your shell (SLURM_..., SRUN_...)."
    fi
    answer=${checked%%$'\n'*}
    fail "the Python environment of this job does not work (its answer: ${answer:-none}): fix activate_environment, \
SITE_CONTAINER or SITE_SRUN_ARGS in slurm/site.sh, or unset what another job has left in your shell (SLURM_..., SRUN_...)."
fi
echo "$checked"
echo "meet at $MASTER_ADDR:$MASTER_PORT; checkpoints and notes in $TRAINKIT_JOB_DIR"
echo

# --- what it trains ---------------------------------------------------------------------------------
# Set TRAINING, what Python runs: the stage's script $1, or the one that the arguments of the job name, and its options.
choose_training() {
    local script=$1
    shift
    [[ -z $plain ]] || { script=${2:-} && shift; }
    if [[ ${1:-} == *.py ]]; then script=$1 && shift; fi
    [[ $script != -m ]] || fail "--plain takes a file, not a module: YOUR_TRAINING.md shows one that runs a module."
    [[ $script == *.py && -f $script ]] ||
        fail "there is no script ${script:-behind --plain} in $PWD: $([[ $PWD == "${SLURM_SUBMIT_DIR:-$PWD}" ]] && echo correct its name || echo leave out --chdir)."
    TRAINING=("$script" --data-dir "$TRAINKIT_DATA_DIR" --results-dir "$TRAINKIT_RESULTS_DIR"
        --checkpoint-dir "$TRAINKIT_JOB_DIR/checkpoints" --resume auto "$@")
    [[ -z $plain ]] || TRAINING=(-m trainkit.runtime.plain "$script" "$@")
}

# --- what watches it --------------------------------------------------------------------------------
# A step next to the ranks, until `finish` closes its input. It shares memory, cores and GPUs with them, and sees all
# GPUs of a node, even if each rank has its own (--gpus-per-task, which newer Slurm tells by SLURM_TRES_PER_TASK only).
# Its outcome never matters to the job, and srun's words about it stay out of the job's log, where it would count as a rank.
sample() {
    if [[ ${SLURM_GPUS_PER_TASK:-} || ${SLURM_TRES_PER_TASK:-} == *gpu* ]]; then
        set -- "--gpus-per-node=${SLURM_GPUS_ON_NODE:-0}"
    fi
    unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPU_BIND SLURM_TRES_BIND
    exec srun --job-name=monitor --overlap --mem=0 --input=all --nodes="$SLURM_JOB_NUM_NODES" \
        --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$@" "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" \
        python "$REPOSITORY/slurm/monitor.py" --sample "$watching"
}

watching=$TRAINKIT_JOB_DIR/monitor sampler=""
if [[ $SITE_MONITOR == on ]] && mkdir -p "$watching"; then
    tasks=${SLURM_TASKS_PER_NODE:-1}
    rm -f "$watching"/{asked,ended,log}
    echo "${SLURM_CPUS_PER_TASK:-0} ${tasks%%[(,]*} ${SLURM_MEM_PER_NODE:-0}" >"$watching/asked" || true
    exec {own_output}>&1 # in place of which a coprocess has a pipe
    coproc SAMPLER { sample 1>&"$own_output" 2>"$watching/log"; }
    sampler=$! sampler_input=${SAMPLER[1]:-} # which bash forgets when it ends
    exec {own_output}>&-
fi

# A job script that waits for all that it has started means its own, and not the sampler.
wait() {
    local process
    if (($#)); then
        builtin wait "$@"
    else
        for process in $(jobs -p); do
            [[ $process == "$sampler" ]] || builtin wait "$process" || true
        done
    fi
}

# --- how it ends ------------------------------------------------------------------------------------
# What this start of the job has printed.
printed() {
    for log in "$own_log" "${own_log%_0_log.out}"_[1-9]*_log.out; do
        if [[ -f $log ]]; then tail -c "+$((${log_begin[$log]:-0} + 1))" "$log"; fi
    done
}

# By trainkit/jobs/why.py, which prints the exit code of the rank that failed first (0: unknown), and the reasons. Where
# Python is in the site's container only, it is asked there; if it can tell nothing at all, there are the words of the
# first rank to fail.
tell_who_failed() {
    local launcher=${ranks:+torchrun} why
    why=(python -m trainkit.jobs.why "${launcher:-srun}" "$own_log")
    "${why[@]}" 2>/dev/null < <(printed) ||
        timeout --signal=KILL 60 env --unset=SLURM_GPUS_PER_TASK --unset=SLURM_TRES_PER_TASK --unset=SLURM_GPU_BIND \
            srun --overlap --mem=0 --nodes=1 --ntasks=1 --gpus=0 "${SITE_SRUN_ARGS[@]}" "${SITE_CONTAINER[@]}" \
            "${why[@]}" 2>/dev/null < <(printed) ||
        cat "$TRAINKIT_JOB_DIR"/{first-failed,rank-*.failed} 2>/dev/null | sed -n '/./{s/^/why     /p;q}'
}

# Print it, and set `code` to that of the rank that failed first. srun reports the highest: 143 where it had to end others.
tell_why() {
    local told
    told=$(tell_who_failed)
    grep -E '^(why|then) ' <<<"$told"
    if [[ $told =~ (^|$'\n')"code    "([1-9][0-9]*)$'\n' ]]; then code=${BASH_REMATCH[2]}; fi
}

# End the sampling. It has 15 seconds for its verdict, and 2 to begin where it has not.
tell_what_was_seen() {
    local tenths begun=0 most=150 why
    [[ -n $sampler ]] || return
    echo "$code" 2>/dev/null >"$watching/ended"
    [[ -z $sampler_input ]] || exec {sampler_input}>&-
    if compgen -G "$watching/*.csv" >/dev/null; then begun=1; else most=20; fi
    for ((tenths = 0; tenths < most; tenths++)); do
        kill -0 "$sampler" 2>/dev/null || break
        sleep 0.1
    done
    if kill "$sampler" 2>/dev/null && ((begun)); then
        echo "watch   no verdict within 15 seconds: python slurm/monitor.py --verdict $SLURM_JOB_ID"
    elif ! wait "$sampler" && [[ ! -e $watching/verdict.json ]]; then
        # Not what srun says of every step that fails, or is ended.
        why=$(grep -vE ': tasks? [0-9,-]+: |^Try |forcing job termination| CANCELLED AT ' "$watching/log" | tail -n 1)
        if ((begun)); then
            echo "watch   sampled only in part (${why:-killed}): python slurm/monitor.py --verdict $SLURM_JOB_ID"
        else
            echo "watch   not sampled: ${why:-it had not begun when the job ended}"
        fi
    fi
}

# An option of the training may name another place; submit.py sets the variable to that.
tells_where=1
[[ -z $plain && " $* " != *" --results-dir"[\ =]* ]] || tells_where=""

finish() {
    local code=$? saved="" again="submit again" why tries soon=$TRAINKIT_JOB_DIR/failed-soon
    set +e
    trap - EXIT
    trap '' TERM # requeue sends it to this script, too
    echo
    # srun may say so, and return 0; Slurm puts the job back into the queue itself.
    if ((code == 0)) && printed | grep -a '^srun: error: Node failure on ' >/dev/null; then
        code=1 ended_from_outside=1
    fi
    if [[ -f $TRAINKIT_JOB_DIR/stopped ]]; then
        saved=$(<"$TRAINKIT_JOB_DIR/stopped")
        saved=${saved:-$TRAINKIT_JOB_DIR/checkpoints}
        if [[ -n $plain ]]; then again+=" (saved: $saved)"; else again+=" with --checkpoint-dir $saved"; fi
    fi
    if [[ -z $plain || -z $saved || -n ${ended_from_outside:-} ]] || ((code == 0)); then
        rm -f "$soon" 2>/dev/null
    else
        # Where a rank fails, srun ends the others, and these may take that for a preemption, and save.
        if ((SECONDS >= 300)) || was_preempted; then
            rm -f "$soon" 2>/dev/null
        elif [[ -e $soon && ! -f $soon ]] || ! { echo >>"$soon"; } 2>/dev/null; then
            echo "it has failed within five minutes, and $soon cannot count how often: free the space, and $again"
            saved=""
        elif (($(wc -l <"$soon") >= 3)); then
            echo "three starts in a row have failed within five minutes: correct the script, and $again"
            saved=""
        fi
        [[ -z $saved ]] || tell_why
    fi
    [[ -n $saved ]] || tell_what_was_seen # else the queue comes first
    # scancel sends SIGTERM to this script; preemption to the ranks only, and USR2 goes only there as well.
    if [[ -n $saved ]] && { [[ -z ${ended_from_outside:-} ]] || at_time_limit; }; then
        echo "stopped; back to the queue, to go on from the checkpoint"
        ! was_preempted || touch "$TRAINKIT_JOB_DIR/preempted"
        for ((tries = 1; ; tries++)); do
            why=$(scontrol requeue "$this_job" 2>&1) && break
            # If it is not refused, Slurm's controller may be restarting.
            if [[ $why != *disabled* && $why != *nvalid* && $why != *"Only batch"* ]] && ((tries < 6)); then sleep 10 && continue; fi
            tell_what_was_seen
            echo "error: this job is not requeued (${why%%$'\n'*}): $again" >&2
            exit "$((code ? code : 1))"
        done
    elif [[ -n ${ended_from_outside:-} ]]; then
        echo "ended from outside: by scancel, scontrol requeue, preemption, the time limit or a node that failed"
        [[ -z $saved ]] || echo "if it does not come back by itself, $again"
    elif ((code)) && [[ ! -e $TRAINKIT_JOB_DIR/preempted && ! -e $TRAINKIT_JOB_DIR/first-failed ]] && was_preempted; then
        # Newer Slurm (seen: 24.11, 26.05) puts it back into the queue, whatever its exit code; 22.05 does not.
        echo "why     a job of higher priority took its place (preemption): if squeue shows that it does not come back, $again"
    elif ((code)); then
        tell_why
    elif [[ -e $TRAINKIT_JOB_DIR/preempted ]]; then
        mv "$TRAINKIT_JOB_DIR"/{preempted,ended-after-preemption}
    fi
    [[ -z $saved ]] || tell_what_was_seen
    echo "ended   $(date +%FT%T%z) after $SECONDS s with exit code $code${tells_where:+; results in $TRAINKIT_RESULTS_DIR/runs}"
    exit "$code"
}
trap finish EXIT
