"""`aserve bench http-cost` measures the CPU time of a token that is streamed over HTTP.

The device only sleeps, and what it takes to simulate its steps is left out, so all CPU time is that
of HTTP, tokenizer, detokenizer, scheduler and actors. Clients stream from a process of their own.
The CPU time is that of the process with the engine, from the first step to the last: in one run it
is the whole server, in another one the engine alone. In a third run a further process polls
/health, on a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import AsyncIterator, Sequence

import msgspec

from aserve.bench.hostile import Poll, poll_health
from aserve.bench.options import HttpCostOptions, OverlapSimOptions
from aserve.bench.overlap_sim import Case, Simulation
from aserve.bench.result import BenchResult, Table, median, percentile, progress
from aserve.bench.sleeping_engine import Nap
from aserve.config import Resolved
from aserve.host.threads import new_event_loop

TITLE = "CPU time of a token streamed over HTTP"
NOTE = (
    "us_per_token: a server in one process; engine_us_per_token: the engine's process of two; "
    "health_p99_ms: /health of the first, during the load. The device only sleeps."
)


def run(options: HttpCostOptions, resolved: Resolved) -> BenchResult:
    whole_us: list[float] = []
    engine_us: list[float] = []
    health_s: list[float] = []
    cost = HttpCost(options, resolved)
    with progress(TITLE, options.repeats) as done:
        for _ in range(options.repeats):
            whole_us.append(cost.us_per_token(processes=1))
            engine_us.append(cost.us_per_token(processes=2))
            health_s += cost.health_s()
            done()
    figures = {
        "us_per_token": round(median(whole_us), 1),
        "engine_us_per_token": round(median(engine_us), 1),
        "health_p99_ms": round(percentile(health_s, 99) * 1e3, 1),
    }
    rows = [[str(value) for value in figures.values()]]
    return BenchResult(figures, (Table(TITLE, list(figures), rows),), (NOTE,))


class HttpCost:
    """Runs loads with as many streaming clients as rows."""

    def __init__(self, options: HttpCostOptions, resolved: Resolved) -> None:
        self._options = options
        self._polls: list[Poll] = []
        load = OverlapSimOptions(steps=options.steps)
        self._plain = Simulation(resolved, load)
        self._polled = Simulation(resolved, load, beside=self._polling)

    def us_per_token(self, *, processes: int) -> float:
        naps = self._naps(self._plain, processes)
        num_tokens = self._options.clients * self._options.steps
        return (naps[-1].cpu_s - naps[0].cpu_s) / num_tokens * 1e6

    def health_s(self) -> list[float]:
        """Returns how long each request of /health took that began while steps ran."""
        naps = self._naps(self._polled, 1)
        first_s, last_s = naps[0].start_s, naps[-1].wake_s
        return [poll.took_s for poll in self._polls if first_s <= poll.start_s <= last_s]

    def _naps(self, simulation: Simulation, processes: int) -> Sequence[Nap]:
        case = Case(self._options.step_ms, self._options.clients, depth=2, processes=processes)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(simulation.naps(case))

    @contextlib.asynccontextmanager
    async def _polling(self, address: str) -> AsyncIterator[None]:
        """NOTE: another process polls, because the server would delay a thread of this one."""
        command = (sys.executable, "-m", "aserve.bench.http_cost", address)
        process = await create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        try:
            yield
        finally:
            output, _ = await process.communicate(b"")  # closes its stdin
        self._polls = msgspec.json.decode(output, type=list[Poll])


if __name__ == "__main__":
    with poll_health(sys.argv[1]) as found:
        sys.stdin.read()
    sys.stdout.buffer.write(msgspec.json.encode(found))
