#!/bin/sh
# Slurm runs this on the node before every task and batch script, as a child of the process that becomes it.
# What it prints as "export NAME=VALUE" goes into the task's environment.

# A job submitted with --export=NONE has no PATH of the login host, but Slurm is installed on every node.
bin=${SLURM_CONF%/*}/bin
case $PATH in
"$bin":*) ;;
*) echo "export PATH=$bin:$PATH" ;;
esac

# A node that is not a separate host could open the machine's GPUs. CUDA uses only the GPUs that are listed before the
# first invalid number, so a leading -1 hides them all.
if [ "$(hostname)" != "$SLURMD_NODENAME" ]; then
    echo "export CUDA_VISIBLE_DEVICES=-1${CUDA_VISIBLE_DEVICES:+,$CUDA_VISIBLE_DEVICES}"
fi

# Bind the task to as many CPUs as it asked for. Slurm's task/affinity does that on a real node, but it fails
# for nodes that have more CPUs than the machine. Jobs, nodes and tasks start at different CPUs.
wanted=${SLURM_CPUS_PER_TASK:-1}
if [ -z "$SLURM_STEP_ID" ]; then
    wanted=$SLURM_CPUS_ON_NODE
fi
cpus=$(unset OMP_NUM_THREADS OMP_THREAD_LIMIT && nproc) # with those it does not count the machine's
if [ "$wanted" -lt "$cpus" ]; then
    first=$((SLURM_JOB_ID + SLURM_NODEID + SLURM_LOCALID * wanted))
    list=$((first % cpus))
    while [ "$wanted" -gt 1 ]; do
        wanted=$((wanted - 1))
        list=$list,$(((first + wanted) % cpus))
    done
    taskset --pid --cpu-list "$list" "$PPID" >/dev/null
fi
