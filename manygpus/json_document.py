"""What a command prints for a program (`--json`): one document on stdout, and all else on stderr.

Each kind of document has a JSON Schema in `manygpus/schemas`, which names its `schema_version`. A new key
leaves the version as it is; one that goes, or changes its meaning, makes a new version.
"""

import json
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, redirect_stdout
from enum import Enum
from pathlib import Path

from manygpus.errors import print_line


def notes_on_stderr() -> AbstractContextManager:
    """Return a context in which what is printed for people goes to stderr: stdout has the document alone."""
    return redirect_stdout(sys.stderr)


def print_document(document: Mapping[str, object]) -> None:
    """Print a document as JSON."""
    print_line(json.dumps(plain(document), indent=1, allow_nan=False))


def plain(value: object) -> object:
    """Return a value as JSON has it: null for NaN and infinity, text for a path, and the name of a member."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        # A number of NumPy.
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
