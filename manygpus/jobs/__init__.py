"""Jobs on Slurm, in subpackages: submit, inside, watch, sweeps, doctor. Here is what all of them use."""
