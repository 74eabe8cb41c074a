"""The commands of slurm/ and results/: a command line each, which may join all subpackages."""
