"""Examines what connects ranks, nodes and engines, for `aserve doctor`: links between GPUs, NCCL,
NIXL, Ray, shared memory and the network of this machine."""

from __future__ import annotations

import mmap
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from aserve.host.environment import installed_version
from aserve.messages.base import GIB, MIB

SIZE_BYTES = 16 * MIB  # of a measured copy
REPEATS = 3  # of which the fastest counts
NIXL, RAY = "nixl", "ray"
SMALL_SHARED_BYTES = 64 * MIB  # container runtimes give this much unless told otherwise
SLOW_SHARED, SLOW_LOOPBACK = 1.0, 0.3  # GiB/s


@dataclass(frozen=True, slots=True)
class Links:
    nccl: str | None  # its version; None: torch has none
    nixl: str | None  # its version; None: not installed
    ray: str | None  # its version; None: not installed
    num_gpus: int
    apart: tuple[tuple[int, int], ...]  # GPUs that cannot read each other's memory
    shared_rate: float | None  # GiB/s of a copy into shared memory; None: there is none
    loopback_rate: float | None  # GiB/s through a socket of the loopback interface


def examine_links(shared_folder: str | None) -> Links:
    """Copies some MiB in each way, which takes less than a tenth of a second."""
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(a, b) for a in range(num_gpus) for b in range(num_gpus) if a < b]
    return Links(
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        nixl=installed_version(NIXL),
        ray=installed_version(RAY),
        num_gpus=num_gpus,
        apart=tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
        shared_rate=None if shared_folder is None else _shared_rate(shared_folder),
        loopback_rate=_loopback_rate(),
    )


def describe_links(links: Links) -> Iterator[tuple[str, str]]:
    """Yields the title and the text of each line of the report."""
    if links.num_gpus > 1:
        ways = "all read each other's memory" if not links.apart else f"apart: {links.apart}"
        yield "links", f"{links.num_gpus} GPUs, {ways}"
    yield "NCCL", links.nccl or "not in this build of torch"
    yield "NIXL", links.nixl or "not installed"
    yield "Ray", links.ray or "not installed (aserve[ray] places ranks on several nodes)"
    yield "shared memory", _rate(links.shared_rate)
    yield "loopback", _rate(links.loopback_rate)


def link_advice(links: Links, shared_bytes: int | None) -> Iterator[str]:
    """Yields one sentence for each link that is slow or missing."""
    if links.apart:
        yield (
            f"GPUs {links.apart[0][0]} and {links.apart[0][1]} cannot read each other's memory, so "
            "ranks on them exchange through the host. Put ranks on GPUs with NVLink."
        )
    if links.num_gpus > 1 and links.nccl is None:
        yield "torch is built without NCCL, which joins ranks on GPUs. Install a build that has it."
    if links.num_gpus and links.nixl is None:
        yield "NIXL is not installed, so KV travels between nodes by TCP. pip install aserve[nixl]."
    if shared_bytes is not None and shared_bytes <= SMALL_SHARED_BYTES:
        yield (
            f"Only {shared_bytes // MIB} MiB of shared memory are free, which limits ranks and KV "
            "that travels. In a container, give it more with --shm-size or an emptyDir of Memory."
        )
    if links.shared_rate is not None and links.shared_rate < SLOW_SHARED:
        yield (
            f"Copies into shared memory run at {links.shared_rate:.1f} GiB/s. Ranks and KV that "
            "travels wait for them; other work on this machine may take the bandwidth."
        )
    if links.loopback_rate is not None and links.loopback_rate < SLOW_LOOPBACK:
        yield (
            f"The loopback interface carries {links.loopback_rate:.1f} GiB/s, which replicas and "
            "the transfer of KV by TCP need. Other work may take the processor."
        )


def _rate(gib_per_s: float | None) -> str:
    return "none" if gib_per_s is None else f"{gib_per_s:.1f} GiB/s"


def _fastest(copy: Callable[[], None]) -> float:
    took_s = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        copy()
        took_s.append(time.perf_counter() - began_s)
    return SIZE_BYTES / GIB / min(took_s)


def _shared_rate(folder: str) -> float | None:
    data = bytes(SIZE_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(SIZE_BYTES)
            with mmap.mmap(file.fileno(), SIZE_BYTES) as memory:

                def copy() -> None:
                    memory[:] = data

                return _fastest(copy)
    except OSError:
        return None


def _loopback_rate() -> float | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            sender = socket.create_connection(server.getsockname())
            receiver, _ = server.accept()
    except OSError:
        return None
    with sender, receiver:
        return _fastest(lambda: _carry(sender, receiver))


def _carry(sender: socket.socket, receiver: socket.socket) -> None:
    thread = threading.Thread(target=sender.sendall, args=(bytes(SIZE_BYTES),))
    thread.start()
    into, left = bytearray(MIB), SIZE_BYTES
    while left:
        left -= receiver.recv_into(into, min(left, MIB))
    thread.join()
