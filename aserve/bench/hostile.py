"""`aserve bench hostile` measures how responsive a server stays while it gets hostile bodies.

It starts `aserve serve` once for each number of processes. Several copies of each body are sent at
once, while a thread polls /health on its own connection. After a pause the server's memory is
compared with its memory before the load.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import msgspec

from aserve.bench.hostile_bodies import BODIES, HostileBody
from aserve.bench.options import HostileOptions, integers
from aserve.bench.result import BenchResult, Table
from aserve.bench.server_start import resident_bytes, serving
from aserve.config import Resolved
from aserve.errors import ConfigError
from aserve.messages.base import MIB

MAX_DELAY_S = 0.05
MAX_HEALTH_S = 0.1
MAX_GROWTH_BYTES = 100 << 20
POLL_S = 0.005
BOUNDS = (
    f"Bounds: event loop delay {MAX_DELAY_S * 1e3:.0f} ms, p99 of /health "
    f"{MAX_HEALTH_S * 1e3:.0f} ms, memory growth {MAX_GROWTH_BYTES // MIB} MiB."
)
BUCKET = re.compile(
    r'^aserve_event_loop_delay_seconds_bucket\{le="([^"]+)"\} ([\d.e+]+)$', re.MULTILINE
)
COLUMNS = ("body", "sent_MB", "answers", "loop_delay_ms", "health_p99_ms", "health_max_ms", "")


class Outcome(msgspec.Struct, frozen=True):
    """The measurement of one body. `delay_s` is the upper edge of the histogram bucket with the
    longest delay.
    """

    processes: int
    body: str
    sent_bytes: int
    answers: dict[str, int]
    delay_s: float
    health_p99_s: float
    health_max_s: float
    is_refused: bool

    @property
    def exceeded(self) -> str:
        bounds = {
            "loop": self.delay_s > MAX_DELAY_S,
            "health": self.health_p99_s > MAX_HEALTH_S,
            "answer": not self.is_refused,
        }
        return ", ".join(name for name, is_over in bounds.items() if is_over)


class Memory(msgspec.Struct, frozen=True):
    processes: int
    before_bytes: int
    after_bytes: int

    @property
    def growth_bytes(self) -> int:
        return self.after_bytes - self.before_bytes


def run(options: HostileOptions, _: Resolved) -> BenchResult:
    outcomes: list[Outcome] = []
    memories: list[Memory] = []
    for processes in integers(options.processes, flag="--processes"):
        if processes > 2:
            raise ConfigError(f"--processes {options.processes}: must be 1, 2 or 1,2")
        found, memory = asyncio.run(_measure(options, processes))
        outcomes += found
        memories.append(memory)
    return BenchResult(
        figures={"outcomes": outcomes, "memory": memories},
        tables=(*(_table(outcomes, memory) for memory in memories), _memory_table(memories)),
        notes=(
            f"{options.copies} copies of each body at once; {options.settle:g} s of pause at last.",
            BOUNDS,
        ),
    )


async def _measure(options: HostileOptions, processes: int) -> tuple[list[Outcome], Memory]:
    async with (
        serving("--processes", str(processes)) as server,
        aiohttp.ClientSession(server.address) as web,
    ):
        attack = _Attack(web, server.address, options)
        await attack.warm_up()
        before = resident_bytes(server.pid)
        found = [await attack.send(body, processes) for body in BODIES]
        await asyncio.sleep(options.settle)
        return found, Memory(processes, before, resident_bytes(server.pid))


@dataclass(frozen=True, slots=True)
class _Attack:
    web: aiohttp.ClientSession
    address: str
    options: HostileOptions

    async def warm_up(self) -> None:
        """Sends ordinary requests, so that lazy initialization is not counted, nor the grammar
        worker, which starts beside the server.
        """
        body = {"prompt": "Once upon a time", "max_tokens": 8}
        for more in ({}, {"structured_outputs": {"regex": "[a-z]{8}"}}):
            async with self.web.post("/v1/completions", json=body | more) as answer:
                answer.raise_for_status()

    async def send(self, body: HostileBody, processes: int) -> Outcome:
        data = body.data(self.options.size)
        before = await self._delays()
        with poll_health(self.address) as polls:
            copies = (self._post(body, data) for _ in range(self.options.copies))
            codes = await asyncio.gather(*copies)
            after = await self._delays()
        health_s = [poll.took_s for poll in polls]
        grown = [edge for edge, count in after.items() if count > before.get(edge, 0)]
        return Outcome(
            processes,
            body.name,
            len(data),
            {code: codes.count(code) for code in sorted(set(codes))},
            max(grown, default=0.0),
            statistics.quantiles(health_s, n=100, method="inclusive")[98],
            max(health_s),
            is_refused=set(codes) == {f"{body.status} {body.code}"},
        )

    async def _post(self, body: HostileBody, data: bytes) -> str:
        async with self.web.post(body.path, data=data, headers=body.headers) as answer:
            found = await answer.json()
            return f"{answer.status} {found.get('error', {}).get('code', '')}"

    async def _delays(self) -> dict[float, float]:
        """Returns the number of event loop delays in each bucket, by its upper edge in seconds."""
        async with self.web.get("/metrics") as answer:
            found = BUCKET.findall(await answer.text())
        counts, below = {}, 0.0
        for edge, total in found:
            counts[float(edge)] = float(total) - below
            below = float(total)
        return counts


class Poll(msgspec.Struct, frozen=True):
    """One request of /health, in seconds of `time.perf_counter`."""

    start_s: float
    took_s: float


@contextmanager
def poll_health(address: str) -> Iterator[list[Poll]]:
    """Polls /health and yields the growing list of requests. It polls in a thread, so that the rest
    of this process does not delay it.
    """
    polls: list[Poll] = []
    is_over = threading.Event()
    netloc = urlsplit(address).netloc

    def poll() -> None:
        connection = http.client.HTTPConnection(netloc, timeout=60)
        while not is_over.wait(POLL_S) or len(polls) < 2:
            start_s = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            polls.append(Poll(start_s, time.perf_counter() - start_s))
        connection.close()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield polls
    finally:
        is_over.set()
        thread.join()


def _table(outcomes: list[Outcome], memory: Memory) -> Table:
    rows = [
        (
            outcome.body,
            f"{outcome.sent_bytes / 1e6:.2f}",
            ", ".join(f"{count} x {code}" for code, count in outcome.answers.items()),
            f"<= {outcome.delay_s * 1e3:.0f}",
            f"{outcome.health_p99_s * 1e3:.1f}",
            f"{outcome.health_max_s * 1e3:.1f}",
            f"over: {outcome.exceeded}" if outcome.exceeded else "",
        )
        for outcome in outcomes
        if outcome.processes == memory.processes
    ]
    return Table(f"Hostile bodies, processes={memory.processes}", COLUMNS, rows)


def _memory_table(memories: list[Memory]) -> Table:
    rows = [
        (
            str(memory.processes),
            f"{memory.before_bytes / MIB:.0f}",
            f"{memory.after_bytes / MIB:.0f}",
            f"{memory.growth_bytes / MIB:.0f}",
            "over" if memory.growth_bytes > MAX_GROWTH_BYTES else "",
        )
        for memory in memories
    ]
    return Table("Memory in MiB", ("processes", "before", "after", "growth", ""), rows)
