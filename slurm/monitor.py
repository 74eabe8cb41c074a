"""Watch what a job does with its GPUs, cores and memory, while it runs and afterwards.

Try: python slurm/monitor.py --help
"""

from trainkit.commands.monitor import main

if __name__ == "__main__":
    main()
