"""The executor of rank 0: it sends each launch to the other ranks, then runs it on its own part.

All ranks run the same calls in the same order, which is the order of the calls here. A rank that
has ended, or that a collective waits for in vain, is the death of this executor.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from aserve.config import Resolved
from aserve.engine_core import LocalExecutor
from aserve.errors import BugError, EngineDead, ErrorInfo
from aserve.messages.changes import CheckWeights, EngineJob, LoadLora, LoadWeights
from aserve.messages.executor import Ticket
from aserve.messages.step import Launch, Resync, Sample, ScheduleBatch
from aserve.parallel.hosts import Hosts, RemoteHost
from aserve.parallel.joined import RowsOfRanks
from aserve.parallel.launch import started_ranks
from aserve.parallel.processes import RankProcess
from aserve.parallel.topology import (
    Coordinates,
    Meet,
    Outcome,
    Patience,
    RankJobDone,
    RankLoaded,
    RankLost,
    RankUp,
    RunJob,
    ToRank,
    WarmUp,
)

UP_S = 60.0  # for a rank to import its libraries


def load_ranks(
    resolved: Resolved,
    model_dir: Path,
    build: Callable[[Meet], LocalExecutor],
    patience: Patience,
    serve_store: Callable[[socket.socket], object],
) -> ParallelExecutor:
    """Starts the other ranks, and builds the executor of this one by `build`, whose collectives
    have `patience`. What `serve_store` returns serves ranks of several machines as it lives."""
    with started_ranks(resolved, model_dir) as team:
        served: list[object] = []

        def meet() -> Coordinates:
            for rank in team.ranks:
                rank.expect(RankUp, timeout_s=UP_S)
            if team.store is not None:
                served.append(serve_store(team.store))
            return team.place

        own = _built(lambda: build(meet), team.ranks)
        num_pages = tuple(group.num_pages for group in own.spec.groups)
        for rank in team.ranks:
            loaded = rank.expect(RankLoaded)
            if loaded.num_pages != num_pages:
                raise EngineDead(f"ranks have {loaded.num_pages} and {num_pages} pages")
        return ParallelExecutor(own, team.ranks, patience, team.hosts)


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

    def __init__(
        self,
        own: LocalExecutor,
        ranks: Sequence[RankProcess],
        patience: Patience,
        hosts: Hosts | None = None,
    ) -> None:
        self.spec = own.spec
        self.about = f"{own.about}, on {len(ranks) + 1} ranks"
        self.died: asyncio.Future[BaseException]
        self._own = own
        self.patience = patience
        self.ranks = tuple(ranks)
        self.hosts = hosts or Hosts()
        self._loop: asyncio.AbstractEventLoop
        self._num_jobs = 0
        self._answers: dict[int, list[asyncio.Future[ErrorInfo | None]]] = {}  # by job and rank
        self._rows: RowsOfRanks | None = None  # of data-parallel ranks

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.died = loop.create_future()
        self._own.start(loop)
        if self.spec.dp_size > 1:
            self._rows = RowsOfRanks(self.ranks, loop)
        self._own.died.add_done_callback(self._own_died)
        for rank in self.ranks:
            loop.add_reader(rank.socket, functools.partial(self._read, rank))
        for host in self.hosts.members.values():
            loop.add_reader(host.control.socket, functools.partial(self._watch, host))

    async def warm_up(self) -> None:
        self._send(WarmUp())
        await self._own.warm_up()
        self.patience.serve(has_own_rows=self.spec.dp_size > 1)

    def launch(self, *batches: ScheduleBatch) -> Ticket:
        self._send(Launch(batches))
        ticket = self._own.launch(*batches)
        return ticket if self._rows is None else self._rows.joined(ticket)

    def sample(self, sample: Sample) -> Ticket:
        if self._rows is not None and (rank := self._rows.rank_of(sample)):
            self._send(sample, ranks=self.ranks[rank - 1 : rank])
            return self._rows.awaited(rank, sample.iteration)
        if self._rows is None:
            self._send(sample)
        return self._own.sample(sample)

    def resync(self, resync: Resync) -> None:
        self._send(resync)
        self._own.resync(resync)

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        """A profile is that of rank 0. New weights and adapters are written by all ranks, each
        between two steps of its own: no step that runs meanwhile uses them. Each rank checks the
        weights that it has."""
        if not isinstance(job, LoadWeights | LoadLora | CheckWeights):
            return await self._own.run_job(job)
        self._num_jobs += 1
        answers: list[asyncio.Future[ErrorInfo | None]] = [
            self._loop.create_future() for _ in self.ranks
        ]
        self._answers[self._num_jobs] = answers
        self._send(RunJob(self._num_jobs, job))
        try:
            error = await self._own.run_job(job)
            others = [await answer for answer in answers]
        finally:
            del self._answers[self._num_jobs]
        if isinstance(job, CheckWeights):
            return next((each for each in (error, *others) if each is not None), None)
        if any((other is None) != (error is None) for other in others):
            self._die(reason := EngineDead(f"only some ranks could load: {error}, {others}"))
            return reason.info()
        return error

    def close(self) -> None:
        """Runs what was launched to its end on all ranks, then ends them. Where a rank is lost, the
        others will never end their step: they are killed."""
        self._loop.call_soon_threadsafe(self._forget_ranks)
        is_lost = self.died.done() and not self.died.cancelled()
        if is_lost:
            for rank in self.ranks:
                rank.process.kill()
        self.hosts.end(is_over=not is_lost)
        self._own.close()
        for rank in self.ranks:
            rank.close()
        self.hosts.close()

    def _send(self, message: ToRank, *, ranks: Sequence[RankProcess] | None = None) -> None:
        for rank in self.ranks if ranks is None else ranks:
            try:
                rank.send(message)
            except OSError as error:
                self._die(EngineDead(f"rank {rank.number} does not read: {error}"))

    def _read(self, rank: RankProcess) -> None:
        answers = rank.read_answers()
        if answers is None:
            self._loop.remove_reader(rank.socket)
            self._die(EngineDead(rank.ending()))
            return
        for answer in answers:
            if not isinstance(answer, RankJobDone):
                self._complete(rank, answer)
            elif answer.number in self._answers:
                self._answers[answer.number][rank.number - 1].set_result(answer.error)

    def _watch(self, host: RemoteHost) -> None:
        if host.has_ended():
            self._loop.remove_reader(host.control.socket)
            self._die(EngineDead(f"the {host} was lost"))

    def _complete(self, rank: RankProcess, outcome: Outcome) -> None:
        assert self._rows is not None
        try:
            self._rows.complete(rank, outcome)
        except BugError as error:
            self._die(error)

    def _own_died(self, died: asyncio.Future[BaseException]) -> None:
        if not died.cancelled():
            self._die(died.result())

    def _die(self, reason: BaseException) -> None:
        if not self.died.done():
            self.died.set_result(reason)
        for answer in (each for answers in self._answers.values() for each in answers):
            if not answer.done():
                answer.set_result(EngineDead(f"the engine ended: {reason}").info())

    def _forget_ranks(self) -> None:
        sockets = [rank.socket for rank in self.ranks]
        sockets += [host.control.socket for host in self.hosts.members.values()]
        for sock in sockets:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock)
