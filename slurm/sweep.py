"""Run every combination of the given lists as a separate job, then compare the results.

Try: python slurm/sweep.py --help
"""

from pathlib import Path
from runpy import run_path

try:
    from manygpus.commands.sweep import main
except ImportError:
    # Where the environment of a different project is active, the kit's own Python takes over.
    run_path(str(Path(__file__).resolve().parents[1] / "manygpus" / "kit_python.py"))["take_over"]()
    raise

if __name__ == "__main__":
    main()
