"""The grammar actor: who has no grammar passes, and who has one waits beside the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from aserve.actors.grammars import GrammarActor, GrammarPorts
from aserve.actors.masks import MaskEvent
from aserve.channel import Channel
from aserve.errors import InvalidRequest
from aserve.grammar.matching import Constraint
from aserve.messages.base import pack_i32
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import DetokenizerEvent, Refused
from aserve.messages.requests import AdmitRequest, Cancel, EngineEvent, Grammar, SamplingParams
from tests.actors.alone import alone, received
from tests.fakes.packed_channel import PackedChannel

GOOD = Grammar("regex", "a")


def request(name: str, grammar: Grammar | None = None, **fields: float) -> AdmitRequest:
    sampling = SamplingParams(seed=1, grammar=grammar)
    timeout_s = fields.get("timeout_s")
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    return AdmitRequest(name, pack_i32([1]), sampling, deadline_s=deadline_s)


def cancel(name: str) -> Cancel:
    return Cancel(name, None, 0, "cancelled")


class Bench:
    """The actor before three inboxes that nobody else reads."""

    def __init__(self) -> None:
        self.text: Channel[DetokenizerEvent] = PackedChannel(DetokenizerEvent)
        self.scheduler: Channel[SchedulerEvent] = PackedChannel(SchedulerEvent)
        self.masks: Channel[MaskEvent] = Channel()
        self.compiled = asyncio.Event()  # what every grammar waits for
        self.begun = asyncio.Event()
        self.num_waiting = 0
        self.acts: dict[str, Callable[[], None]] = {}  # by request
        ports = GrammarPorts(self.scheduler, self.masks, self.text)
        self.actor = GrammarActor(self._constrain, ports)
        self.actor.inbox = PackedChannel(EngineEvent)

    async def _constrain(self, asked: AdmitRequest) -> Constraint:
        self.acts.get(asked.request_id, lambda: None)()
        self.num_waiting += 1
        self.begun.set()
        try:
            await self.compiled.wait()
        finally:
            self.num_waiting -= 1
        return Constraint(asked.request_id, ())

    async def passed(self, count: int = 1) -> list[tuple[str, str]]:
        events = await received(self.scheduler, count)
        named = (AdmitRequest, Cancel)
        return [(type(e).__name__, e.request_id) for e in events if isinstance(e, named)]

    async def refused(self) -> tuple[str, str]:
        (event,) = await anext(self.text.batches())
        assert isinstance(event, Refused)
        assert len(self.scheduler) == len(self.masks) == 0
        return event.request_id, event.error.code


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    bench = Bench()
    async with alone(bench.actor):
        yield bench


async def test_a_request_with_a_grammar_delays_nobody_and_goes_on_when_it_is_compiled() -> None:
    async with running() as bench:
        for event in (request("regex", GOOD), request("a"), request("b"), cancel("a")):
            bench.actor.inbox.send(event)
        expected = [("AdmitRequest", "a"), ("AdmitRequest", "b"), ("Cancel", "a")]
        assert await bench.passed() == expected
        bench.compiled.set()
        assert await bench.passed() == [("AdmitRequest", "regex")]
        assert await anext(bench.masks.batches()) == [Constraint("regex", ())]
        bench.actor.inbox.send(cancel("regex"))
        assert await bench.passed() == [("Cancel", "regex")]


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_request_cancelled_while_its_grammar_compiles_ends_at_once(is_begun: bool) -> None:
    """Its compilation is given up, not waited for: nothing here ever compiles it."""
    async with running() as bench:
        bench.actor.inbox.send(request("regex", GOOD))
        if is_begun:
            await bench.begun.wait()
        bench.actor.inbox.send(cancel("regex"))
        bench.actor.inbox.send(request("after"))
        assert await bench.passed() == [("AdmitRequest", "after")]
        assert await bench.refused() == ("regex", "request_cancelled")
        assert bench.num_waiting == 0
        assert bench.actor._waiting == {}


def unlucky() -> None:
    raise ZeroDivisionError("a secret")


def no_good() -> None:
    raise InvalidRequest("no good", code="invalid_grammar")


@pytest.mark.parametrize(("act", "code"), [(unlucky, "bug"), (no_good, "invalid_grammar")])
async def test_what_compiling_raises_ends_its_request_alone(
    act: Callable[[], None], code: str
) -> None:
    async with running() as bench:
        bench.compiled.set()
        bench.acts["guilty"] = act
        for name in ("a", "guilty", "b"):
            bench.actor.inbox.send(request(name, GOOD))
        assert await bench.passed(2) == [("AdmitRequest", "a"), ("AdmitRequest", "b")]
        (end,) = await anext(bench.text.batches())
        assert isinstance(end, Refused)
        assert (end.request_id, end.error.code) == ("guilty", code)
        assert "secret" not in end.error.message
        assert bench.actor._waiting == {}


async def test_a_grammar_that_is_not_compiled_in_time_ends_its_request() -> None:
    async with running() as bench:
        bench.actor.inbox.send(request("late", GOOD, timeout_s=0.01))
        assert await bench.refused() == ("late", "deadline_exceeded")
