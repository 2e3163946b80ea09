"""`aserve bench fairness` measures how a server shares its engine between clients.

One client floods the server, and nine light clients send one request at a time. The device only
sleeps; server, scheduler and text are real. TTFT is counted in steps of the device. There are three
loads: the light clients alone; all clients with one API key, which is first come, first served; and
each client with its own key.

Jain's index of x_1 ... x_n is (sum x)^2 / (n * sum x^2). Here x_i is the service of client i per
step (prompt tokens + 2 * output tokens), divided by the smaller of its demand and its fair share.
The demand of a light client is its service per step in the first load. The demand of the flood is
unbounded. Fair shares are max-min fair: no client gets more than its demand, and the rest is
divided equally among the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from aserve.bench.options import FairnessOptions
from aserve.bench.result import BenchResult, Table, mean, percentile, progress
from aserve.bench.sleeping_engine import SleepingExecutor
from aserve.bench.windows import TokenWindows
from aserve.config import Resolved
from aserve.errors import BugError
from aserve.frontend import Frontend
from aserve.host.threads import new_event_loop
from aserve.load import Loaded
from aserve.messages.executor import EngineSpec, GroupSpec
from aserve.scheduling.clients import OUTPUT_WEIGHT, PROMPT_WEIGHT
from aserve.server import connect_http
from aserve.startup import InThisProcess, Waits
from aserve.text.load import TextSide, load_tokenizer
from aserve.tiny import MODEL_DIR

TITLE = "one client floods, the others are light"
FLOOD = "flood"
PAGE_SIZE = 16
MAX_BATCHED_TOKENS = 2048
WARM_STEPS = 20  # steps of the flood before the light clients begin

NOTE = (
    "first token: TTFT of the light clients in steps of the device. index: Jain's index of the "
    "service, divided by the smaller of demand and fair share."
)


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    has_flood: bool
    has_own_keys: bool


LOADS = (
    Load("light clients alone", has_flood=False, has_own_keys=True),
    Load("flood, one key for all", has_flood=True, has_own_keys=False),
    Load("flood, a key for each", has_flood=True, has_own_keys=True),
)


@dataclass(slots=True)
class Served:
    """The service that one client got while the light clients were busy."""

    num_tokens: int = 0  # prompt tokens + 2 * output tokens
    first_steps: list[int] = dataclasses.field(default_factory=list)  # TTFT in steps, by request


@dataclass(frozen=True, slots=True)
class Measured:
    clients: dict[str, Served]
    num_steps: int

    @property
    def rates(self) -> dict[str, float]:
        return {name: one.num_tokens / self.num_steps for name, one in self.clients.items()}

    @property
    def first_steps(self) -> list[int]:
        return [
            steps
            for name, one in self.clients.items()
            for steps in one.first_steps
            if name != FLOOD
        ]


def run(options: FairnessOptions, resolved: Resolved) -> BenchResult:
    found: dict[str, Measured] = {}
    with asyncio.Runner(loop_factory=new_event_loop) as runner, progress(TITLE, len(LOADS)) as done:
        for load in LOADS:
            found[load.name] = runner.run(Simulation(options, resolved, load).measure())
            done()
    alone = found[LOADS[0].name].rates
    lines = [_line(load, found[load.name], alone) for load in LOADS]
    figures = {"loads": lines}
    rows = [[str(value) for value in line.values()] for line in lines]
    return BenchResult(figures, (Table(TITLE, list(lines[0]), rows),), (NOTE,))


def _line(load: Load, measured: Measured, alone: dict[str, float]) -> dict[str, object]:
    steps = measured.first_steps
    return {
        "load": load.name,
        "first_token_p50": percentile(steps, 50),
        "first_token_p99": percentile(steps, 99),
        "first_token_max": max(steps),
        "light_per_step": round(mean([r for n, r in measured.rates.items() if n != FLOOD]), 2),
        "flood_per_step": round(measured.rates.get(FLOOD, 0.0), 2),
        "index": round(fairness_index(measured.rates, alone), 3),
    }


def fairness_index(rates: dict[str, float], alone: dict[str, float]) -> float:
    """Returns Jain's index. The capacity that is shared is the total service."""
    demands = {name: alone.get(name, sum(rates.values())) for name in rates}
    shares = fair_shares(demands, sum(rates.values()))
    return jain_index([rates[name] / shares[name] for name in rates])


def jain_index(values: Sequence[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def fair_shares(demands: dict[str, float], capacity: float) -> dict[str, float]:
    """Returns max-min fair shares. From the smallest demand on, each client gets at most an equal
    part of the capacity that is left.
    """
    shares: dict[str, float] = {}
    for name, demand in sorted(demands.items(), key=lambda item: item[1]):
        shares[name] = min(demand, capacity / (len(demands) - len(shares)))
        capacity -= shares[name]
    return shares


class Simulation:
    """One load on a new server."""

    def __init__(self, options: FairnessOptions, resolved: Resolved, load: Load) -> None:
        self._options = options
        self._load = load
        self._tokenizer = load_tokenizer(MODEL_DIR)
        self._windows = TokenWindows(self._tokenizer, seed=0)
        self._light = [f"light{number}" for number in range(options.light_clients)]
        names = [FLOOD, *self._light] if load.has_flood else self._light
        self._served = {name: Served() for name in names}
        self._executor = SleepingExecutor(self._spec(), step_s=options.step_ms / 1e3)
        self._resolved = _resolved_for(resolved, self._spec(), keys=",".join([FLOOD, *self._light]))
        self._is_counting = False

    async def measure(self) -> Measured:
        frontend = Frontend(self._resolved)
        http = connect_http(frontend)
        address = await http.start()
        try:
            loaded = Loaded(self._executor, TextSide(self._tokenizer))
            await InThisProcess(lambda *_: loaded).launch(frontend, Waits())
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(
                address, connector=connector, timeout=timeout
            ) as session:
                return await self._run(session)
        finally:
            await http.stop()
            await frontend.close()

    async def _run(self, session: aiohttp.ClientSession) -> Measured:
        """Runs the flood until the light clients are done. The flood begins first, and each of its
        requests is followed by another.
        """
        options = self._options
        async with asyncio.TaskGroup() as group:
            flood = [
                group.create_task(self._flood(session))
                for _ in range(options.flood_requests * self._load.has_flood)
            ]
            if flood:
                await self._until_step(WARM_STEPS)
            start = self._num_steps
            self._is_counting = True
            async with asyncio.TaskGroup() as light:
                for name in self._light:
                    light.create_task(self._send_light(session, name))
            self._is_counting = False
            num_steps = self._num_steps - start
            for task in flood:
                task.cancel()
        return Measured(self._served, num_steps)

    @property
    def _num_steps(self) -> int:
        return len(self._executor.naps)

    async def _until_step(self, number: int) -> None:
        deadline_s = time.monotonic() + 60
        while self._num_steps < number:
            if time.monotonic() > deadline_s:
                raise BugError(f"the device ran only {self._num_steps} steps in 60 s")
            await asyncio.sleep(self._options.step_ms / 1e3)

    async def _flood(self, session: aiohttp.ClientSession) -> None:
        while True:
            await self._send(session, FLOOD, self._options.flood_tokens)

    async def _send_light(self, session: aiohttp.ClientSession, name: str) -> None:
        for _ in range(self._options.light_requests):
            await self._send(session, name, self._options.light_tokens)

    async def _send(self, session: aiohttp.ClientSession, name: str, max_tokens: int) -> None:
        key = name if self._load.has_own_keys else FLOOD
        prompt = self._windows.ids(self._options.prompt_len)
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        start = self._num_steps
        has_begun = False
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post("/v1/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                raise BugError(f"{name} got {answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                num_tokens = _tokens_in(line)
                if not num_tokens:
                    continue
                if not has_begun:
                    has_begun = True
                    self._count(name, PROMPT_WEIGHT * len(prompt), start=start)
                self._count(name, OUTPUT_WEIGHT * num_tokens)

    def _count(self, name: str, num_tokens: int, *, start: int | None = None) -> None:
        if not self._is_counting:
            return
        self._served[name].num_tokens += num_tokens
        if start is not None:
            self._served[name].first_steps.append(self._num_steps - start)

    def _spec(self) -> EngineSpec:
        """There is KV cache for all rows, so clients compete for rows only."""
        options = self._options
        max_len = 2 * options.prompt_len + max(options.flood_tokens, options.light_tokens)
        return EngineSpec(
            page_size=PAGE_SIZE,
            groups=(GroupSpec("full", 1 + 2 * options.rows * (max_len // PAGE_SIZE + 2)),),
            max_rows=options.rows,
            max_model_len=max_len,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            vocab_size=self._tokenizer.vocab_size,
            max_waiting=2 * (options.flood_requests + options.light_clients),
        )


class _Event(msgspec.Struct):
    choices: list[_Choice]


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


def _tokens_in(line: bytes) -> int:
    if not line.startswith(b"data: {"):
        return 0
    event = msgspec.json.decode(line.removeprefix(b"data: "), type=_Event)
    return sum(len(choice.token_ids) for choice in event.choices)


def _resolved_for(resolved: Resolved, spec: EngineSpec, *, keys: str) -> Resolved:
    server = dataclasses.replace(
        resolved.server, host="127.0.0.1", port=0, api_key=keys, api_key_file=None
    )
    scheduler = dataclasses.replace(
        resolved.scheduler, max_num_seqs=spec.max_rows, max_queue=spec.max_waiting
    )
    debug = dataclasses.replace(resolved.debug, log_level=resolved.debug.log_level or "warning")
    return dataclasses.replace(resolved, server=server, scheduler=scheduler, debug=debug)
