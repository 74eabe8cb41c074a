"""Ranks that do not meet: the reason is told, and what to correct."""

import contextlib
import re
import socket
import threading
from pathlib import Path

import pytest
import torch
from conftest import Script, failed
from forking import free_port
from torch.distributed import TCPStore

SMALL = ("--train-size", 640, "--test-size", 100, "--width", 4, "--precision", "fp32")


def alone_at(address: str, port: int | str, rank: int = 1, size: int = 2) -> dict[str, str]:
    """The environment of a rank that nobody else comes to meet."""
    place = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": size, "RANK": rank}
    return {name: str(value) for name, value in (place | {"LOCAL_RANK": rank}).items()}


# Of no machine (RFC 5737), and no name (RFC 6761).
NO_MACHINE, NO_NAME = "192.0.2.7", "nowhere.invalid"
ALONE = {
    "no such name": (alone_at(NO_NAME, 1), f"name {NO_NAME} cannot be resolved.* correct MASTER_ADDR"),
    "nobody listens": (alone_at("localhost", free_port()), "nobody listens there.* rank 0"),
    "another machine": (alone_at(NO_MACHINE, free_port(), rank=0), f"another machine .{NO_MACHINE}"),
    "a rank is missing": (alone_at("localhost", free_port(), rank=0), "not all came.* rank 1 is missing"),
    "no port": (alone_at("localhost", "abc"), "correct MASTER_PORT"),
    "no such interface": (
        alone_at("localhost", 1, rank=0, size=1) | {"GLOO_SOCKET_IFNAME": "nope0"},
        "no network interface nope0 .* SITE_NETWORK_INTERFACE",
    ),
}


@pytest.mark.parametrize(("place", "reason"), ALONE.values(), ids=ALONE)
def test_why_a_rank_does_not_meet_the_others(
    place: dict[str, str], reason: str, tmp_path: Path, script: Script
) -> None:
    done = script("ddp", *SMALL, "--timeout", 1, "--results-dir", tmp_path, env=place)
    assert re.search(reason, failed(done)), done.stderr


def talk(server: socket.socket) -> None:
    """Say what a store would not, until nobody listens to the port any more."""
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


@pytest.mark.parametrize(("rank", "says"), [(0, "nothing"), (1, "nothing"), (1, "something")])
def test_another_program_has_the_port(rank: int, says: str, tmp_path: Path, script: Script) -> None:
    if says == "something" and torch.__version__ < "2.5":
        pytest.skip("PyTorch 2.4 takes whatever answers for a store")
    with contextlib.closing(socket.create_server(("", 0))) as server:
        if says == "something":
            threading.Thread(target=talk, args=[server], daemon=True).start()
        place = alone_at("localhost", server.getsockname()[1], rank)
        done = script("ddp", *SMALL, "--timeout", 1, "--results-dir", tmp_path, env=place)
    assert re.search("another program .*different MASTER_PORT", failed(done)), done.stderr


@pytest.mark.parametrize("of", ["4 processes", None], ids=["of another size", "that says nothing"])
def test_the_store_of_another_training(of: str | None, tmp_path: Path, script: Script) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    if of:
        store.set("training", of)
    place = alone_at("localhost", store.port)
    done = script("ddp", *SMALL, "--timeout", 5, "--results-dir", tmp_path, env=place)
    assert re.search("to a different training .*2 processes.*different MASTER_PORT", failed(done)), (
        done.stderr
    )
