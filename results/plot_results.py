"""Compare runs: a table on the terminal, comparison.md, comparison.html, comparison.csv and the figures.

Try: python results/plot_results.py --help
"""

from pathlib import Path
from runpy import run_path

try:
    from manygpus.commands.compare_runs import main
except ImportError:
    # Where the environment of a different project is active, the kit's own Python takes over.
    run_path(str(Path(__file__).resolve().parents[1] / "manygpus" / "kit_python.py"))["take_over"]()
    raise

if __name__ == "__main__":
    main()
