"""What happens in a job: how this start begins, what a script needs, how the job ended and why."""
