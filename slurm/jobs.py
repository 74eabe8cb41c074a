"""Show the jobs of this checkout: what each one runs, its state, how long, and the verdict or why it failed.

Try: python slurm/jobs.py --help
"""

from pathlib import Path
from runpy import run_path

try:
    from manygpus.commands.jobs import main
except ImportError:
    # Where the environment of a different project is active, the kit's own Python takes over.
    run_path(str(Path(__file__).resolve().parents[1] / "manygpus" / "kit_python.py"))["take_over"]()
    raise

if __name__ == "__main__":
    main()
