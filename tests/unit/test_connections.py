"""Whether ranks have met, by the TCP connections of real processes."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from manygpus.monitor.connections import HOST, NOBODY, RANK, Meetings

# It hears others, connects to itself, or calls a port. It prints the port on which it hears, if it does, and
# an empty line for each of its ends of a connection.
TALKS = """
import socket
import sys

role, *ports = sys.argv[1:]
connections = []
if role == "calls":
    print(flush=True)
    connections.append(socket.create_connection(("localhost", ports[0])))
    print(flush=True)
else:
    server = socket.create_server(("localhost", 0))
    port = server.getsockname()[1]
    print(port, flush=True)
    if role == "itself":
        connections.append(socket.create_connection(("localhost", port)))
        print(flush=True)
    while True:
        connections.append(server.accept()[0])
        print(flush=True)
sys.stdin.read()
"""


class Talker:
    """A process with connections, and the port on which it hears others."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-c", TALKS, *arguments]
        self.process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.port = self.process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for_connection(self) -> None:
        self.process.stdout.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def talkers() -> Iterator[list[Talker]]:
    """A list of processes, which end with the test."""
    started: list[Talker] = []
    yield started
    for talker in started:
        talker.end()


def test_who_has_met_whom(talkers: list[Talker]) -> None:
    """Processes connected to another, to themselves, to one that is not the job's, and to nobody."""

    def start(*arguments: str) -> Talker:
        talkers.append(Talker(*arguments))
        return talkers[-1]

    first, agent, stranger, by_itself = start("hears"), start("hears"), start("hears"), start("itself")
    second = start("calls", first.port)
    with_agent = start("calls", agent.port)
    with_stranger = start("calls", stranger.port)
    for talker in (first, agent, stranger, second, with_agent, with_stranger):
        talker.wait_for_connection()
    # It is at both ends of its own.
    by_itself.wait_for_connection()
    by_itself.wait_for_connection()
    ranks = [first, second, with_agent, with_stranger, by_itself]
    families = {rank: [talker.pid] for rank, talker in enumerate(ranks)}
    meetings = Meetings()
    met = {0: RANK, 1: RANK, 2: NOBODY, 3: HOST, 4: NOBODY}
    assert meetings.look(families, others=[agent.pid]) == met
    second.process.kill()
    second.process.wait()
    # It has met it all the same.
    assert meetings.look(families, others=[agent.pid]) == met
