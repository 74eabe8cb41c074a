"""A Python that has PyTorch loaded, and runs programs in forks of itself: `forking.py` starts and asks it.

    python fork_server.py MODULE ...    loads these modules, too

Each line on stdin is a list of programs as JSON, to run at the same time (the ranks of a training). A
program is `[arguments of python, environment, [file for stdout, file for stderr], folder]`. When all have
ended, a line on stdout has their exit codes.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

LOADED = (
    *("torch", "torch._dynamo", "torch.distributed.nn.functional"),  # for a training
    *("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"),  # for one that is split
    "torchvision.datasets",  # for a plain script
    *("matplotlib.pyplot", "pandas", "psutil", "scipy.optimize", "tqdm"),  # for a comparison
)
SECONDS_FOR_A_PROGRAM = 300


def run(arguments: list[str]) -> int:
    """Do as `python ARGUMENTS` does; return its exit code."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[:1] = folders_of(arguments[0])
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


def folders_of(script: str) -> list[str]:
    """The script's folder, as Python has it, and the top of its checkout: a copy has its own manygpus."""
    folder = Path(script).absolute().parent
    tops = [above for above in (folder, *folder.parents) if (above / "manygpus").is_dir()]
    return [str(path) for path in (folder, *tops[:1])]


def fork(arguments: list[str], environment: dict[str, str], outputs: list[str], folder: str) -> int:
    """Start a program in a process of its own; return the number of that process."""
    process = os.fork()
    if process:
        return process
    signal.alarm(SECONDS_FOR_A_PROGRAM)  # what hangs ends
    for stream, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code = run(arguments)
    # The steps by which Python ends, but for taking PyTorch apart, which takes a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream:
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    for module in (*LOADED, *sys.argv[1:]):
        importlib.import_module(module)
    gc.freeze()  # or a collection in a fork would copy all pages that it shares with this process
    for line in sys.stdin:
        processes = [fork(*program) for program in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        print(json.dumps(codes), flush=True)
