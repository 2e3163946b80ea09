"""`aserve bench disagg` measures prefill and decode in two servers beside one server.

Three figures: how much later the first token of a long prompt comes when its KV is fetched; how
fast the bytes of blocks travel between two processes, beside a plain socket and a plain copy; and
how regularly the tokens of running streams come while long prompts arrive (disagg_servers.py).
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection as Pipe

import msgspec
import numpy as np
from msgspec.structs import astuple

from aserve.bench.disagg_servers import (
    FirstToken,
    Jitter,
    Loop,
    check_names,
    measure_servers,
)
from aserve.bench.options import DisaggBenchOptions
from aserve.bench.result import BenchResult, Table
from aserve.config import Resolved
from aserve.disagg.transports import BlockReaders, BlockSenders, receive_values
from aserve.disagg.wire import Block, Choice, Connection, Offers
from aserve.errors import BugError
from aserve.host.threads import new_event_loop

COPY_BYTES = 4 << 20
MANY = 32  # blocks of a copy, so that no processor's cache has them
NOTE = (
    "added_ms: the first token from two servers, less that from one, prompts in turns. Transfers "
    "count their checksums. Streams beside nothing show what the machine gives, and streams beside "
    "a process that copies memory what it gives to one of two processes. That process and the "
    "server that prefills run when no other process wants their core, as if they had a machine of "
    "their own. A plain loop reads memory on one core while no server works: its p99 is the "
    "machine's. A measurement ends after --seconds with what came until then. Goals: a transfer at "
    "0.7 of a plain socket's rate, and an ITL p99 of at most 1.3 medians from two servers while "
    "prompts arrive."
)


class TransportRate(msgspec.Struct, frozen=True):
    transport: str
    gb_per_s: float
    of_socket: float
    of_copy: float


def run(options: DisaggBenchOptions, _resolved: Resolved) -> BenchResult:
    check_names(options)
    rates = measure_rates(options)
    tables = [_table("bytes of blocks between two processes", rates)]
    if not options.prompts:
        return BenchResult({"rates": rates}, tuple(tables), (NOTE,))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        found = runner.run(measure_servers(options))
    tables.append(_table("the first token of a long prompt", found.first_tokens))
    tables.append(_table("times between tokens", found.itls))
    tables.append(_table("times of a plain loop, between these turns", found.loops))
    return BenchResult({**msgspec.structs.asdict(found), "rates": rates}, tuple(tables), (NOTE,))


def _table(title: str, lines: Sequence[TransportRate | FirstToken | Jitter | Loop]) -> Table:
    rows = [
        [f"{value:.2f}" if isinstance(value, float) else f"{value}" for value in astuple(line)]
        for line in lines
    ]
    return Table(title, lines[0].__struct_fields__, rows)


# ------------------------------------------------------------ bytes


def measure_rates(options: DisaggBenchOptions) -> list[TransportRate]:
    """The best of `repeats` for each transport, in turns with a socket and a copy."""
    num_blocks = max(1, (options.transfer_mib << 20) // COPY_BYTES)
    best: dict[str, float] = {}
    ways: dict[str, Callable[[int], float]] = {"socket": _socket_s, "copy": _copy_s}
    transports = options.transports.split(",")
    ways |= {transport: functools.partial(_transport_s, transport) for transport in transports}
    for _ in range(options.repeats):
        for name, seconds_of in ways.items():
            rate = num_blocks * COPY_BYTES / seconds_of(num_blocks) / 1e9
            best[name] = max(rate, best.get(name, 0.0))
    rates = [("socket", best["socket"]), ("copy", best["copy"])]
    rates += [(transport, best[transport]) for transport in transports]
    return [
        TransportRate(name, rate, rate / best["socket"], rate / best["copy"])
        for name, rate in rates
    ]


def _copy_s(num_blocks: int) -> float:
    source, target = (np.ones((MANY, COPY_BYTES), np.uint8) for _ in range(2))
    start_s = time.perf_counter()
    for number in range(num_blocks):
        np.copyto(target[number % MANY], source[number % MANY])
    return time.perf_counter() - start_s


def _socket_s(num_blocks: int) -> float:
    return _received_s(_send_bytes, num_blocks, _read_bytes)


def _transport_s(transport: str, num_blocks: int) -> float:
    block_readers = BlockReaders(transport)
    with closing(block_readers):
        read = functools.partial(_read_blocks, block_readers)
        return _received_s(functools.partial(_send_blocks, transport), num_blocks, read)


def _received_s(
    send: Callable[[Pipe, int], None], num_blocks: int, read: Callable[[socket.socket, int], None]
) -> float:
    """Returns the seconds from the first byte that another process sends to the last one."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs, num_blocks), daemon=True)
    process.start()
    theirs.close()
    with ours, socket.create_connection(("127.0.0.1", ours.recv())) as sock:
        sock.recv(1)
        start_s = time.perf_counter()
        read(sock, num_blocks)
        seconds = time.perf_counter() - start_s
    process.join()
    return seconds


def _accepted(pipe: Pipe) -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        accepted, _ = listening.accept()
    accepted.sendall(b"!")
    return accepted


def _send_bytes(pipe: Pipe, num_blocks: int) -> None:
    values = np.ones(COPY_BYTES, np.uint8).data
    with _accepted(pipe) as sock:
        for _ in range(num_blocks):
            sock.sendall(values)


def _read_bytes(sock: socket.socket, num_blocks: int) -> None:
    values = memoryview(bytearray(COPY_BYTES))
    for _ in range(num_blocks):
        Connection(sock).fill(values)


def _send_blocks(transport: str, pipe: Pipe, num_blocks: int) -> None:
    block_senders = BlockSenders(transport)
    values = np.ones(COPY_BYTES, np.uint8).data
    connection = Connection(_accepted(pipe))
    with (
        closing(block_senders),
        closing(connection),
        closing(block_senders.open(connection)) as block_sender,
    ):
        for _ in range(num_blocks):
            block_sender.send(range(1), range(1), values)
        block_sender.end()


def _read_blocks(block_readers: BlockReaders, sock: socket.socket, num_blocks: int) -> None:
    connection = Connection(sock)
    offers = connection.receive()
    if not isinstance(offers, Offers):
        raise BugError(f"{offers} is no offer")
    block_reader = block_readers.choose(offers)
    connection.send(Choice(block_reader.transport))
    for _ in range(num_blocks):
        block = connection.receive()
        if not isinstance(block, Block):
            raise BugError(f"{block} is no block")
        receive_values(connection, block_reader, block)
