"""The mask actor: in turn, each mask when it is ready, within a budget, and no matcher outlives its
sequence.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from aserve.actors.masks import MaskActor
from aserve.channel import Channel
from aserve.errors import BugError, InvalidRequest
from aserve.grammar.mask_budget import SLOW_S, MaskBudget, MaskLimits
from aserve.grammar.matching import Constraint
from aserve.messages.base import pack_i32
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import FailRequest
from aserve.messages.results import BuildMask, MaskReady
from tests.actors.alone import alone
from tests.fakes.packed_channel import PackedChannel


class Cpu:
    """The processor time of each thread, which passes by hand only."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def spend(self, seconds: float, ident: int) -> None:
        self._seconds[ident] = self(ident) + seconds

    def __call__(self, ident: int) -> float:
        return self._seconds.get(ident, 0.0)


class GatedMatcher:
    """Fills when the gate is open, in a given processor time; or raises instead."""

    def __init__(self, cpu: Cpu) -> None:
        self.gate = threading.Event()
        self.began = threading.Event()
        self.seconds = 0.0
        self.asked: list[tuple[int, int]] = []
        self.threads: list[int] = []
        self.act: Callable[[], None] = lambda: None
        self._cpu = cpu

    def fill(self, ask: BuildMask) -> MaskReady:
        self.threads.append(threading.get_ident())
        self.asked.append((ask.child, ask.position))
        self.began.set()
        assert self.gate.wait(60)
        self._cpu.spend(self.seconds, threading.get_ident())
        self.act()
        return MaskReady(ask.request_id, ask.child, ask.position, ask.new_ids)


class Bench:
    def __init__(self) -> None:
        self.scheduler: Channel[SchedulerEvent] = PackedChannel(SchedulerEvent)
        self.cpu = Cpu()
        budget = MaskBudget(MaskLimits(2.0, 10.0), clock=lambda: 0.0)
        self.actor = MaskActor(scheduler=self.scheduler, budget=budget, clock=self.cpu)
        self.matchers: dict[str, GatedMatcher] = {}
        self._got: list[SchedulerEvent] = []

    def constrain(
        self, request_id: str, n: int = 1, *, is_open: bool = True, is_slow: bool = False
    ) -> GatedMatcher:
        """One matcher stands for all children."""
        matcher = self.matchers[request_id] = GatedMatcher(self.cpu)
        if is_open:
            matcher.gate.set()
        constraint = Constraint(request_id, (matcher,) * n, client="c", is_slow=is_slow)
        self.actor.inbox.send(constraint)
        return matcher

    def ask(self, request_id: str, child: int = 0, position: int = 0) -> None:
        self.actor.inbox.send(BuildMask(request_id, child, position, pack_i32([position])))

    async def next(self) -> SchedulerEvent:
        while not self._got:
            self._got = await anext(self.scheduler.batches())
        return self._got.pop(0)

    async def next_mask(self) -> tuple[str, int, int]:
        event = await self.next()
        assert isinstance(event, MaskReady)
        return event.request_id, event.child, event.position

    async def begun(self, request_id: str) -> None:
        assert await asyncio.to_thread(self.matchers[request_id].began.wait, 10)


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    bench = Bench()
    async with alone(bench.actor):
        yield bench
        for matcher in bench.matchers.values():
            matcher.gate.set()


async def test_a_request_with_many_children_delays_another_by_one_fill() -> None:
    async with running() as bench:
        many = bench.constrain("many", n=8, is_open=False)
        bench.constrain("one")
        for child in range(8):
            bench.ask("many", child)
        await bench.begun("many")
        bench.ask("one")
        await asyncio.sleep(0.01)  # until the actor has handed it over
        many.gate.set()
        order = [await bench.next_mask() for _ in range(9)]
        assert [name for name, _, _ in order] == ["many", "one"] + ["many"] * 7
        assert [child for name, child, _ in order if name == "many"] == list(range(8))


async def test_slow_requests_are_served_by_a_thread_of_their_own_and_say_so() -> None:
    async with running() as bench:
        hostile = bench.constrain("hostile", n=2)
        hostile.seconds = 2 * SLOW_S
        honest = bench.constrain("honest")
        bench.ask("hostile")
        first = await bench.next()
        assert isinstance(first, MaskReady)
        assert first.is_slow
        hostile.gate.clear()
        hostile.began.clear()
        bench.ask("hostile", 1)
        await bench.begun("hostile")
        for position in range(20):
            bench.ask("honest", 0, position)
            ready = await bench.next()
            assert ready == MaskReady("honest", 0, position, pack_i32([position]))
        assert len(hostile.asked) == 2
        assert set(hostile.threads) & set(honest.threads) == {hostile.threads[0]}
        assert threading.get_ident() not in hostile.threads


async def test_a_request_over_its_budget_ends_as_a_whole_and_nothing_more_is_filled() -> None:
    async with running() as bench:
        hostile = bench.constrain("hostile", n=64, is_slow=True)
        hostile.seconds = 0.5

        def close_gate() -> None:
            """The fifth fill waits, as a real one takes its time."""
            if len(hostile.asked) == 4:
                hostile.gate.clear()

        hostile.act = close_gate
        for child in range(64):
            bench.ask("hostile", child)
        for _ in range(3):
            assert isinstance(await bench.next(), MaskReady)
        end = await bench.next()
        assert isinstance(end, FailRequest)
        assert (end.request_id, end.error.code, end.error.status) == (
            "hostile",
            "grammar_too_complex",
            400,
        )
        hostile.gate.set()
        bench.ask("hostile", 5, 1)
        honest = bench.constrain("honest")
        bench.ask("honest")
        assert await bench.next_mask() == ("honest", 0, 0)
        assert not set(hostile.threads) & set(honest.threads)
        assert len(hostile.asked) <= 5, "what was asked for is not filled"
        for child in range(64):
            bench.actor.inbox.send(Retired("hostile", child, "error", 0))
        bench.ask("honest", 0, 1)
        assert await bench.next_mask() == ("honest", 0, 1)
        assert list(bench.actor._requests) == ["honest"]


async def test_a_fill_that_does_not_end_is_left_behind_when_the_budget_is_spent() -> None:
    async with running() as bench:
        stuck = bench.constrain("stuck", is_open=False)
        bench.constrain("honest")
        bench.ask("stuck")
        await bench.begun("stuck")
        bench.ask("honest")
        bench.cpu.spend(1.9, stuck.threads[0])
        await asyncio.sleep(0.3)  # the watch looks, and finds it within its budget
        assert len(bench.scheduler) == 0
        bench.cpu.spend(0.2, stuck.threads[0])
        end = await bench.next()
        assert isinstance(end, FailRequest)
        assert end.error.code == "grammar_too_complex"
        assert await bench.next_mask() == ("honest", 0, 0)
        assert bench.matchers["honest"].threads != stuck.threads
        stuck.gate.set()  # its mask comes when nobody waits for it
        bench.ask("honest", 0, 1)
        assert await bench.next_mask() == ("honest", 0, 1)


async def test_a_client_pays_for_requests_that_went_away() -> None:
    """Else it could ask, cancel, and ask again."""
    async with running() as bench:
        for number in range(6):
            hostile = bench.constrain(f"h{number}", is_open=False, is_slow=True)
            hostile.seconds = 1.9
            bench.ask(f"h{number}")
            await bench.begun(f"h{number}")
            bench.actor.inbox.send(Retired(f"h{number}", 0, "cancelled", 0))
            hostile.gate.set()
        bench.constrain("next", is_slow=True)
        bench.constrain("honest")
        while bench.actor._slow.running() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        bench.ask("next")
        end = await bench.next()
        assert isinstance(end, FailRequest)
        assert (end.error.code, end.error.status) == ("grammar_time_exhausted", 429)
        bench.ask("honest")
        assert await bench.next_mask() == ("honest", 0, 0)


def unlucky() -> None:
    raise ZeroDivisionError("a secret")


def no_good() -> None:
    raise InvalidRequest("no good", code="invalid_grammar")


@pytest.mark.parametrize(("act", "code"), [(unlucky, "bug"), (no_good, "invalid_grammar")])
async def test_what_a_matcher_raises_ends_its_request_alone(
    act: Callable[[], None], code: str
) -> None:
    """So does a mask without a matcher."""
    names = ["a", "guilty", "b"]
    async with running() as bench:
        for name in names:
            bench.constrain(name)
        bench.matchers["guilty"].act = act
        for name in (*names, "unknown"):
            bench.ask(name)
        events = [await bench.next() for _ in range(4)]
        ends = [event for event in events if isinstance(event, FailRequest)]
        assert sorted((end.request_id, end.error.code) for end in ends) == [
            ("guilty", code),
            ("unknown", "bug"),
        ]
        assert not any("secret" in end.error.message for end in ends)
        bench.ask("b", 0, 1)
        assert await bench.next_mask() == ("b", 0, 1)


async def test_a_matcher_lives_as_long_as_its_sequence() -> None:
    async with running() as bench:
        bench.constrain("a", n=2)
        bench.constrain("b")
        bench.actor.inbox.send(Retired("a", 0, "stop", 3))
        bench.actor.inbox.send(Retired("other", 0, "stop", 3))
        bench.actor.inbox.send(Refused("b", BugError("full").info()))
        bench.ask("a", child=1)
        assert await bench.next_mask() == ("a", 1, 0)
        living = {name: [*each.matchers] for name, each in bench.actor._requests.items()}
        assert living == {"a": [1]}
        bench.actor.inbox.send(Retired("a", 1, "stop", 3))
        bench.constrain("c")
        bench.ask("c")
        await bench.next_mask()
        assert list(bench.actor._requests) == ["c"]


async def test_no_thread_is_left_when_the_actor_has_stopped() -> None:
    before = set(threading.enumerate())
    async with running() as bench:
        bench.constrain("a")
        bench.constrain("b", is_slow=True)
        for name in "ab":
            bench.ask(name)
            await bench.next_mask()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
