"""The mask actor: in order, several in one go, and no matcher outlives its sequence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aserve.actors.masks import MaskActor
from aserve.channel import Channel, Codec
from aserve.errors import BugError
from aserve.grammar.matching import Constraint
from aserve.messages import BuildMask, MaskReady, Refused, Retired, SchedulerEvent, pack_i32
from tests.actors.alone import alone


class GatedMatcher:
    """Fills when the gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.threads: set[str] = set()
        self.began = threading.Event()

    def fill(self, ask: BuildMask) -> MaskReady:
        self.threads.add(threading.current_thread().name)
        self.began.set()
        assert self.gate.wait(10)
        return MaskReady(ask.request_id, ask.child, ask.position, ask.new_ids)


class Bench:
    def __init__(self) -> None:
        self.scheduler: Channel[SchedulerEvent] = Channel(codec=Codec(SchedulerEvent))
        self.actor = MaskActor(scheduler=self.scheduler)
        self.gate = threading.Event()
        self.matcher = GatedMatcher(self.gate)

    def constrain(self, request_id: str, n: int = 1) -> None:
        self.actor.inbox.send(Constraint(request_id, (self.matcher,) * n))

    def ask(self, request_id: str, child: int = 0, position: int = 0) -> None:
        self.actor.inbox.send(BuildMask(request_id, child, position, pack_i32([position])))

    async def next_masks(self) -> list[tuple[str, int, int]]:
        events = await anext(self.scheduler.batches())
        ready = [event for event in events if isinstance(event, MaskReady)]
        return [(one.request_id, one.child, one.position) for one in ready]


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    bench = Bench()
    async with alone(bench.actor):
        yield bench
        bench.gate.set()


async def test_masks_asked_for_while_the_thread_is_busy_come_in_one_go_and_in_order() -> None:
    async with running() as bench:
        bench.constrain("a", n=2)
        bench.constrain("b")
        bench.ask("a")
        assert await asyncio.to_thread(bench.matcher.began.wait, 10)
        bench.ask("b")
        bench.ask("a", child=1)
        bench.gate.set()
        assert await bench.next_masks() == [("a", 0, 0)]
        assert await bench.next_masks() == [("b", 0, 0), ("a", 1, 0)]
        assert len(bench.matcher.threads) == 1
        assert threading.current_thread().name not in bench.matcher.threads


async def test_a_matcher_lives_as_long_as_its_sequence() -> None:
    async with running() as bench:
        bench.gate.set()
        bench.constrain("a", n=2)
        bench.constrain("b")
        bench.actor.inbox.send(Retired("a", 0, "stop", 3))
        bench.actor.inbox.send(Retired("other", 0, "stop", 3))
        bench.actor.inbox.send(Refused("b", BugError("full").info()))
        bench.ask("a", child=1)
        assert await bench.next_masks() == [("a", 1, 0)]
        assert {name: [*children] for name, children in bench.actor._matchers.items()} == {"a": [1]}
        bench.actor.inbox.send(Retired("a", 1, "stop", 3))
        bench.constrain("c")
        bench.ask("c")
        await bench.next_masks()
        assert list(bench.actor._matchers) == ["c"]
