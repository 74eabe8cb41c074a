"""Run a script as `python script.py` does, in a state in which it and its libraries install handlers.

    python trainkit/jobs/as_main.py script.py ...
    python trainkit/jobs/as_main.py -m FOLDER package.train ...

That may be another Python than the kit's, of an environment of the user's: it needs no packages, and 3.7
will do.

Slurm sends USR2 a minute before the time limit. Linux ends a process that has no handler for it, so
jobs/plain.py has USR2 ignored. But Lightning and others install a handler only where Python tells of none,
and Lightning waits for USR1 unless told otherwise. So here, until the script installs a handler for USR2:

- `signal.getsignal` tells that USR2 is at its default;
- USR2 reaches the script's handler for USR1, where there is one, and does not end the script. Nor does it end
  programs that the script has started, unless there is such a handler: then it ends them, as USR1 would.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType

# What Slurm sends.
HANDED_ON = signal.SIGUSR2
# What many scripts wait for.
EXPECTED = signal.SIGUSR1

# Python's own, as `HandedOn` puts others in their place.
set_handler = signal.signal
get_handler = signal.getsignal


class HandedOn:
    """USR2 as the script sees it: its own handler, or the default.

    Attributes:
        at_default: whether the script has no handler of its own for USR2.
        process: the number of the process that runs the script.
    """

    def __init__(self) -> None:
        self.at_default = True
        self.process = os.getpid()
        self._settle()
        signal.signal = self.set
        signal.getsignal = self.get

    def get(self, number: int) -> object:
        """Do what `signal.getsignal` does."""
        if number == HANDED_ON and self.at_default:
            return signal.SIG_DFL
        return get_handler(number)

    def set(self, number: int, handler: object) -> object:
        """Do what `signal.signal` does."""
        handler_before = self.get(number)
        asks_for_default = number == HANDED_ON and handler == signal.SIG_DFL
        if not asks_for_default:
            set_handler(number, handler)
        if number == HANDED_ON:
            self.at_default = asks_for_default
        # Whether there is a handler for USR1 may have changed.
        if self.at_default:
            self._settle()
        return handler_before

    def _settle(self) -> None:
        """Ignore USR2, which programs that the script starts then do as well, or hand it on."""
        if callable(get_handler(EXPECTED)):
            set_handler(HANDED_ON, self._hand_on)
        else:
            set_handler(HANDED_ON, signal.SIG_IGN)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        # A forked process, such as a worker of a loader, has the handlers, too.
        if os.getpid() == self.process:
            handler = get_handler(EXPECTED)
            handler(EXPECTED, frame)


def write_whole_lines() -> None:
    """Write each line at once and whole, where Python would not buffer (slurm/job_env.sh, jobs/local.py).

    It would write each argument of a `print` by itself. The ranks of torchrun share a pipe, in which lines of
    two ranks would mingle.
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


if __name__ == "__main__":
    del sys.argv[0]
    HandedOn()
    write_whole_lines()
    if sys.argv[0] == "-m":
        run_module(sys.argv.pop(1), sys.argv.pop(1))
    else:
        run(sys.argv[0])
