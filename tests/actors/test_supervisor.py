"""A death ends every request once, a long step ends nothing, a drain has a deadline."""

from __future__ import annotations

import asyncio

from aserve.actors.base import Actor
from aserve.actors.supervisor import Supervisor
from aserve.errors import ErrorInfo
from aserve.messages.base import ServerPhase


class FakeGateway:
    def __init__(self, *, num_open: int = 1) -> None:
        self.num_open = num_open
        self.errors: list[ErrorInfo] = []
        self._empty = asyncio.Event()

    def end_all(self, error: ErrorInfo) -> None:
        self.errors.append(error)
        self.finish()

    def finish(self) -> None:
        self.num_open = 0
        self._empty.set()

    async def drained(self) -> None:
        if self.num_open:
            await self._empty.wait()


class Fragile(Actor[str]):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(name)
        self._log = log

    def handle(self, events: list[str]) -> None:
        raise RuntimeError(events[0])

    async def stop(self) -> None:
        self._log.append(self.name)
        await super().stop()


class Rig:
    def __init__(self, *, num_open: int = 1) -> None:
        self.phases: list[tuple[ServerPhase, str]] = []
        self.died = asyncio.Event()
        self.stopped: list[str] = []
        self.gateway = FakeGateway(num_open=num_open)
        self.actors = [Fragile(name, self.stopped) for name in ("first", "second", "third")]
        self.supervisor = Supervisor(self.actors, requests=self.gateway, report=self.report)

    def report(self, phase: ServerPhase, reason: str) -> None:
        self.phases.append((phase, reason))
        if phase == "dead":
            self.died.set()


async def test_a_dead_actor_ends_every_request_with_a_503_and_reports_why() -> None:
    rig = Rig()
    rig.supervisor.start()
    rig.actors[1].inbox.send("boom")
    await rig.died.wait()
    rig.supervisor.report_death("executor", RuntimeError("follows from it"))
    assert [(error.status, error.code) for error in rig.gateway.errors] == [(503, "engine_dead")]
    assert rig.phases == [("dead", "second died: RuntimeError: boom")]
    await rig.supervisor.drain(0)  # what is dead is not called draining
    assert len(rig.phases) == 1
    assert str(rig.supervisor.failure) == "second died: RuntimeError: boom"
    await rig.supervisor.stop()
    assert rig.stopped == ["third", "second", "first"]


async def test_trap_12_silence_is_not_death() -> None:
    """Health is never inferred from tokens: while a long prefill says nothing, nothing ends."""
    rig = Rig()
    rig.supervisor.start()
    for _ in range(50):
        await asyncio.sleep(0)
    assert rig.supervisor.failure is None
    assert (rig.phases, rig.gateway.errors) == ([], [])
    await rig.supervisor.stop()


async def test_a_drain_lets_open_requests_finish() -> None:
    rig = Rig()
    drain = asyncio.ensure_future(rig.supervisor.drain(60))
    await asyncio.sleep(0)
    assert rig.phases == [("draining", "the server is shutting down")]
    rig.gateway.finish()
    await drain
    assert rig.gateway.errors == []


async def test_a_death_during_a_drain_stays_dead_and_ends_it() -> None:
    rig = Rig()
    drain = asyncio.ensure_future(rig.supervisor.drain(60))
    await asyncio.sleep(0)
    rig.supervisor.report_death("executor", RuntimeError("gone"))
    await drain
    assert rig.phases[-1][0] == "dead"
    assert [error.code for error in rig.gateway.errors] == ["engine_dead"]
