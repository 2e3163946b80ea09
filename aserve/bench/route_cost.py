"""Measures what a router costs, beside a bare relay of bytes and beside another router.

All of them stand before the same stand-in, which answers at once, and take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import cast

import aiohttp
import msgspec

from aserve.bench.cpu_time import tree_cpu_s
from aserve.bench.options import RouteOptions
from aserve.bench.result import median, percentile
from aserve.bench.server_start import RunningServer, serving
from aserve.errors import ConfigError
from aserve.host.threads import new_event_loop

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "a", "max_tokens": 0}  # max_tokens: the number of chunks
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"cmpl-0","choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
CHUNKS_S = 4e-3  # between two chunks of a stream, so that each is sent on its own
READY_S = 30.0
POLL_S = 0.05


class RouterCost(msgspec.Struct, frozen=True):
    """Medians of the turns. `cpu_us_per_request` is of small requests at the same time."""

    router: str
    added_p50_us: float
    added_p99_us: float
    requests_per_s: float
    cpu_us_per_request: float
    cpu_us_per_chunk: float


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    address: str
    pid: int


async def measure_costs(options: RouteOptions) -> list[RouterCost]:
    """Returns the costs of a bare relay, of aserve's router, and of another one if it is given."""
    if (options.other is None) != (options.other_pid is None):
        raise ConfigError("--other needs --other-pid, the process whose CPU time is measured")
    async with AsyncExitStack() as stack:
        server = await asyncio.start_server(_answer, "127.0.0.1", options.stand_in_port)
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        direct = f"http://127.0.0.1:{port}"
        own = await stack.enter_async_context(routing("round_robin", [direct]))
        relay = await stack.enter_async_context(_relaying(port))
        measured = [relay, Measured("aserve", own.address, own.pid)]
        connector = aiohttp.TCPConnector(limit=0)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        if options.other is not None and options.other_pid is not None:
            measured.append(await _other(client, options.other, options.other_pid))
        found: dict[str, list[RouterCost]] = {each.name: [] for each in measured}
        for _ in range(options.repeats):
            for each in measured:
                found[each.name].append(await _cost(client, direct, each, options))
    return [_medians(turns) for turns in found.values()]


async def _other(client: aiohttp.ClientSession, address: str, pid: int) -> Measured:
    """Waits until another router answers. It finds the stand-in only now."""
    deadline_s = time.monotonic() + READY_S
    while True:
        try:
            await _requests(client, address.rstrip("/"), 1)
        except aiohttp.ClientError as error:
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"--other {address} has answered no request for {READY_S:g} seconds "
                    f"({error}): is --stand-in-port its worker?"
                ) from None
            await asyncio.sleep(POLL_S)
        else:
            return Measured("other", address.rstrip("/"), pid)


def _medians(turns: Sequence[RouterCost]) -> RouterCost:
    fields = RouterCost.__struct_fields__[1:]
    values = {name: median([getattr(turn, name) for turn in turns]) for name in fields}
    return RouterCost(turns[0].router, **values)


async def _cost(
    client: aiohttp.ClientSession, direct: str, router: Measured, options: RouteOptions
) -> RouterCost:
    added = await _added_us(client, direct, router.address, options.requests)
    share = options.requests // options.streams or 1
    cpu_s, start_s = tree_cpu_s(router.pid), time.perf_counter()
    await asyncio.gather(
        *(_requests(client, router.address, share) for _ in range(options.streams))
    )
    wall_s, num_requests = time.perf_counter() - start_s, share * options.streams
    request_s = tree_cpu_s(router.pid) - cpu_s
    body = BODY | {"max_tokens": options.chunks, "stream": True}
    cpu_s = tree_cpu_s(router.pid)
    streams = [_stream(client, router.address, body) for _ in range(options.streams)]
    num_chunks = sum(await asyncio.gather(*streams))
    chunk_s = tree_cpu_s(router.pid) - cpu_s
    return RouterCost(
        router=router.name,
        added_p50_us=median(added),
        added_p99_us=percentile(added, 99),
        requests_per_s=num_requests / wall_s,
        cpu_us_per_request=1e6 * request_s / num_requests,
        cpu_us_per_chunk=1e6 * chunk_s / num_chunks,
    )


@contextlib.asynccontextmanager
async def _relaying(port: int) -> AsyncIterator[Measured]:
    """Runs the bare relay in a process of its own while the context is open."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_relay, args=(port, there), daemon=True)
    process.start()
    there.close()  # else the end of the process would not end the wait
    try:
        if not await asyncio.to_thread(here.poll, READY_S):
            raise TimeoutError(f"the bare relay did not start within {READY_S:g} seconds")
        assert process.pid is not None
        yield Measured("bare relay", f"http://127.0.0.1:{here.recv()}", process.pid)
    finally:
        here.close()
        process.kill()
        process.join()


def _relay(port: int, pipe: Pipe) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            server = await loop.create_server(lambda: _Relay(port, group), "127.0.0.1", 0)
            pipe.send(server.sockets[0].getsockname()[1])
            await server.serve_forever()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


class _Relay(asyncio.Protocol):
    """Passes bytes on in both directions, unread: the least that a router in Python can cost."""

    def __init__(
        self, port: int, group: asyncio.TaskGroup, peer: asyncio.Transport | None = None
    ) -> None:
        self._port = port
        self._group = group
        self._peer = peer
        self._waiting: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._peer is None:
            self._group.create_task(self._connect())

    def data_received(self, data: bytes) -> None:
        if self._peer is None:
            self._waiting.append(data)
        else:
            self._peer.write(data)

    def connection_lost(self, _: Exception | None) -> None:
        if self._peer is not None:
            self._peer.close()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        upstream = _Relay(self._port, self._group, self._transport)
        peer, _ = await loop.create_connection(lambda: upstream, "127.0.0.1", self._port)
        self._peer = peer
        peer.writelines(self._waiting)


@contextlib.asynccontextmanager
async def routing(policy: str, addresses: Sequence[str]) -> AsyncIterator[RunningServer]:
    """Runs a router while the context is open, and waits until it has a replica."""
    async with serving(*addresses, "--policy", policy, program=("aserve", "route")) as router:
        async with asyncio.timeout(READY_S):
            await _until_ready(router.address, len(addresses))
        yield router


async def _until_ready(address: str, num_replicas: int) -> None:
    num_ready = 0
    async with aiohttp.ClientSession() as client:
        while num_ready < num_replicas:
            await asyncio.sleep(POLL_S)
            async with client.get(f"{address}/health") as answer:
                num_ready = (await answer.json())["replicas"]


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves one connection of the stand-in; `max_tokens` is the number of chunks."""
    # WHY: the end of the bench cancels it, of which asyncio would write a traceback.
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"POST "):
                writer.write(OK if head.startswith(b"GET /health ") else NOT_FOUND)
                continue
            size = int(head.lower().partition(b"content-length: ")[2].split()[0])
            num_chunks = msgspec.json.decode(await reader.readexactly(size))["max_tokens"]
            writer.write(STREAM if num_chunks else OK)
            for _ in range(num_chunks):
                await asyncio.sleep(CHUNKS_S)
                writer.write(CHUNK)
            writer.write(b"0\r\n\r\n" if num_chunks else b"")
    writer.close()


async def _added_us(
    client: aiohttp.ClientSession, direct: str, routed: str, number: int
) -> list[float]:
    """Returns the differences of pairs of requests: one sent directly, one through the router."""
    added = []
    for _ in range(number):
        times = []
        for address in (direct, routed):
            start_s = time.perf_counter()
            await _requests(client, address, 1)
            times.append(time.perf_counter() - start_s)
        added.append(1e6 * (times[1] - times[0]))
    return added


async def _requests(client: aiohttp.ClientSession, address: str, number: int) -> None:
    for _ in range(number):
        async with client.post(address + PATH, json=BODY) as answer:
            answer.raise_for_status()
            await answer.read()


async def _stream(client: aiohttp.ClientSession, address: str, body: dict[str, object]) -> int:
    """Returns the number of chunks."""
    num_events = 0
    async with client.post(address + PATH, json=body) as answer:
        answer.raise_for_status()
        async for piece in answer.content.iter_any():
            num_events += piece.count(b"data: ")
    return num_events
