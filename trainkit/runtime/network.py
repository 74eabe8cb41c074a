"""The ports of this machine."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A free port below those that the system hands out by itself (32768 and up)."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
