"""The servers of `aserve bench disagg`: one, and two of which one prefills and one decodes.

Measures the first token of long prompts, and the times between the tokens of running streams: while
nothing else goes on, while another process copies memory, and while long prompts arrive. The second
is what the machine gives to one of two processes that share its memory and caches, whatever the
other one computes. Between these turns a plain loop reads memory for as long as a step lasts: how
its times vary is the machine's own, and no server on it can do better.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection as Pipe

import aiohttp
import msgspec
import numpy as np

from aserve.bench.cpu_time import run_when_idle
from aserve.bench.options import DisaggBenchOptions
from aserve.bench.result import median, percentile, progress
from aserve.bench.server_start import SERVER, serving
from aserve.bench.streamed import Answer, send_request
from aserve.errors import BugError, ConfigError

PATH = "/v1/completions"
NAMES = {
    "servers": ("one", "two"),
    "beside": ("nothing", "memory", "prompts"),
    "transports": ("tcp", "shm", "nixl"),
}
NUM_WARMUPS = 2
USAGE = {"include_usage": True, "continuous_usage_stats": True, "include_timings": True}
OPENING = "Once upon a time, there was a little robot."
COPIED_BYTES = 256 << 20  # more than any processor's cache
NUM_PARTS = 64  # of that memory, which a plain loop reads one after the other


class FirstToken(msgspec.Struct, frozen=True):
    servers: str
    prompts: int  # computed in turns, as many as there was time for
    ttft_ms: float
    added_ms: float  # to that of the first line


class Jitter(msgspec.Struct, frozen=True):
    """The times between the tokens of streams: the median, and the p99 in medians. The server's are
    those at which it had the tokens, before anything was written to the client."""

    servers: str
    beside: str
    prompts: int  # long ones that were computed meanwhile
    tokens: int
    client_ms: float
    client_p99: float
    server_ms: float
    server_p99: float


class Loop(msgspec.Struct, frozen=True):
    """The times of a loop without any server: the median, and the p99 in medians."""

    rounds: int
    ms: float
    p99: float


class Servers(msgspec.Struct, frozen=True):
    first_tokens: list[FirstToken]
    itls: list[Jitter]
    loops: list[Loop]


def check_names(options: DisaggBenchOptions) -> None:
    for field, names in NAMES.items():
        for name in getattr(options, field).split(","):
            if name not in names:
                raise ConfigError(f"--{field}: {name!r} is none of {', '.join(names)}")


async def measure_servers(options: DisaggBenchOptions) -> Servers:
    names, neighbours = options.servers.split(","), options.beside.split(",")
    num_parts = 1 + options.turns * (len(neighbours) * len(names) + 1)
    async with AsyncExitStack() as stack:
        shown = stack.enter_context(progress("servers", len(names) + num_parts))
        started = {}
        for name in names:
            started[name] = await stack.enter_async_context(START[name](options))
            shown()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        bench = _Bench(client, options)
        first_tokens = await bench.first_tokens({name: at for name, (at, _) in started.items()})
        shown()
        for _, prefills in started.values():
            if prefills:
                run_when_idle(prefills)
        itls, loops = [], []
        for _ in range(options.turns):
            for beside, name in itertools.product(neighbours, names):
                itls.append(await bench.jitter(name, started[name][0], beside))
                shown()
            loops.append(await asyncio.to_thread(read_memory, itls[-1].server_ms, options.seconds))
            shown()
    return Servers(first_tokens, itls, loops)


@contextlib.asynccontextmanager
async def _one(options: DisaggBenchOptions) -> AsyncIterator[tuple[str, int]]:
    """Yields an address, and the process that prefills for it, if that is another one."""
    async with serving(*_common(options), program=_program(options)) as server:
        yield server.address, 0


@contextlib.asynccontextmanager
async def _two(options: DisaggBenchOptions) -> AsyncIterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    mode = "--disaggregation-mode"
    prefills = (*_common(options), mode, "prefill", "--disaggregation-bootstrap-port", port)
    decodes = (*_common(options), mode, "decode", "--disaggregation-prefill", f"127.0.0.1:{port}")
    async with (
        serving(*prefills) as prefill,
        serving(*decodes, program=_program(options)) as server,
    ):
        yield server.address, prefill.pid


START = {"one": _one, "two": _two}


def _common(options: DisaggBenchOptions) -> tuple[str, ...]:
    return ("--grammar-workers", "0", "--threads", "1", *options.server_options.split())


def _program(options: DisaggBenchOptions) -> tuple[str, ...]:
    """Returns the program of a server that answers clients."""
    return ("aserve.bench.paced_server", str(options.sleep_ms)) if options.sleep_ms else SERVER


class _Bench:
    """Sends prompts of token ids that no cache has, and streams that tell stories."""

    def __init__(self, client: aiohttp.ClientSession, options: DisaggBenchOptions) -> None:
        self._client = client
        self._options = options
        self._num_prompts = 0

    async def first_tokens(self, addresses: dict[str, str]) -> list[FirstToken]:
        """Sends prompts to all servers in turns, until there are enough or the time is up. The
        first ones warm the servers up.
        """
        ttfts: dict[str, list[float]] = {name: [] for name in addresses}
        ends_s = time.monotonic() + self._options.seconds
        for number in range(-NUM_WARMUPS, self._options.prompts):
            if number > 0 and time.monotonic() > ends_s:
                break
            for name, address in addresses.items():
                answer = await self._ask(address, self._prompt(), 2)
                ttfts[name] += [] if number < 0 else [1e3 * (answer.ttft_s or 0.0)]
        medians = {name: median(times) for name, times in ttfts.items()}
        least_ms = next(iter(medians.values()))
        return [
            FirstToken(name, len(ttfts[name]), ttft_ms, ttft_ms - least_ms)
            for name, ttft_ms in medians.items()
        ]

    async def jitter(self, name: str, address: str, beside: str) -> Jitter:
        """Measures the times between the tokens of streams beside something else."""
        options, prompts = self._options, list[Answer]()
        more = {"timeout": options.seconds, "temperature": 0.8}
        with copying_memory() if beside == "memory" else contextlib.nullcontext():
            async with asyncio.TaskGroup() as group:
                arriving = group.create_task(self._send_prompts(address, prompts))
                if beside != "prompts":
                    arriving.cancel()
                streams = [
                    self._ask(address, OPENING, options.output_len, seed=number, **more)
                    for number in range(options.streams)
                ]
                answers = await asyncio.gather(*streams)
                arriving.cancel()
        itls_ms = [1e3 * itl_s for answer in answers for itl_s in answer.itls_s]
        own = [answer.timings for answer in answers if answer.timings is not None]
        client_ms, server_ms = median(itls_ms), median([each.itl_p50_ms for each in own])
        return Jitter(
            *(name, beside, len(prompts), sum(each.completion_tokens for each in answers)),
            *(client_ms, percentile(itls_ms, 99) / client_ms),
            *(server_ms, median([each.itl_p99_ms for each in own]) / server_ms),
        )

    async def _send_prompts(self, address: str, answers: list[Answer]) -> None:
        """Sends one prompt after the other until it is cancelled."""
        while True:
            answers.append(await self._ask(address, self._prompt(), 1))

    def _prompt(self) -> list[int]:
        """Returns a prompt that no other one begins like, so no cache has it."""
        self._num_prompts += 1
        rng = np.random.default_rng(self._num_prompts)
        return list(map(int, rng.integers(300, 2000, self._options.prompt_len)))

    async def _ask(
        self, address: str, prompt: str | list[int], max_tokens: int, **more: float
    ) -> Answer:
        body: dict[str, object] = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": USAGE,
            **more,
        }
        answer = await send_request(self._client, address + PATH, body)
        if answer.error:
            raise BugError(f"a request failed: {answer.error}")
        return answer


@contextlib.contextmanager
def copying_memory() -> Iterator[None]:
    """Another process copies memory without end, when no other process wants its core."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_copy_memory, args=(theirs,), daemon=True)
    process.start()
    try:
        ours.recv()
        run_when_idle(process.pid or 0)
        yield
    finally:
        process.kill()
        process.join()


def _copy_memory(begun: Pipe) -> None:
    source, target = (np.ones(COPIED_BYTES, np.uint8) for _ in range(2))
    begun.send(None)
    while True:
        np.copyto(target, source)


def read_memory(round_ms: float, seconds: float) -> Loop:
    """Reads memory in rounds of about `round_ms`, for at most `seconds`."""
    values = np.ones(COPIED_BYTES // 8)  # float64
    part = len(values) // NUM_PARTS
    start_s = time.perf_counter()
    values.sum()
    num_parts = max(1, round(NUM_PARTS * round_ms / 1e3 / (time.perf_counter() - start_s)))
    times_ms: list[float] = []
    ends_s = time.perf_counter() + seconds
    while (start_s := time.perf_counter()) < ends_s:
        for number in range(num_parts):
            first = number % NUM_PARTS * part
            values[first : first + part].sum()
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    middle_ms = median(times_ms)
    return Loop(len(times_ms), middle_ms, percentile(times_ms, 99) / middle_ms)
