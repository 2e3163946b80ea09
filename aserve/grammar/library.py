"""Compiles each requested grammar once, in worker processes, and caches it.

At most `num_workers` grammars compile at once, each within its time limit. The others wait, and
clients are served by round robin. When all workers are busy, one more may run for a client that has
none. So a grammar never waits behind another client's queue, and it waits for another client's
compilation only if more clients compile than there are workers. A worker process is started when
one is needed and none is idle. All state is written on the loop's thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from aserve.errors import AserveError, Cancelled, ClientError, InvalidRequest, QueueFull
from aserve.fair_queue import FairQueue
from aserve.grammar.cache import GrammarCache
from aserve.grammar.compile import Vocabulary
from aserve.grammar.process import CompileProcess
from aserve.grammar.source_limits import MAX_PENDING, MAX_PER_CLIENT, check_size
from aserve.grammar.workers import CompileJob, CompileLimits, Usable, Workers
from aserve.messages.requests import Grammar
from aserve.observability.reports import (
    GrammarCompiled,
    GrammarKnown,
    GrammarReport,
    StartupStage,
)

logger = logging.getLogger(__name__)


class _Pending:
    """A grammar that is being compiled or waits for a worker, with the number of its waiters."""

    __slots__ = ("began_s", "client", "future", "is_running", "job", "num_waiting")

    def __init__(self, job: CompileJob, *, client: str, began_s: float) -> None:
        self.job = job
        self.client = client
        self.began_s = began_s
        self.future: asyncio.Future[Usable] = asyncio.get_running_loop().create_future()
        self.is_running = False
        self.num_waiting = 0


class GrammarLibrary:
    """Calls `vocabulary` in a thread, when the first grammar comes."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        limits: CompileLimits,
        *,
        cache_bytes: int,
        report: Callable[[GrammarReport | StartupStage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._clock = clock
        self._num_workers = limits.num_workers
        self._cache: GrammarCache[Usable] = GrammarCache(cache_bytes, clock=clock)
        self._pending: dict[Grammar, _Pending] = {}
        self._queue: FairQueue[_Pending] = FairQueue()  # those that do not run, by client
        self._running: Counter[str] = Counter()  # by client
        self._workers = Workers(vocabulary, limits, clock=clock)
        self._threads = ThreadPoolExecutor(limits.num_workers + 1, thread_name_prefix="grammar")

    def adopt(self, worker: CompileProcess) -> asyncio.Future[None]:
        """Takes over a worker that was started before, so that the first grammar waits for no
        imports. Reports when it is ready, which a thread waits for.
        """
        adopting = asyncio.get_running_loop().run_in_executor(self._threads, self._adopt, worker)
        adopting.add_done_callback(lambda _: self._report(StartupStage("started")))
        return adopting

    def _adopt(self, worker: CompileProcess) -> None:
        try:
            self._workers.adopt(worker)
        except AserveError as error:
            worker.close()
            logger.info("no grammar worker was started: %s", error)

    async def compiled(self, grammar: Grammar, *, client: str = "") -> Usable:
        """Returns the compiled grammar. Raises the ClientError of an invalid one, or QueueFull.

        When the last waiter is cancelled, the compilation is given up.
        """
        if not self._num_workers:
            raise InvalidRequest(
                f"Unsupported value for '{grammar.param}': this server has no structured output, "
                "because it was started with --grammar-workers 0.",
                param=grammar.param,
                code="unsupported_value",
            )
        known = self._cache.get(grammar)
        pending = self._pending.get(grammar)
        if known is not None or pending is not None:
            self._report(GrammarKnown())
        if isinstance(known, ClientError):
            raise known
        if known is not None:
            return known
        pending = pending or self._begin(grammar, client)
        pending.num_waiting += 1
        try:
            return await asyncio.shield(pending.future)
        finally:
            pending.num_waiting -= 1
            if not pending.num_waiting and not pending.future.done():
                self._give_up(pending)

    def close(self) -> None:
        """Ends all processes and threads. It blocks while this process compiles an accepted
        grammar.
        """
        self._workers.close()
        self._threads.shutdown(cancel_futures=True)

    def _begin(self, grammar: Grammar, client: str) -> _Pending:
        check_size(grammar)
        self._check_room(client)
        pending = _Pending(CompileJob(grammar), client=client, began_s=self._clock())
        self._pending[grammar] = pending
        self._queue.push(client, pending)
        self._run_more()
        return pending

    def _check_room(self, client: str) -> None:
        num_own = sum(pending.client == client for pending in self._pending.values())
        if num_own >= MAX_PER_CLIENT:
            what = f"{num_own} grammars of this client wait to be compiled, the most of one client"
        elif len(self._pending) >= MAX_PENDING:
            what = f"{len(self._pending)} grammars wait to be compiled, the most in all"
        else:
            return
        raise QueueFull(f"{what}. Try again later.", retry_after_s=1.0)

    def _run_more(self) -> None:
        while (pending := self._queue.pop(self._may_run)) is not None:
            pending.is_running = True
            self._running[pending.client] += 1
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._threads, self._workers.compile, pending.job)
            work.add_done_callback(functools.partial(self._on_compiled, pending))

    def _may_run(self, client: str) -> bool:
        """Returns whether a worker is free, or the spare one is and the client has none."""
        total = self._running.total()
        is_spare = total == self._num_workers and not self._running[client]
        return total < self._num_workers or is_spare

    def _give_up(self, pending: _Pending) -> None:
        del self._pending[pending.job.grammar]
        pending.future.cancel()
        if pending.is_running:
            self._workers.cancel(pending.job)
        else:
            self._queue.remove(pending.client, pending)

    def _on_compiled(self, pending: _Pending, work: asyncio.Future[Usable]) -> None:
        self._running[pending.client] -= 1
        self._running += Counter()  # forgets those at 0
        error = Cancelled("the server ends") if work.cancelled() else work.exception()
        if not pending.future.done():
            self._settle(pending, error or work.result())
        self._run_more()

    def _settle(self, pending: _Pending, outcome: Usable | BaseException) -> None:
        grammar = pending.job.grammar
        del self._pending[grammar]
        if isinstance(outcome, Usable):
            self._cache.keep(grammar, outcome)
            pending.future.set_result(outcome)
            self._report(GrammarCompiled("ok", self._clock() - pending.began_s))
            return
        if isinstance(outcome, ClientError):
            self._cache.keep_failure(grammar, outcome)
        pending.future.set_exception(outcome)
        code = outcome.error_code if isinstance(outcome, AserveError) else "internal_error"
        self._report(GrammarCompiled(code, self._clock() - pending.began_s))
