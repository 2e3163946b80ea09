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
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from aserve.errors import AserveError, Cancelled, ClientError, InvalidRequest, QueueFull
from aserve.grammar.cache import GrammarCache
from aserve.grammar.compile import Vocabulary
from aserve.grammar.fair_queue import FairQueue
from aserve.grammar.workers import CompileJob, CompileLimits, Usable, Workers
from aserve.messages.requests import Grammar
from aserve.observability.reports import GrammarCompiled, GrammarKnown, GrammarReport

MAX_SOURCE = 200_000  # characters
MAX_DEPTH = 64  # of brackets in a schema
MAX_COMING = 64  # grammars that are being compiled or wait for it
MAX_OF_CLIENT = 32  # and those of one client
STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


class _Coming:
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
        report: Callable[[GrammarReport], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._clock = clock
        self._num_workers = limits.num_workers
        self._cache: GrammarCache[Usable] = GrammarCache(cache_bytes, clock=clock)
        self._coming: dict[Grammar, _Coming] = {}
        self._queue: FairQueue[_Coming] = FairQueue()  # those that do not run, by client
        self._running: Counter[str] = Counter()  # by client
        self._workers = Workers(vocabulary, limits, clock=clock)
        self._threads = ThreadPoolExecutor(limits.num_workers + 1, thread_name_prefix="grammar")

    async def compiled(self, grammar: Grammar, *, client: str = "") -> Usable:
        """Returns the compiled grammar. Raises the ClientError of an invalid one, or QueueFull.

        When the last waiter is cancelled, the compilation is given up.
        """
        known = self._cache.get(grammar)
        coming = self._coming.get(grammar)
        if known is not None or coming is not None:
            self._report(GrammarKnown())
        if isinstance(known, ClientError):
            raise known
        if known is not None:
            return known
        coming = coming or self._begin(grammar, client)
        coming.num_waiting += 1
        try:
            return await asyncio.shield(coming.future)
        finally:
            coming.num_waiting -= 1
            if not coming.num_waiting and not coming.future.done():
                self._give_up(coming)

    def close(self) -> None:
        """Ends all processes and threads. It blocks while this process compiles an accepted
        grammar.
        """
        self._workers.close()
        self._threads.shutdown(cancel_futures=True)

    def _begin(self, grammar: Grammar, client: str) -> _Coming:
        check_size(grammar)
        self._check_room(client)
        coming = _Coming(CompileJob(grammar), client=client, began_s=self._clock())
        self._coming[grammar] = coming
        self._queue.push(client, coming)
        self._run_more()
        return coming

    def _check_room(self, client: str) -> None:
        num_own = sum(coming.client == client for coming in self._coming.values())
        if num_own >= MAX_OF_CLIENT:
            what = f"{num_own} grammars of this client wait to be compiled, the most of one client"
        elif len(self._coming) >= MAX_COMING:
            what = f"{len(self._coming)} grammars wait to be compiled, the most in all"
        else:
            return
        raise QueueFull(f"{what}. Try again later.", retry_after_s=1.0)

    def _run_more(self) -> None:
        while (coming := self._queue.pop(self._may_run)) is not None:
            coming.is_running = True
            self._running[coming.client] += 1
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._threads, self._workers.compile, coming.job)
            work.add_done_callback(functools.partial(self._came, coming))

    def _may_run(self, client: str) -> bool:
        """Returns whether a worker is free, or the spare one is and the client has none."""
        total = self._running.total()
        is_spare = total == self._num_workers and not self._running[client]
        return total < self._num_workers or is_spare

    def _give_up(self, coming: _Coming) -> None:
        del self._coming[coming.job.grammar]
        coming.future.cancel()
        if coming.is_running:
            self._workers.cancel(coming.job)
        else:
            self._queue.remove(coming.client, coming)

    def _came(self, coming: _Coming, work: asyncio.Future[Usable]) -> None:
        self._running[coming.client] -= 1
        self._running += Counter()  # forgets those at 0
        error = Cancelled("the server ends") if work.cancelled() else work.exception()
        if not coming.future.done():
            self._settle(coming, error or work.result())
        self._run_more()

    def _settle(self, coming: _Coming, outcome: Usable | BaseException) -> None:
        grammar = coming.job.grammar
        del self._coming[grammar]
        if isinstance(outcome, Usable):
            self._cache.keep(grammar, outcome)
            coming.future.set_result(outcome)
            self._report(GrammarCompiled("ok", self._clock() - coming.began_s))
            return
        if isinstance(outcome, ClientError):
            self._cache.keep_failure(grammar, outcome)
        coming.future.set_exception(outcome)
        code = outcome.error_code if isinstance(outcome, AserveError) else "internal_error"
        self._report(GrammarCompiled(code, self._clock() - coming.began_s))


def check_size(grammar: Grammar) -> None:
    """Raises InvalidRequest for a source that is too long or nested too deep."""
    size = len(grammar.source)
    if size > MAX_SOURCE:
        raise InvalidRequest(
            f"Invalid '{grammar.param}': it has {size} characters, more than {MAX_SOURCE}.",
            param=grammar.param,
            code="string_above_max_length",
        )
    depth = nesting(grammar.source) if grammar.kind == "json_schema" else 0
    if depth > MAX_DEPTH:
        raise InvalidRequest(
            f"Invalid '{grammar.param}': the schema is nested {depth} levels deep, "
            f"more than {MAX_DEPTH}.",
            param=grammar.param,
            code="schema_too_deep",
        )


def nesting(text: str) -> int:
    """Returns the deepest level of brackets in JSON, which need not be valid."""
    depth = deepest = 0
    for found in STRING_OR_BRACKET.finditer(text):
        bracket = found[0]
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest
