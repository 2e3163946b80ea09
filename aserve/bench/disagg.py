"""`aserve bench disagg` measures prefill and decode in two servers beside one server.

Three figures: how much later the first token of a long prompt comes when its KV is fetched; how
fast the bytes of blocks travel between two processes, beside a plain socket and a plain copy; and
how regularly the tokens of running streams come while long prompts arrive.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from multiprocessing.connection import Connection as Pipe

import aiohttp
import msgspec
import numpy as np
from msgspec.structs import astuple

from aserve.bench.cpu_time import run_when_idle
from aserve.bench.options import DisaggBenchOptions
from aserve.bench.result import BenchResult, Table, median, percentile
from aserve.bench.server_start import serving
from aserve.bench.streamed import Answer, send_request
from aserve.config import Resolved
from aserve.disagg.carriers import Inlets, Outlets, receive_values
from aserve.disagg.wire import Block, Choice, Connection, Offers
from aserve.errors import BugError
from aserve.host.threads import new_event_loop

PATH = "/v1/completions"
COPY_BYTES = 4 << 20
MANY = 32  # blocks of a copy, so that no processor's cache has them
NOTE = (
    "added_ttft_ms: the first token from two servers, less that from one, prompts in turns. "
    "Transfers count their checksums. Lines without prompts are what the machine gives. The server "
    "that prefills runs when no other process wants its core, as if it had a machine of its own. "
    "Goals: a transfer at 0.7 of a plain socket's rate, and an ITL p99 of at most 1.3 medians from "
    "two servers while prompts arrive."
)


class CarrierRate(msgspec.Struct, frozen=True):
    carrier: str
    gb_per_s: float
    of_socket: float
    of_copy: float


class Jitter(msgspec.Struct, frozen=True):
    """The times between the tokens of streams: the median, and the p99 in medians. The server's are
    those at which it had the tokens, before anything was written to the client."""

    servers: str
    prompts: int  # long ones that were computed meanwhile
    client_ms: float
    client_p99: float
    server_ms: float
    server_p99: float


class Servers(msgspec.Struct, frozen=True):
    ttft_one_ms: float
    ttft_two_ms: float
    added_ttft_ms: float
    itls: list[Jitter]


def run(options: DisaggBenchOptions, _resolved: Resolved) -> BenchResult:
    rates = measure_rates(options)
    tables = [_table("bytes of blocks between two processes", rates)]
    if not options.prompts:
        return BenchResult({"rates": rates}, tuple(tables), (NOTE,))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        found = runner.run(_measure_servers(options))
    names = ("ttft_one_ms", "ttft_two_ms", "added_ttft_ms")
    times = [getattr(found, name) for name in names]
    tables.append(Table("the first token", names, [[f"{value:,.2f}" for value in times]]))
    tables.append(_table("times between tokens", found.itls))
    return BenchResult({**msgspec.structs.asdict(found), "rates": rates}, tuple(tables), (NOTE,))


def _table(title: str, lines: Sequence[CarrierRate | Jitter]) -> Table:
    rows = [
        [f"{value:.2f}" if isinstance(value, float) else f"{value}" for value in astuple(line)]
        for line in lines
    ]
    return Table(title, lines[0].__struct_fields__, rows)


# ------------------------------------------------------------ bytes


def measure_rates(options: DisaggBenchOptions) -> list[CarrierRate]:
    """The best of `repeats` for each carrier, in turns with a socket and a copy."""
    num_blocks = max(1, (options.transfer_mib << 20) // COPY_BYTES)
    best: dict[str, float] = {}
    ways: dict[str, Callable[[int], float]] = {"socket": _socket_s, "copy": _copy_s}
    carriers = options.carriers.split(",")
    ways |= {carrier: functools.partial(_carrier_s, carrier) for carrier in carriers}
    for _ in range(options.repeats):
        for name, seconds_of in ways.items():
            rate = num_blocks * COPY_BYTES / seconds_of(num_blocks) / 1e9
            best[name] = max(rate, best.get(name, 0.0))
    rates = [("socket", best["socket"]), ("copy", best["copy"])]
    rates += [(carrier, best[carrier]) for carrier in carriers]
    return [
        CarrierRate(name, rate, rate / best["socket"], rate / best["copy"]) for name, rate in rates
    ]


def _copy_s(num_blocks: int) -> float:
    source, target = (np.ones((MANY, COPY_BYTES), np.uint8) for _ in range(2))
    start_s = time.perf_counter()
    for number in range(num_blocks):
        np.copyto(target[number % MANY], source[number % MANY])
    return time.perf_counter() - start_s


def _socket_s(num_blocks: int) -> float:
    return _received_s(_send_bytes, num_blocks, _read_bytes)


def _carrier_s(carrier: str, num_blocks: int) -> float:
    inlets = Inlets(carrier)
    with closing(inlets):
        read = functools.partial(_read_blocks, inlets)
        return _received_s(functools.partial(_send_blocks, carrier), num_blocks, read)


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


def _send_blocks(carrier: str, pipe: Pipe, num_blocks: int) -> None:
    outlets = Outlets(carrier)
    values = np.ones(COPY_BYTES, np.uint8).data
    connection = Connection(_accepted(pipe))
    with closing(outlets), closing(connection), closing(outlets.open(connection)) as outlet:
        for _ in range(num_blocks):
            outlet.send(range(1), range(1), values)
        outlet.end()


def _read_blocks(inlets: Inlets, sock: socket.socket, num_blocks: int) -> None:
    connection = Connection(sock)
    offers = connection.receive()
    if not isinstance(offers, Offers):
        raise BugError(f"{offers} is no offer")
    inlet = inlets.choose(offers)
    connection.send(Choice(inlet.carrier))
    for _ in range(num_blocks):
        block = connection.receive()
        if not isinstance(block, Block):
            raise BugError(f"{block} is no block")
        receive_values(connection, inlet, block)


# ------------------------------------------------------------ servers


async def _measure_servers(options: DisaggBenchOptions) -> Servers:
    common = ("--grammar-workers", "0", "--threads", "1", *options.server_options.split())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(serving(*common))
        role = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", port)
        prefill = await stack.enter_async_context(serving(*common, *role))
        role = ("--disaggregation-mode", "decode", "--disaggregation-prefill", f"127.0.0.1:{port}")
        pair = await stack.enter_async_context(serving(*common, *role))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        ttfts: dict[str, list[float]] = {one.address: [], pair.address: []}
        for number in range(-2, options.prompts):  # two warm each server up
            for address, times in ttfts.items():
                answer = await _ask(client, address, _body(number, options.prompt_len, 2))
                times += [] if number < 0 else [1e3 * (answer.ttft_s or 0.0)]
        run_when_idle(prefill.pid)
        measure = functools.partial(_jitter, client, options=options)
        jitters = [
            await measure(address, name=name, has_prompts=has_prompts, turn=turn)
            for turn in range(options.turns)
            for has_prompts in (False, True)
            for name, address in zip(("one", "two"), ttfts, strict=True)
        ]
    alone, fetched = (median(times) for times in ttfts.values())
    return Servers(alone, fetched, fetched - alone, jitters)


async def _jitter(
    client: aiohttp.ClientSession,
    address: str,
    *,
    name: str,
    has_prompts: bool,
    turn: int,
    options: DisaggBenchOptions,
) -> Jitter:
    """Measures the times between the tokens of streams, while prompts arrive one after the other or
    without any."""
    first, num_prompts = 10**7 * (1 + 2 * turn + has_prompts), 0
    async with asyncio.TaskGroup() as group:
        streams = [
            group.create_task(_ask(client, address, _body(first + n, 8, options.output_len)))
            for n in range(options.streams)
        ]
        while has_prompts and not all(stream.done() for stream in streams):
            num_prompts += 1
            number = first + options.streams + num_prompts
            await _ask(client, address, _body(number, options.prompt_len, 1))
    answers = [stream.result() for stream in streams]
    itls_ms = [1e3 * itl_s for answer in answers for itl_s in answer.itls_s]
    own = [answer.timings for answer in answers if answer.timings is not None]
    client_ms, server_ms = median(itls_ms), median([each.itl_p50_ms for each in own])
    return Jitter(
        *(name, num_prompts, client_ms, percentile(itls_ms, 99) / client_ms),
        *(server_ms, median([each.itl_p99_ms for each in own]) / server_ms),
    )


async def _ask(client: aiohttp.ClientSession, address: str, body: dict[str, object]) -> Answer:
    answer = await send_request(client, address + PATH, body)
    if answer.error:
        raise BugError(f"a request failed: {answer.error}")
    return answer


def _body(number: int, num_tokens: int, max_tokens: int) -> dict[str, object]:
    """A prompt of token ids that no other one begins with."""
    ids = np.random.default_rng(abs(number)).integers(300, 2000, num_tokens).tolist()
    return {
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "include_timings": True},
    }
