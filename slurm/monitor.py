"""Watch what a job does with its GPUs, cores and memory, while it runs and afterwards.

Try: python slurm/monitor.py --help
"""

from pathlib import Path
from runpy import run_path

try:
    from manygpus.commands.monitor import main
except ImportError:
    # Where the environment of a different project is active, the kit's own Python takes over.
    run_path(str(Path(__file__).resolve().parents[1] / "manygpus" / "kit_python.py"))["take_over"]()
    raise

if __name__ == "__main__":
    main()
