"""Start a program again with the kit's own Python: .venv of this checkout.

The programs of the kit run this file where an import of theirs fails, as with the Python of a user's own
environment, which has no submitit. It needs no packages, and 3.6 will do.
"""

import os
import sys
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parents[1] / ".venv"


def take_over() -> None:
    """Start the program again, with its arguments, unless it is the kit's own Python that lacks something."""
    python = ENVIRONMENT / "bin" / "python"
    if Path(sys.prefix).resolve() != ENVIRONMENT.resolve() and python.exists():
        os.execv(str(python), [str(python), *sys.argv])
