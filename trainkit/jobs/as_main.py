"""Run a script as `python script.py` does, in a state in which it and its libraries install handlers.

    python trainkit/jobs/as_main.py script.py ...

Slurm sends USR2 a minute before the time limit. Linux ends a process that has no handler for it, so
jobs/plain.py has USR2 ignored. But Lightning and others install a handler only where Python tells of none,
and Lightning waits for USR1 unless told otherwise. So here, until the script installs a handler for USR2:

- `signal.getsignal` tells that USR2 is at its default;
- USR2 reaches the script's handler for USR1, where there is one, and does not end the script. Nor does it end
  programs that the script has started, unless there is such a handler: then it ends them, as USR1 would.
"""

import os
import signal
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType

HANDED_ON, EXPECTED = signal.SIGUSR2, signal.SIGUSR1  # what Slurm sends, and what many scripts wait for
_set, _get = signal.signal, signal.getsignal


class HandedOn:
    """USR2 as the script sees it: its own handler, or the default."""

    def __init__(self) -> None:
        self.default = True
        self.process = os.getpid()
        self._settle()
        signal.signal = self.set
        signal.getsignal = self.get

    def get(self, number: int) -> object:
        """Do what `signal.getsignal` does."""
        return signal.SIG_DFL if number == HANDED_ON and self.default else _get(number)

    def set(self, number: int, handler: object) -> object:
        """Do what `signal.signal` does."""
        before = self.get(number)
        at_default = number == HANDED_ON and handler == signal.SIG_DFL
        _set(number, signal.SIG_IGN if at_default else handler)
        if number == HANDED_ON:
            self.default = at_default
        if self.default:
            self._settle()
        return before

    def _settle(self) -> None:
        """Ignore USR2, which programs that the script starts then do as well, or hand it on."""
        _set(HANDED_ON, self._hand_on if callable(_get(EXPECTED)) else signal.SIG_IGN)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self.process:  # a forked process, such as a loader's worker, has the handlers, too
            _get(EXPECTED)(EXPECTED, frame)


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
    sys.path[0] = str(Path(script).resolve().parent)  # as Python does
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


if __name__ == "__main__":
    del sys.argv[0]
    HandedOn()
    write_whole_lines()
    run(sys.argv[0])
