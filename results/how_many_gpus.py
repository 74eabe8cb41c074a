"""Say how many GPUs to ask for, according to your runs.

Try: python results/how_many_gpus.py --help
"""

from trainkit.commands.how_many_gpus import main

if __name__ == "__main__":
    main()
