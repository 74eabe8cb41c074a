"""What became of jobs: the state of one, the list of all."""
