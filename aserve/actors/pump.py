"""The pump: awaits the tickets of launched steps in launch order, and posts what they give.

Must not look into a result, nor know what the executor is. Its inbox is the only state.
"""

from __future__ import annotations

from aserve.actors.base import Actor
from aserve.channel import Channel
from aserve.messages import SchedulerEvent, Ticket


class Pump(Actor[Ticket]):
    def __init__(self, *, results: Channel[SchedulerEvent]) -> None:
        super().__init__("pump")
        self._results = results

    async def run(self) -> None:
        """An await has no deadline here: a step may take as long as it takes (see supervisor)."""
        async for tickets in self.inbox.batches():
            for ticket in tickets:
                result = await ticket
                self.beat()
                self._results.send(result)
