"""The executor of rank 0: it sends each launch to the other ranks, then runs it on its own part.

All ranks run the same calls in the same order, which is the order of the calls here. A rank that
has ended, or that a collective waits for in vain, is the death of this executor.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from aserve.config import Resolved
from aserve.engine_core import LocalExecutor
from aserve.errors import EngineDead, ErrorInfo, InvalidRequest
from aserve.messages.executor import Ticket
from aserve.messages.requests import EngineJob, LoadLora, LoadWeights
from aserve.messages.step import Launch, Resync, Sample, ScheduleBatch
from aserve.parallel.processes import RankProcess, rank_processes
from aserve.parallel.topology import Coordinates, Meet, RankLoaded, RankLost, RankUp, ToRank, WarmUp

UP_S = 60.0  # for a rank to import its libraries
NO_NEW_WEIGHTS = InvalidRequest(
    "An engine of several ranks takes no new weights or adapters while it serves; restart it"
).info()


def load_ranks(
    resolved: Resolved, model_dir: Path, build: Callable[[Meet], LocalExecutor]
) -> ParallelExecutor:
    """Starts the other ranks, and builds the executor of this one by `build`."""
    with (
        tempfile.TemporaryDirectory(prefix="aserve-ranks-") as folder,
        rank_processes(resolved, model_dir, store := Path(folder, "store")) as ranks,
    ):

        def meet() -> Coordinates:
            for rank in ranks:
                rank.expect(RankUp, timeout_s=UP_S)
            return Coordinates(0, len(ranks) + 1, str(store))

        own = _built(lambda: build(meet), ranks)
        num_pages = tuple(group.num_pages for group in own.spec.groups)
        for rank in ranks:
            loaded = rank.expect(RankLoaded)
            if loaded.num_pages != num_pages:
                raise EngineDead(f"ranks have {loaded.num_pages} and {num_pages} pages")
        return ParallelExecutor(own, ranks)


def _built(build: Callable[[], LocalExecutor], ranks: Sequence[RankProcess]) -> LocalExecutor:
    """Raises the reason of the rank that was lost, where it has told one."""
    try:
        return build()
    except RankLost as lost:
        for rank in ranks:
            rank.expect(RankLoaded, timeout_s=UP_S)
        raise EngineDead(str(lost)) from lost


class ParallelExecutor:
    """A `LocalExecutor` over that of rank 0. Its methods are called on the event loop's thread."""

    def __init__(self, own: LocalExecutor, ranks: Sequence[RankProcess]) -> None:
        self.spec = own.spec
        self.about = f"{own.about}, on {len(ranks) + 1} ranks"
        self.died: asyncio.Future[BaseException]
        self._own = own
        self.ranks = tuple(ranks)
        self._loop: asyncio.AbstractEventLoop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.died = loop.create_future()
        self._own.start(loop)
        self._own.died.add_done_callback(self._own_died)
        for rank in self.ranks:
            # NOTE: a rank says nothing while it serves, so what can be read is its end.
            loop.add_reader(rank.socket, functools.partial(self._rank_ended, rank))

    async def warm_up(self) -> None:
        self._send(WarmUp())
        await self._own.warm_up()

    def launch(self, *batches: ScheduleBatch) -> Ticket:
        self._send(Launch(batches))
        return self._own.launch(*batches)

    def sample(self, sample: Sample) -> Ticket:
        self._send(sample)
        return self._own.sample(sample)

    def resync(self, resync: Resync) -> None:
        self._send(resync)
        self._own.resync(resync)

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        """A profile is that of rank 0. The ranks' copies of new weights would fall between
        different steps, so they are refused."""
        if isinstance(job, LoadWeights | LoadLora):
            return NO_NEW_WEIGHTS
        return await self._own.run_job(job)

    def close(self) -> None:
        """Runs what was launched to its end on all ranks, then ends them."""
        self._loop.call_soon_threadsafe(self._forget_ranks)
        self._own.close()
        for rank in self.ranks:
            rank.close()

    def _send(self, message: ToRank) -> None:
        for rank in self.ranks:
            try:
                rank.send(message)
            except OSError as error:
                self._die(EngineDead(f"rank {rank.number} does not read: {error}"))

    def _rank_ended(self, rank: RankProcess) -> None:
        self._loop.remove_reader(rank.socket)
        self._die(EngineDead(rank.ending()))

    def _own_died(self, died: asyncio.Future[BaseException]) -> None:
        if not died.cancelled():
            self._die(died.result())

    def _die(self, reason: BaseException) -> None:
        if not self.died.done():
            self.died.set_result(reason)

    def _forget_ranks(self) -> None:
        for rank in self.ranks:
            if rank.socket.fileno() >= 0:
                self._loop.remove_reader(rank.socket)
