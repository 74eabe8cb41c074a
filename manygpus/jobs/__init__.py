"""Jobs on Slurm, in rooms: submit, inside, watch, sweeps, doctor. Here is what all of them use."""
