"""Run a script as `python script.py` does, in a state in which it and its libraries install handlers.

    python manygpus/jobs/inside/main_shim.py script.py ...
    python manygpus/jobs/inside/main_shim.py -m FOLDER package.train ...
    python manygpus/jobs/inside/main_shim.py --frozen CHECKOUT COPY ... (one of the above)

That may be another Python than the kit's, of an environment of the user's: it needs no packages, and 3.7
will do.

USR2 is ignored there (run_plain.py). But Lightning and others install a handler only where Python tells of
none. So `signal.getsignal` tells that USR2 is at its default, until the script installs a handler.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

# What Slurm sends a minute before the time limit.
USR2 = signal.SIGUSR2


def show_default() -> None:
    """Have USR2 ignored, and `signal` tell that it is at its default, while the script has no handler."""
    set_handler = signal.signal
    get_handler = signal.getsignal

    def get_shown(number: int) -> object:
        handler = get_handler(number)
        return signal.SIG_DFL if number == USR2 and handler == signal.SIG_IGN else handler

    def set_shown(number: int, handler: object) -> object:
        shown = get_shown(number)
        set_handler(number, signal.SIG_IGN if number == USR2 and handler == signal.SIG_DFL else handler)
        return shown

    signal.signal = set_shown
    signal.getsignal = get_shown


def write_whole_lines() -> None:
    """Write each line at once and whole, where Python would not buffer (job_env.sh, jobs/local_job.py).

    It would write each argument of a `print` by itself, and in the pipe that the ranks of torchrun share,
    lines of two ranks would mingle. A line without an end is lost there if its rank is killed.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


def run(script: str) -> None:
    """Run the script, with its own folder on `sys.path`, as the module `__main__` of this process."""
    main = ModuleType("__main__")
    main.__file__ = script
    main.__loader__ = SourceFileLoader("__main__", script)
    sys.modules["__main__"] = main
    # As Python does.
    sys.path[0] = str(Path(script).resolve().parent)
    code = compile(Path(script).read_bytes(), script, "exec")
    exec(code, main.__dict__)


def run_module(folder: str, name: str) -> None:
    """Run the module, found from this folder, as the module `__main__` of this process."""
    sys.modules["__main__"] = ModuleType("__main__")
    # As `python -m` does, which calls the same function.
    sys.path[0] = folder
    runpy._run_module_as_main(name)


def import_the_copy(checkout: str, copy: str) -> None:
    """Have what would be imported from a checkout be imported from its frozen copy.

    In the script's environment the project may be installed as editable (goodfire-ai/spd#205), which puts
    folders of it on `sys.path`, or with setuptools a table of its packages into a module; or PYTHONPATH has
    such a folder. Python processes that the script starts find the copy by PYTHONPATH.
    """
    real_copy = os.path.realpath(copy)

    def in_the_copy(path: str) -> str:
        real = os.path.realpath(path)
        if not path or os.path.commonpath([real, checkout]) != checkout:
            return path
        counterpart = os.path.normpath(f"{real_copy}/{os.path.relpath(real, checkout)}")
        # What the copy only has a link to, such as .venv, stays.
        return counterpart if os.path.realpath(counterpart) == counterpart else path

    folders = [in_the_copy(folder) for folder in sys.path]
    changed = [folder for folder in folders if folder not in sys.path]
    sys.path[:] = folders
    for name, module in list(sys.modules.items()):
        table = getattr(module, "MAPPING", None)
        if name.startswith("__editable__") and isinstance(table, dict):
            table.update({package: in_the_copy(path) for package, path in table.items()})
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if changed:
        os.environ["PYTHONPATH"] = os.pathsep.join([*changed, *others])


if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0] == "--frozen":
        import_the_copy(sys.argv[1], sys.argv[2])
        del sys.argv[:3]
    show_default()
    # torchrun sets it for its ranks.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        write_whole_lines()
    if sys.argv[0] == "-m":
        run_module(sys.argv.pop(1), sys.argv.pop(1))
    else:
        run(sys.argv[0])
