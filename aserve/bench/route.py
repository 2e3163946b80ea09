"""`aserve bench route` measures the router: its own cost, and what cache-aware routing saves.

The cost is measured before a stand-in that answers at once: the latency that the router adds to a
small request, its requests per second, and its CPU time per streamed chunk. Then two real servers
with the bundled model get prompts that share prefixes, through a router of each policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import aiohttp
import msgspec

from aserve.bench.cpu_time import tree_cpu_s
from aserve.bench.options import RouteOptions
from aserve.bench.result import BenchResult, Table, median, percentile
from aserve.bench.server_start import RunningServer, serving
from aserve.config import Resolved
from aserve.host.threads import new_event_loop

POLICIES = ("round_robin", "cache_aware")
SERVER_OPTIONS = ("--grammar-workers", "0", "--threads", "1")
PATH = "/v1/completions"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"cmpl-0","choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
CHUNKS_S = 4e-3  # between two chunks of a stream, so that each is sent on its own
READY_S = 30.0
POLL_S = 0.05
NOTE = (
    "added_p50_us: a small request through the router, less one that is sent directly, in turns. "
    "Goals: 500 us, and 30 us of CPU per streamed chunk. hit_rate: cached tokens of all prompt "
    "tokens, as the servers report them."
)


class PolicyFigures(msgspec.Struct, frozen=True):
    policy: str
    hit_rate: float
    ttft_p50_ms: float
    ttft_p99_ms: float


def run(options: RouteOptions, _resolved: Resolved) -> BenchResult:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        cost = runner.run(_measure_cost(options))
        policies = runner.run(_measure_policies(options)) if options.groups else []
    tables = (
        Table("cost of the router", tuple(cost), [[f"{value:,.1f}" for value in cost.values()]]),
        Table(
            "prompts with shared prefixes on two servers",
            PolicyFigures.__struct_fields__,
            [
                [
                    one.policy,
                    f"{one.hit_rate:.3f}",
                    f"{one.ttft_p50_ms:.1f}",
                    f"{one.ttft_p99_ms:.1f}",
                ]
                for one in policies
            ],
        ),
    )
    return BenchResult({**cost, "policies": policies}, tables, (NOTE,))


async def _measure_cost(options: RouteOptions) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0)
        stack.callback(server.close)
        direct = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        router = await stack.enter_async_context(routing("round_robin", [direct]))
        connector = aiohttp.TCPConnector(limit=0)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        added = await _added_us(client, direct, router.address, options.requests)
        start_s = time.perf_counter()
        share = options.requests // options.streams or 1
        await asyncio.gather(
            *(_requests(client, router.address, share) for _ in range(options.streams))
        )
        rate = share * options.streams / (time.perf_counter() - start_s)
        cpu_s = tree_cpu_s(router.pid)
        body = {"prompt": "a", "max_tokens": options.chunks}
        streams = [_stream(client, router.address, body) for _ in range(options.streams)]
        num_chunks = sum(await asyncio.gather(*streams))
        cpu_us = 1e6 * (tree_cpu_s(router.pid) - cpu_s) / num_chunks
    return {
        "added_p50_us": median(added),
        "added_p99_us": percentile(added, 99),
        "requests_per_s": rate,
        "cpu_us_per_chunk": cpu_us,
        "chunks": float(num_chunks),
    }


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
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
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
        async with client.post(address + PATH, json={"prompt": "a", "max_tokens": 0}) as answer:
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


async def _measure_policies(options: RouteOptions) -> list[PolicyFigures]:
    """Runs each policy before the same two servers, with prompts that no policy before it sent."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(*SERVER_OPTIONS)) for _ in range(2)]
        addresses = [server.address for server in servers]
        return [await _measure_policy(name, addresses, options) for name in POLICIES]


async def _measure_policy(
    policy: str, addresses: Sequence[str], options: RouteOptions
) -> PolicyFigures:
    """Sends `turns` prompts with each of `groups` prefixes. The order changes with each turn, so
    that round robin does not keep a group on one server by chance.
    """
    ttfts = []
    num_cached = num_tokens = 0
    async with routing(policy, addresses) as router, aiohttp.ClientSession() as client:
        for turn in range(options.turns):
            for number in range(options.groups):
                group = (number + turn) % options.groups
                prefix = f"{policy} {group}: " + f"story {group} of a long day " * 16
                ttft_s, usage = await _timed(client, router.address, f"{prefix} turn {turn}")
                ttfts.append(1e3 * ttft_s)
                num_tokens += usage.prompt_tokens
                num_cached += usage.prompt_tokens_details.cached_tokens
    hit_rate = num_cached / num_tokens
    return PolicyFigures(policy, hit_rate, median(ttfts), percentile(ttfts, 99))


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Last(msgspec.Struct):
    usage: _Usage | None = None


async def _timed(client: aiohttp.ClientSession, address: str, prompt: str) -> tuple[float, _Usage]:
    """Returns the time to the first token, and the usage at the end of the stream."""
    body = {
        "model": "aserve-tiny",
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start_s = time.perf_counter()
    first_s, usage = 0.0, None
    async with client.post(address + PATH, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            data = line.removeprefix(b"data: ").strip()
            first_s = first_s or time.perf_counter() - start_s
            if data.startswith(b"{"):
                usage = msgspec.json.decode(data, type=_Last).usage or usage
    assert usage is not None
    return first_s, usage
