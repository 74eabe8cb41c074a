"""Run single GPU, DataParallel and DDP, and compare them.

Try: python results/compare.py --help
"""

from trainkit.commands.compare import main

if __name__ == "__main__":
    main()
