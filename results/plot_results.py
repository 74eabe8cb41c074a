"""Compare runs: a table on the terminal, comparison.md, comparison.csv and the figures.

Try: python results/plot_results.py --help
"""

from trainkit.commands.plot_results import main

if __name__ == "__main__":
    main()
