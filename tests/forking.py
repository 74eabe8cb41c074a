"""Programs that need PyTorch, each in a process of its own, with PyTorch imported once for all of them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """
import atexit, json, os, runpy, signal, sys, threading
import torch, torch._dynamo, torch.distributed.nn.functional  # all of it that a stage loads
import pandas  # and an exercise

def run(arguments):
    sys.argv = arguments[1:] if arguments[0] == "-m" else arguments
    try:
        if arguments[0] == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
            return 1
        return left.code or 0
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0

for line in sys.stdin:
    arguments, environment, *outputs = json.loads(line)
    process = os.fork()
    if not process:
        signal.alarm(120)  # what hangs ends
        for stream, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
        os.environ.clear()
        os.environ.update(environment)
        code = run(arguments)
        # As Python ends, but for taking PyTorch apart, which takes a second.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


class Forking:
    """Runs `python <arguments>` to its end, one at a time; use it in a `forking(...)`."""

    def __init__(self, parent: subprocess.Popen, folder: Path) -> None:
        self._parent, self._outputs = parent, [folder / "stdout", folder / "stderr"]

    def run(self, *arguments: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        for path in self._outputs:
            path.write_text("")
        request = [list(map(str, arguments)), env, *map(str, self._outputs)]
        print(json.dumps(request), file=self._parent.stdin, flush=True)
        code = int(self._parent.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in self._outputs))


@contextmanager
def forking(folder: Path, env: dict[str, str]) -> Iterator[Forking]:
    """The process that imports PyTorch; outputs are written to `folder`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, **pipes) as parent:
        yield Forking(parent, folder)
