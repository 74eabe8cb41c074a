"""Programs that need PyTorch, each in a process of its own, with PyTorch imported once for all of them.

The process that has imported it is fork_server.py. docs/dev/TESTS.md says why.
"""

import itertools
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from manygpus import launchers

SERVER = Path(__file__).with_name("fork_server.py")
# Those of this worker of pytest, each in its turn: a port that is free now may be in use only seconds later,
# when its rank 0 has started, and another worker must not have found it free meanwhile.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = launchers.PORTS[_WORKER % 32 :: 32]
_ports_in_turn = itertools.cycle(random.sample(_PORTS, len(_PORTS)))


class Forking:
    """Runs `python <arguments>` to its end, one at a time or in several ranks; use it in a `forking(...)`."""

    def __init__(self, server: subprocess.Popen, folder: Path) -> None:
        self._server = server
        self._folder = folder

    def run(
        self, *arguments: object, env: dict[str, str], ranks: int | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """With `ranks`, in so many processes that find each other by `env://`.

        Their outputs come one after the other, and the exit code is the first that is not 0.
        """
        environments = [env]
        if ranks:
            meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
            environments = [
                env | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
            ]
        programs = []
        stdouts = []
        stderrs = []
        for number, environment in enumerate(environments):
            stdout = self._empty_file(f"stdout-{number}")
            stderr = self._empty_file(f"stderr-{number}")
            outputs = [str(stdout), str(stderr)]
            programs.append([list(map(str, arguments)), environment, outputs, str(cwd or Path.cwd())])
            stdouts.append(stdout)
            stderrs.append(stderr)
        print(json.dumps(programs), file=self._server.stdin, flush=True)
        codes = json.loads(self._server.stdout.readline())
        return subprocess.CompletedProcess(
            arguments,
            returncode=next(filter(None, codes), 0),
            stdout="".join(path.read_text() for path in stdouts),
            stderr="".join(path.read_text() for path in stderrs),
        )

    def _empty_file(self, name: str) -> Path:
        path = self._folder / name
        path.write_text("")
        return path


def free_port() -> str:
    """A port of this worker that no program has."""
    for port in _ports_in_turn:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            break
    return str(port)


@contextmanager
def forking(folder: Path, env: dict[str, str], modules: Sequence[str] = ()) -> Iterator[Forking]:
    """Start the fork server, which imports `modules`, too; outputs of programs are written to `folder`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, SERVER, *modules], env=env, **pipes) as server:
        yield Forking(server, folder)
