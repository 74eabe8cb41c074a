#!/bin/bash
# My first job script. Submit it from the folder of the stage: sbatch exercises/02_jobscript/mine/job.sh

# What Slurm should give the job: lines of #SBATCH, before the first command

# What the shell should do when a command fails

# The training, started by Slurm as a task of the job
