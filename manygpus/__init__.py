"""The code that all stages share; README.md describes its packages."""

import sys

# A job's Python may be older if activate_environment chooses none: RHEL 9 has 3.9. Later imports would fail
# with errors that do not say so.
if sys.version_info < (3, 10):  # noqa: UP036
    version = sys.version.split()[0]
    raise ImportError(f"the kit needs Python 3.10 or newer, and {sys.executable} is {version}")
