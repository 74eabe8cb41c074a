"""Run single GPU, DataParallel and DDP, and compare them.

Try: python results/compare.py --help
"""

from pathlib import Path
from runpy import run_path

try:
    from manygpus.commands.compare_stages import main
except ImportError:
    # Where the environment of a different project is active, the kit's own Python takes over.
    run_path(str(Path(__file__).resolve().parents[1] / "manygpus" / "kit_python.py"))["take_over"]()
    raise

if __name__ == "__main__":
    main()
