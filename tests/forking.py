"""Programs that need PyTorch, each in a process of its own, with PyTorch imported once for all of them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.distributed import launchers as place

PROGRAM = """
import atexit, gc, json, os, runpy, signal, sys, threading
import torch, torch._dynamo, torch.distributed.nn.functional  # all of it that a stage loads
import matplotlib.pyplot, pandas, psutil, tqdm  # and a comparison

gc.freeze()  # or a collection in a child would copy all of these pages

def run(arguments):
    sys.argv = arguments[1:] if arguments[0] == "-m" else arguments
    try:
        if arguments[0] == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            folder = os.path.dirname(os.path.abspath(arguments[0]))
            top = folder
            while top != "/" and not os.path.isdir(f"{top}/trainkit"):
                top = os.path.dirname(top)
            sys.path[:1] = [folder, top]  # as Python does; and a copied checkout has its own trainkit
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

def fork(arguments, environment, outputs, folder):
    process = os.fork()
    if process:
        return process
    signal.alarm(300)  # what hangs ends
    for stream, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code = run(arguments)
    # As Python ends, but for taking PyTorch apart, which takes a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)

for line in sys.stdin:
    processes = [fork(*request) for request in json.loads(line)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    print(json.dumps(codes), flush=True)
"""


class Forking:
    """Runs `python <arguments>` to its end, one at a time or in several ranks; use it in a `forking(...)`."""

    def __init__(self, parent: subprocess.Popen, folder: Path) -> None:
        self._parent, self._folder = parent, folder

    def run(
        self, *arguments: object, env: dict[str, str], ranks: int | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """With `ranks`, in so many processes that find each other by `env://`.

        Their outputs come one after the other, and the exit code is the first that is not 0.
        """
        environments = [env]
        if ranks:
            meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
            environments = [env | meeting | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]
        requests = []
        for i, environment in enumerate(environments):
            outputs = [self._folder / f"{name}-{i}" for name in ("stdout", "stderr")]
            for path in outputs:
                path.write_text("")
            folder = str(cwd or Path.cwd())
            requests.append([list(map(str, arguments)), environment, list(map(str, outputs)), folder])
        print(json.dumps(requests), file=self._parent.stdin, flush=True)
        codes = json.loads(self._parent.stdout.readline())
        written = [outputs for *_, outputs, _ in requests]
        texts = zip(*[[Path(path).read_text() for path in outputs] for outputs in written], strict=True)
        return subprocess.CompletedProcess(
            arguments, next(filter(None, codes), 0), *("".join(text) for text in texts)
        )


def free_port() -> str:
    return str(place.free_port())


@contextmanager
def forking(folder: Path, env: dict[str, str], before: str = "") -> Iterator[Forking]:
    """The process that imports PyTorch, after the lines `before`; outputs are written to `folder`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", f"{before}\n{PROGRAM}"], env=env, **pipes) as parent:
        yield Forking(parent, folder)
