"""Slurm: asking for a job, following it, and what happens at its beginning and its end."""
