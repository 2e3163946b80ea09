"""Every grammar that requests ask for, compiled once, in worker processes.

Must not know requests. The cache and what is being compiled are written on the loop's thread.

The bound: `num_workers` grammars compile at once, the others wait in order, and each takes its time
limit at most. So one that explodes delays nobody while another worker is free, and a grammar behind
k of them waits for k / num_workers limits. A worker is started when one is needed and none is idle.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from aserve.errors import AserveError, ClientError, InvalidRequest, QueueFull
from aserve.grammar.cache import GrammarCache
from aserve.grammar.frames import Vocabulary
from aserve.grammar.workers import CompileLimits, Workers
from aserve.messages import Grammar
from aserve.observability.reports import GrammarCompiled, GrammarKnown, GrammarReport

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

MAX_SOURCE = 200_000  # characters
MAX_DEPTH = 64  # of brackets in a schema
MAX_COMING = 64  # grammars that are being compiled or wait for it
STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


class GrammarLibrary:
    """`vocabulary` is asked for in a thread, when the first grammar comes."""

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
        self._cache: GrammarCache[CompiledGrammar] = GrammarCache(cache_bytes, clock=clock)
        self._coming: dict[Grammar, asyncio.Future[CompiledGrammar]] = {}
        self._workers = Workers(vocabulary, limits, clock=clock)
        self._threads = ThreadPoolExecutor(limits.num_workers, thread_name_prefix="grammar")

    async def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """Raises the ClientError of a grammar that is no good, or QueueFull."""
        known = self._cache.get(grammar)
        coming = self._coming.get(grammar)
        if known is not None or coming is not None:
            self._report(GrammarKnown())
        if isinstance(known, ClientError):
            raise known
        if known is not None:
            return known
        return await asyncio.shield(coming or self._begin(grammar))

    def close(self) -> None:
        """Blocks for milliseconds; afterwards no process and no thread is left."""
        self._workers.close()
        self._threads.shutdown(cancel_futures=True)

    def _begin(self, grammar: Grammar) -> asyncio.Future[CompiledGrammar]:
        check_size(grammar)
        if len(self._coming) >= MAX_COMING:
            raise QueueFull(
                f"{MAX_COMING} grammars wait to be compiled. Try again later.", retry_after_s=1.0
            )
        loop = asyncio.get_running_loop()
        coming = loop.run_in_executor(self._threads, self._workers.compile, grammar)
        self._coming[grammar] = coming
        coming.add_done_callback(functools.partial(self._came, grammar, self._clock()))
        return coming

    def _came(
        self, grammar: Grammar, began_s: float, coming: asyncio.Future[CompiledGrammar]
    ) -> None:
        del self._coming[grammar]
        if coming.cancelled():
            return
        error = coming.exception()
        outcome = "ok"
        if error is None:
            self._cache.keep(grammar, coming.result())
        elif isinstance(error, ClientError):
            self._cache.keep_failure(grammar, error)
        if error is not None:
            outcome = error.error_code if isinstance(error, AserveError) else "internal_error"
        self._report(GrammarCompiled(outcome, self._clock() - began_s))


def check_size(grammar: Grammar) -> None:
    """What is refused without any work."""
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
    """The deepest level of brackets in JSON, which need not be valid."""
    depth = deepest = 0
    for found in STRING_OR_BRACKET.finditer(text):
        bracket = found[0]
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest
