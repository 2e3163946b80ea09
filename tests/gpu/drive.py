"""The real scheduler over the real executor, without actors and HTTP: requests in, tokens out.

Chaos decides in which order arrivals, masks and results reach the scheduler, as far as order is
free: tickets are awaited in launch order.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from aserve.engine_core import LocalExecutor
from aserve.gpu.build import BuildOptions, assemble
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.decode.base import DecodeMode
from aserve.gpu.device.base import Device
from aserve.gpu.device.registry import open_device
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.live_loader import LiveLoader
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.models.base import CausalModel, DraftModel
from aserve.measure_steps import warm_up
from aserve.messages.base import ArrayF32, array_f32, array_i32, pack_i32
from aserve.messages.executor import Executor, SchedulerEffect, SchedulerEvent, Ticket
from aserve.messages.output import Refused, Retired, SequenceOutput, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel, ReasoningIds, SamplingParams
from aserve.messages.results import BuildMask, MaskReady, PromptLogprobs, StepResult, StepTimes
from aserve.messages.step import Launch, Resync, Sample, ScheduleBatch
from aserve.messages.transfers import LoadKv, ReceiveKv, SaveKv, SendKv, StreamKv
from aserve.observability.reports import TierUsed
from aserve.scheduling.finish import retract
from aserve.scheduling.scheduler import Scheduler
from aserve.tiers.actor import KvTiers
from aserve.tiers.host_pages import HostPages
from aserve.tiers.page_layout import PageLayout
from tests.engine_device import engine_device
from tests.fakes.toy_device import ToyMatchers

EVICT_RATE = 0.3  # turns in which the pool is under pressure, where pages go down to tiers
Key = tuple[str, int]  # request id, child
FillMask = Callable[[BuildMask], MaskReady]


@dataclass(slots=True)
class Served:
    """What came of some requests. `reasons` has one entry per last message of a sequence."""

    outputs: dict[Key, list[int]] = field(default_factory=dict)
    scores: dict[Key, list[PromptLogprobs]] = field(default_factory=dict)
    logprobs: dict[Key, list[float]] = field(default_factory=dict)  # of outputs, one by one
    top_logprobs: dict[Key, bytes] = field(default_factory=dict)  # of outputs, one after the other
    embeddings: dict[Key, list[ArrayF32]] = field(default_factory=dict)
    reasons: dict[Key, list[str]] = field(default_factory=dict)
    batches: list[ScheduleBatch] = field(default_factory=list)
    num_resyncs: int = 0
    num_retracted: int = 0
    num_cached: int = 0  # prompt tokens that the prefix cache had
    moves: list[TierUsed] = field(default_factory=list)


def make_executor(
    model: CausalModel,
    *,
    mode: DecodeMode | None = None,
    device: Device | None = None,
    drafter: DraftModel | None = None,
    loras: LoraTables | None = None,
    **options: Any,
) -> TorchExecutor:
    """A small one with debug checks; `options` are fields of BuildOptions."""
    settings = {
        "page_size": 4,
        "num_pages": 65,
        "max_rows": 5,
        "max_batched_tokens": 64,
        "debug_checks": True,
        **options,
    }
    build = BuildOptions(Path("of-no-model"), **settings)
    mode, device = mode or Autoregressive(), device or open_device(engine_device())
    return assemble(
        model, mode, device, build, drafter=drafter, live_loader=LiveLoader(model, loras)
    )


def captured(executor: TorchExecutor) -> TorchExecutor:
    """The executor, once it has captured all graphs that there may be."""
    executor.capture_graphs(lambda _done, _total: None)
    return executor


def request(
    name: str,
    prompt: list[int],
    *,
    end_ids: tuple[int, ...] = (),
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    embeds: bool = False,
    reasoning: ReasoningIds | None = None,
    **sampling: Any,
) -> AdmitRequest:
    """Greedy, 8 tokens, if `sampling` does not say otherwise; none when it `embeds`."""
    num_tokens = 0 if embeds else 8
    params = SamplingParams(**{"seed": 0, "temperature": 0.0, "max_tokens": num_tokens, **sampling})
    return AdmitRequest(
        name,
        pack_i32(prompt),
        params,
        end_ids=end_ids,
        bad_word_ids=bad_word_ids,
        embeds=embeds,
        reasoning=reasoning,
    )


def serve(
    executor: LocalExecutor,
    requests: Sequence[AdmitRequest | Cancel | StepTimes],
    *,
    chaos: int = 0,
    fill: FillMask | None = None,
    first_iteration: int = 1,
    measures: bool = False,
    launches_ahead: bool = False,
    tier_pages: int = 0,
    retract_rate: float = 0.0,
) -> Served:
    """Runs all requests to their ends, then closes the executor. Grammars are toys, or `fill`'s.
    Raises what a device thread has died of. `measures`: as an engine does at its start.
    `launches_ahead`: results are awaited when the scheduler launches nothing more without them.
    `tier_pages`: of host memory below the prefix cache, which then forgets now and then.
    `retract_rate`: the part of the turns in which a row is retracted, whatever is in flight.
    """

    async def run() -> Served:
        executor.start(asyncio.get_running_loop())
        try:
            times = await warm_up(executor) if measures else []
            drive = _Drive(executor, [*times, *requests], random.Random(chaos))
            drive.fill = fill or drive.fill
            drive.launches_ahead, drive.retract_rate = launches_ahead, retract_rate
            drive.tiers = open_tiers(executor, drive, tier_pages) if tier_pages else None
            drive.scheduler.state.next_iteration = first_iteration
            task = asyncio.ensure_future(drive.run())
            await asyncio.wait((task, executor.died), return_when=asyncio.FIRST_COMPLETED)
            if executor.died.done():
                task.cancel()
                raise executor.died.result()
            return task.result()
        finally:
            executor.close()

    return asyncio.run(run())


def open_tiers(executor: LocalExecutor, drive: _Drive, max_pages: int) -> KvTiers:
    assert isinstance(executor, TorchExecutor)
    access = executor.kv_access()
    layout = PageLayout(access.pool_shapes, page_size=executor.spec.page_size)
    host = HostPages(max_pages, page_bytes=layout.page_bytes)
    tiers = KvTiers(access, layout, host, events=drive, report=drive.served.moves.append)
    tiers.start(lambda name, error: drive.died.append(error))
    return tiers


async def serve_between(
    executor: LocalExecutor, requests: Sequence[AdmitRequest], *, first_iteration: int
) -> Served:
    """As `serve`, of an executor that has been started and goes on. `first_iteration` is beyond all
    that it has seen."""
    drive = _Drive(executor, requests, random.Random(0))
    drive.scheduler.state.next_iteration = first_iteration
    return await drive.run()


class _Drive:
    def __init__(
        self,
        executor: Executor,
        requests: Sequence[AdmitRequest | Cancel | StepTimes],
        chaos: random.Random,
    ) -> None:
        self.executor = executor
        self.chaos = chaos
        self.scheduler = Scheduler(executor.spec, debug_checks=True)
        self.fill: FillMask = ToyMatchers(executor.spec.vocab_size).fill
        self.arrivals = deque(requests)  # and cancels, in the order in which they come
        self.asks: deque[BuildMask] = deque()
        self.tickets: deque[Ticket] = deque()
        self.served = Served()
        self.launches_ahead = self.has_launched = False
        self.retract_rate = 0.0
        self.tiers: KvTiers | None = None
        self.died: list[BaseException] = []
        self.brought: asyncio.Queue[SchedulerEvent] = asyncio.Queue()  # what the tiers say

    def send(self, message: SchedulerEvent) -> None:
        self.brought.put_nowait(message)

    async def run(self) -> Served:
        while self.arrivals or self.asks or self.tickets or not self.scheduler.is_idle:
            num_events = 1 if self.launches_ahead else self.chaos.randint(1, 3)
            if self.tiers is not None and self.chaos.random() < EVICT_RATE:
                self.scheduler.state.cache.evict_all()
            if self.retract_rate and self.chaos.random() < self.retract_rate:
                self._retract_somebody()
            events = [await self._next_event() for _ in range(num_events)]
            if self.scheduler.state.transfers and not any(events):
                events = [await self.brought.get()]
            effects = self.scheduler.step([event for event in events if event is not None])
            self.has_launched = any(isinstance(effect, Launch) for effect in effects)
            for effect in effects:
                self._perform(effect)
        self.served.num_retracted = self.scheduler.state.num_retracted
        self._check_nothing_is_kept()
        if self.tiers is not None:
            await self.tiers.stop()
        assert not self.died
        return self.served

    def _retract_somebody(self) -> None:
        """A row may be retracted between any two ticks; the last one stays."""
        state = self.scheduler.state
        rows = state.retractable()
        if len(rows) > 1:
            retract(state, self.chaos.choice(rows))

    def _check_nothing_is_kept(self) -> None:
        """Without requests, every row and, apart from the prefix cache, every page is free."""
        state = self.scheduler.state
        assert state.rows.num_free == state.spec.max_rows
        state.cache.check([])
        state.cache.evict_all()
        for pool, group in enumerate(state.spec.groups * state.spec.dp_size):
            assert state.cache.num_free(pool) == group.num_pages - 1

    async def _next_event(self) -> SchedulerEvent | None:
        sources = [queue for queue in (self.arrivals, self.asks, self.tickets) if queue]
        if self.launches_ahead and self.has_launched:
            sources = [queue for queue in sources if queue is not self.tickets]
        if self.tiers is not None and self.scheduler.state.groups:
            # A prompt comes back when the one before it has ended, and its pages are evicted.
            sources = [queue for queue in sources if queue is not self.arrivals] or sources
        if not self.brought.empty() and self.chaos.random() < 0.5:
            return self.brought.get_nowait()
        if not sources:
            return None
        source = self.chaos.choice(sources)
        if source is self.arrivals:
            return self.arrivals.popleft()
        if source is self.asks:
            return self.fill(self.asks.popleft())
        result = await self.tickets.popleft()
        # What rows draft depends on the times that a test gives, and not on the machine's load.
        timeless = isinstance(result, StepResult)
        return msgspec.structs.replace(result, took_us=0.0) if timeless else result

    def _perform(self, effect: SchedulerEffect) -> None:
        match effect:
            case Launch():
                self.served.batches += effect.batches
                self.served.num_cached += effect.batches[0].stats.num_cached_tokens
                self.tickets.append(self.executor.launch(*effect.batches))
            case Sample():
                self.tickets.append(self.executor.sample(effect))
            case Resync():
                self.served.num_resyncs += 1
                self.executor.resync(effect)
            case BuildMask():
                self.asks.append(effect)
            case SaveKv() | LoadKv() if self.tiers is not None:
                self.tiers.send(effect)
            case ReceiveKv() | SendKv() | StreamKv() | SaveKv() | LoadKv():
                raise AssertionError(f"nobody transfers KV here: {effect}")
            case StepOutput():
                for output in effect.outputs():
                    self._note(output)
            case Retired():
                key = effect.request_id, effect.child
                self.served.reasons.setdefault(key, []).append(effect.reason)
            case Refused():
                raise AssertionError(f"{effect.request_id} was refused: {effect.error.message}")

    def _note(self, output: SequenceOutput) -> None:
        served, key = self.served, (output.request_id, output.child)
        served.outputs.setdefault(key, []).extend(array_i32(output.token_ids).tolist())
        for run in output.logprobs:
            served.logprobs.setdefault(key, []).extend(array_f32(run.chosen).tolist())
            served.top_logprobs[key] = served.top_logprobs.get(key, b"") + run.top_logprobs
        if output.prompt_logprobs is not None:
            served.scores.setdefault(key, []).append(output.prompt_logprobs)
        if output.embedding is not None:
            served.embeddings.setdefault(key, []).append(array_f32(output.embedding))
