"""Show the jobs of this checkout: what each one runs, its state, how long, and the verdict or why it failed.

Try: python slurm/jobs.py --help
"""

from trainkit.commands.jobs import main

if __name__ == "__main__":
    main()
