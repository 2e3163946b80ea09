"""Lets ranks find each other: by files on one machine, by a store that rank 0 serves on several.

Both are stores of torch.distributed. That of several machines is a TCPStore, on the address at
which the machines join the engine; each group has a prefix of its own in it.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]  # it has them
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from aserve.parallel.topology import Coordinates, RankLost, family_of

LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 16
DOORS = "doors"


def host_of(place: Coordinates) -> str:
    """The address at which the other ranks reach this one."""
    return LOOPBACK if place.cluster is None else place.cluster.host


def store_of(place: Coordinates, name: str) -> Store:
    """Raises RankLost if the store of several machines is not there."""
    timeout, cluster = timedelta(seconds=place.meet_s), place.cluster
    if cluster is None:
        store: Store = FileStore(f"{place.store}-{name}", place.num_ranks)
        store.set_timeout(timeout)
        return store
    address = (cluster.store_host, cluster.store_port)
    try:
        shared = TCPStore(*address, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise RankLost(f"rank {place.rank} finds no store of the ranks: {error}") from error
    return PrefixStore(f"{Path(place.store).name}-{name}", shared)


def serve_store(listener: socket.socket) -> Store:
    """Serves the store of several machines on a listening socket, as long as the result lives."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        *(host, port),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class Door:
    """A listening socket for one other rank: a Unix socket on one machine. A rank of another
    machine shows a token, which it finds beside the address in the store."""

    def __init__(self, place: Coordinates, other: int) -> None:
        self._token, self._meet_s = b"", place.meet_s
        if place.shares_node(other):
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(_file_of(place, place.rank))
            self._listener.listen(1)
            return
        host = host_of(place)
        self._listener = socket.create_server((host, 0), family=family_of(host))
        token, port = secrets.token_hex(TOKEN_BYTES), self._listener.getsockname()[1]
        self._token = token.encode()
        store_of(place, DOORS).set(f"{place.rank}", f"{token} {port} {host}")

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def accepted(self) -> socket.socket:
        """Waits for the other rank. Raises TimeoutError."""
        self._listener.settimeout(self._meet_s)
        while True:
            end, _ = self._listener.accept()
            if self._is_known(end):
                return end
            end.close()

    def _is_known(self, end: socket.socket) -> bool:
        end.settimeout(self._meet_s)
        try:
            shown = end.recv(len(self._token), socket.MSG_WAITALL) if self._token else b""
        except OSError:
            return False
        return secrets.compare_digest(shown, self._token)


def enter(place: Coordinates, other: int) -> socket.socket:
    """Connects to the door of another rank. Raises RankLost."""
    try:
        return _entered(place, other)
    except (OSError, RuntimeError) as error:
        raise RankLost(f"rank {other} does not listen: {error}") from error


def _entered(place: Coordinates, other: int) -> socket.socket:
    if not place.shares_node(other):
        token, port, host = store_of(place, DOORS).get(f"{other}").decode().split(" ")
        end = socket.create_connection((host, int(port)), timeout=place.meet_s)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(token.encode())
        return end
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(_file_of(place, other))
    except OSError:
        end.close()
        raise
    return end


def _file_of(place: Coordinates, rank: int) -> str:
    return f"{place.store}.pipe{rank}"
