"""`aserve bench route` measures the router: its own cost, and what cache-aware routing saves.

The cost is that of `route_cost`. Then two real servers with the bundled model get prompts that
share prefixes, through a router of each policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp
import msgspec
from msgspec.structs import asdict, astuple

from aserve.bench.options import RouteOptions
from aserve.bench.result import BenchResult, Table, median, percentile
from aserve.bench.route_cost import PATH, RouterCost, measure_costs, routing
from aserve.bench.server_start import serving
from aserve.config import Resolved
from aserve.host.threads import new_event_loop

POLICIES = ("round_robin", "cache_aware")
SERVER_OPTIONS = ("--grammar-workers", "0", "--threads", "1")
NOTE = (
    "added_p50_us: a small request through the router, less one that is sent directly, in turns. "
    "The bare relay passes bytes on unread: what the machine itself costs. Goals: 500 us, and 30 "
    "us of CPU per streamed chunk. hit_rate: cached tokens of all prompt tokens, as the servers "
    "report them."
)


class PolicyFigures(msgspec.Struct, frozen=True):
    policy: str
    hit_rate: float
    ttft_p50_ms: float
    ttft_p99_ms: float


def run(options: RouteOptions, _resolved: Resolved) -> BenchResult:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        costs = runner.run(measure_costs(options))
        policies = runner.run(_measure_policies(options)) if options.groups else []
    tables = (
        Table(
            "cost of a router",
            RouterCost.__struct_fields__,
            [[name, *(f"{value:,.1f}" for value in rest)] for name, *rest in map(astuple, costs)],
        ),
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
    own = next(cost for cost in costs if cost.router == "aserve")
    beside = [cost for cost in costs if cost is not own]
    figures = {**asdict(own), "beside": beside, "policies": policies}
    return BenchResult(figures, tables, (NOTE,))


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
