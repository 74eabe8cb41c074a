"""Show what each job asked Slurm for, what it used, and what would have been enough.

Try: python slurm/jobs.py --help
"""

from trainkit.commands.jobs import main

if __name__ == "__main__":
    main()
