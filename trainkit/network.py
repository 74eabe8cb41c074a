"""The network interfaces of this machine, and its ports."""

import random
import socket
from contextlib import suppress


def interface(address: str) -> str:
    """The interface that has this IP address, or "unknown"."""
    import psutil  # the doctor can do without

    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address.partition("%")[0] for entry in addresses]:
            return name
    return "unknown"


def free_port() -> int:
    """A free port below those that the system hands out by itself (32768 and up)."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
