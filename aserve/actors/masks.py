"""The mask actor: keeps a matcher for each living sequence with a grammar, and has masks filled.

Must not know grammars, steps or rows. Which sequences have a matcher is written here alone; the
matchers themselves by the one thread that fills masks, in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, assert_never

from aserve.actors.base import Actor
from aserve.channel import Channel
from aserve.grammar.matching import Constraint, Matcher
from aserve.messages import BuildMask, MaskReady, Refused, Retired, SchedulerEvent

MaskEvent: TypeAlias = Constraint | BuildMask | Retired | Refused


class MaskActor(Actor[MaskEvent]):
    """All masks that were asked for while the thread was busy are filled in its next go."""

    def __init__(self, *, scheduler: Channel[SchedulerEvent]) -> None:
        super().__init__("masks")
        self._scheduler = scheduler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._matchers: dict[str, dict[int, Matcher]] = {}  # by request and child

    async def run(self) -> None:
        """A mask has no deadline of its own; its request may have one."""
        loop = asyncio.get_running_loop()
        async for events in self.inbox.batches():
            self.beat()
            work = self._sort(events)
            if work:
                for ready in await loop.run_in_executor(self._thread, fill, work):
                    self._scheduler.send(ready)

    async def stop(self) -> None:
        await super().stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _sort(self, events: list[MaskEvent]) -> list[tuple[Matcher, BuildMask]]:
        """Who is to be asked, in order; most sequences that end have no matcher."""
        work = []
        for event in events:
            match event:
                case Constraint():
                    self._matchers[event.request_id] = dict(enumerate(event.matchers))
                case BuildMask():
                    work.append((self._matchers[event.request_id][event.child], event))
                case Retired():
                    children = self._matchers.get(event.request_id, {})
                    children.pop(event.child, None)
                    if not children:
                        self._matchers.pop(event.request_id, None)
                case Refused():
                    self._matchers.pop(event.request_id, None)
                case _:
                    assert_never(event)
        return work


def fill(work: list[tuple[Matcher, BuildMask]]) -> list[MaskReady]:
    return [matcher.fill(ask) for matcher, ask in work]
