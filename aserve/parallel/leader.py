"""The executor of rank 0: it sends each launch to the other ranks, then runs it on its own part.

All ranks run the same calls in the same order, which is the order of the calls here. A rank that
has ended, or that a collective waits for in vain, is the death of this executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from aserve.config import Resolved
from aserve.disagg.connect import HasKv
from aserve.engine_core import LocalExecutor
from aserve.errors import BugError, ConfigError, EngineDead, ErrorInfo, MachineSilent
from aserve.messages.changes import CheckWeights, EngineJob, LoadLora, LoadWeights, Profile
from aserve.messages.executor import Ticket
from aserve.messages.step import Launch, Resync, Sample, ScheduleBatch
from aserve.messages.transfers import LayeredKvAccess
from aserve.parallel.hosts import Hosts, RemoteHost
from aserve.parallel.joined import RowsOfRanks
from aserve.parallel.joining import ALIVE_EVERY_S
from aserve.parallel.kv_moves import KvMoves
from aserve.parallel.kv_of_ranks import KvOfRanks
from aserve.parallel.launch import started_ranks
from aserve.parallel.processes import RankProcess
from aserve.parallel.topology import (
    Coordinates,
    KvDone,
    Meet,
    Outcome,
    Patience,
    RankJobDone,
    RankLoaded,
    RankLost,
    RankUp,
    RunJob,
    SetPatience,
    ToRank,
    WarmUp,
)

logger = logging.getLogger(__name__)

LATE_SHARE = 0.05  # of --ranks-timeout, until the ranks that have not loaded are logged
REASON_S = 60.0  # for a rank to tell why it has not met the others
FORGET_S = 1.0  # for the event loop to end what waits for the ranks
# Without a word from a host, which sends one every ALIVE_EVERY_S: until it counts as silent, and
# until the loss of a rank counts as its silence.
SILENT_S, SUSPICIOUS_S = 5.0, 2.5


def load_ranks(
    resolved: Resolved,
    model_dir: Path,
    build: Callable[[Meet], LocalExecutor],
    patience: Patience,
    serve_store: Callable[[socket.socket], object],
    *,
    kv_parts: int | None = None,
) -> ParallelExecutor:
    """Starts the other ranks, and builds the executor of this one by `build`, whose collectives
    have `patience`. What `serve_store` returns serves ranks of several machines as it lives.
    `kv_parts` is that of `ParallelExecutor`."""
    with started_ranks(resolved, model_dir) as team:
        served: list[object] = []

        def meet() -> Coordinates:
            for rank in team.ranks:
                rank.expect(RankUp, timeout_s=team.place.meet_s)
            if team.store is not None:
                served.append(serve_store(team.store))
            return team.place

        own = _built(lambda: build(meet), team.ranks)
        num_pages = tuple(group.num_pages for group in own.spec.groups)
        for rank in team.ranks:
            loaded = _loaded(rank, limit_s=patience.long_s)
            if loaded.num_pages != num_pages:
                raise EngineDead(f"ranks have {loaded.num_pages} and {num_pages} pages")
        return ParallelExecutor(own, team.ranks, patience, team.hosts, kv_parts=kv_parts)


def _loaded(rank: RankProcess, *, limit_s: float) -> RankLoaded:
    late = threading.Timer(LATE_SHARE * limit_s, _log_late, ([rank.number], limit_s))
    late.start()
    try:
        return rank.expect(RankLoaded, timeout_s=limit_s)
    finally:
        late.cancel()


def _log_late(ranks: Sequence[int], limit_s: float) -> None:
    waited_s = LATE_SHARE * limit_s
    logger.warning("ranks load late ranks=%s waited_s=%.0f limit_s=%.0f", ranks, waited_s, limit_s)


def _built(build: Callable[[], LocalExecutor], ranks: Sequence[RankProcess]) -> LocalExecutor:
    """Raises the reason of the rank that was lost, where it has told one."""
    try:
        return build()
    except RankLost as lost:
        for rank in ranks:
            rank.expect(RankLoaded, timeout_s=REASON_S)
        raise EngineDead(str(lost)) from lost


class ParallelExecutor:
    """A `LocalExecutor` over that of rank 0. Its methods are called on the event loop's thread, and
    `close` on any one."""

    def __init__(
        self,
        own: LocalExecutor,
        ranks: Sequence[RankProcess],
        patience: Patience,
        hosts: Hosts | None = None,
        *,
        kv_parts: int | None = None,
    ) -> None:
        """The ranks divide the KV heads into `kv_parts`. None: their KV cannot travel."""
        self.spec = own.spec
        self.about = f"{own.about}, on {len(ranks) + 1} ranks"
        self.died: asyncio.Future[BaseException]
        self._own = own
        self.patience = patience
        self._kv_parts = kv_parts
        self.ranks = tuple(ranks)
        self.hosts = hosts or Hosts()
        self._loop: asyncio.AbstractEventLoop
        self._num_jobs = 0
        self._profiling = asyncio.Lock()
        self._answers: dict[int, list[asyncio.Future[ErrorInfo | None]]] = {}  # by job and rank
        self._rows: RowsOfRanks | None = None  # of data-parallel ranks
        self._moves = KvMoves(self._send_to, self._die)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._moves.start(loop)
        self.died = loop.create_future()
        self._own.start(loop)
        if self.spec.dp_size > 1:
            self._rows = RowsOfRanks(self.ranks, loop)
        self._own.died.add_done_callback(self._own_died)
        self.patience.lost.add_done_callback(self._note_lost)
        for rank in self.ranks:
            loop.add_reader(rank.socket, functools.partial(self._read, rank))
        for host in self.hosts.members.values():
            host.has_ended()  # it has told while the model was loaded that it runs
            host.heard_s = time.monotonic()
            loop.add_reader(host.control.socket, functools.partial(self._watch, host))
        if self.hosts.members:
            self._end_of_silence()

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
            self._send_to(rank, sample)
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
        if isinstance(job, Profile):  # it goes on if nobody waits for it any more
            self._profile = asyncio.create_task(self._profile_patiently(job))
            return await asyncio.shield(self._profile)
        if not isinstance(job, LoadWeights | LoadLora | CheckWeights):
            return await self._own.run_job(job)
        self._num_jobs += 1
        number = self._num_jobs
        answers: list[asyncio.Future[ErrorInfo | None]] = [
            self._loop.create_future() for _ in self.ranks
        ]
        self._answers[number] = answers
        self._send(RunJob(number, job))
        try:
            error = await self._own.run_job(job)
            others = await self._answers_of_all(answers)
        finally:
            self._answers.pop(number, None)
        if self.died.done():
            return EngineDead(f"the engine ended: {self.died.result()}").info()
        failed = [each for each in (error, *others) if each is not None]
        if failed and len(failed) <= len(others) and not isinstance(job, CheckWeights):
            self._die(reason := EngineDead(f"only some ranks could load: {failed[0].message}"))
            return reason.info()
        return failed[0] if failed else None

    async def _answers_of_all(
        self, answers: Sequence[asyncio.Future[ErrorInfo | None]]
    ) -> list[ErrorInfo | None]:
        """A rank that has not answered in time after rank 0 is the death of the engine."""
        limit_s = self.patience.long_s
        _, late = await asyncio.wait(answers, timeout=LATE_SHARE * limit_s)
        if late:
            _log_late([number for number, each in enumerate(answers, 1) if each in late], limit_s)
            _, late = await asyncio.wait(late, timeout=(1 - LATE_SHARE) * limit_s)
        if late:
            first = next(number for number, each in enumerate(answers, 1) if each in late)
            self._die(EngineDead(f"rank {first} has not answered in {limit_s:.0f} s"))
        return [answer.result() for answer in answers]

    async def _profile_patiently(self, job: Profile) -> ErrorInfo | None:
        """Torch begins and ends a profile on the executor's thread, which may take it longer than
        ranks that serve wait for each other."""
        async with self._profiling:
            usual_s = self.patience.seconds
            self._set_patience(self.patience.long_s)
            try:
                return await self._own.run_job(job)
            finally:
                if not self.died.done():
                    self._set_patience(usual_s)

    def _set_patience(self, seconds: float) -> None:
        self.patience.seconds = seconds
        self._send(SetPatience(seconds))

    def kv_access(self) -> LayeredKvAccess:
        own = self._own
        if self._kv_parts is None or not isinstance(own, HasKv):
            raise ConfigError(
                "--disaggregation-mode goes with ranks of --tensor-parallel-size and "
                "--expert-parallel-size, not with stages or data-parallel ranks"
            )
        num_ranks = len(self.ranks) + 1
        return KvOfRanks(
            own.kv_access(), self._moves.ask, num_ranks=num_ranks, num_parts=self._kv_parts
        )

    def close(self) -> None:
        """Runs what was launched to its end on all ranks, then ends them. Where a rank is lost, the
        others will never end their step: they are killed."""
        self._forget_before_closing()
        is_lost = self.died.done() and not self.died.cancelled()
        if is_lost:
            for rank in self.ranks:
                rank.process.kill()
                rank.close()
        self.hosts.end(is_over=not is_lost)
        self._own.close()
        for rank in self.ranks:
            rank.close()
        self.hosts.close()

    def _send_to(self, rank: int, message: ToRank) -> None:
        self._send(message, ranks=self.ranks[rank - 1 : rank])

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
            if isinstance(answer, KvDone):
                self._moves.settle(rank.number, answer)
            elif not isinstance(answer, RankJobDone):
                self._complete(rank, answer)
            elif answer.number in self._answers:
                self._answers[answer.number][rank.number - 1].set_result(answer.error)

    def _watch(self, host: RemoteHost) -> None:
        if host.has_ended():
            self._loop.remove_reader(host.control.socket)
            self._die(EngineDead(f"the {host} was lost"))

    def _end_of_silence(self) -> None:
        """Ends the engine when a host has been silent for too long."""
        if self.died.done() or not self.hosts.members:
            return
        if (host := self.hosts.note_silent(SILENT_S)) is not None:
            self._die(_silence_of(host))
        self._loop.call_later(ALIVE_EVERY_S, self._end_of_silence)

    def _complete(self, rank: RankProcess, outcome: Outcome) -> None:
        assert self._rows is not None
        try:
            self._rows.complete(rank, outcome)
        except BugError as error:
            self._die(error)

    def _own_died(self, died: asyncio.Future[BaseException]) -> None:
        if not died.cancelled():
            self._die(died.result())

    def _note_lost(self, lost: Future[str]) -> None:
        """Any thread may call it. NOTE: a thread that waits for the device may never come back."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._die, EngineDead(lost.result()))

    def _die(self, reason: BaseException) -> None:
        if not self.died.done():
            # Ranks that wait for a silent machine may give up before it counts as silent.
            host = self.hosts.note_silent(SUSPICIOUS_S)
            reason = reason if host is None else _silence_of(host)
            self.died.set_result(reason)
        self._moves.end(f"the engine ended: {reason}")
        self._end_jobs(EngineDead(f"the engine ended: {reason}").info())

    def _end_jobs(self, error: ErrorInfo) -> None:
        while self._answers:
            _, answers = self._answers.popitem()
            for answer in answers:
                if not answer.done():
                    answer.set_result(error)

    def _forget_before_closing(self) -> None:
        """NOTE: the number of a closed socket soon is that of another one, which is never read if
        the loop still waits for the first."""
        if threading.get_ident() == self._thread:
            self._forget_ranks()
            return
        forgotten = threading.Event()

        def forget() -> None:
            self._forget_ranks()
            forgotten.set()

        self._loop.call_soon_threadsafe(forget)
        if not forgotten.wait(FORGET_S):
            logger.warning("ranks closed while the event loop still waits for them")

    def _forget_ranks(self) -> None:
        self._moves.end("the engine closes")
        sockets = [rank.socket for rank in self.ranks]
        sockets += [host.control.socket for host in self.hosts.members.values()]
        for sock in sockets:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock)


def _silence_of(host: RemoteHost) -> MachineSilent:
    silent_s = time.monotonic() - host.heard_s
    return MachineSilent(f"the {host} has said nothing for {silent_s:.0f} s")
