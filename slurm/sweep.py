"""Run every combination of the given lists as a separate job, then compare the results.

Try: python slurm/sweep.py --help
"""

from trainkit.commands.sweep import main

if __name__ == "__main__":
    main()
