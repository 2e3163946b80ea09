"""Caches compiled grammars within a byte budget, and the errors of invalid ones for a minute.

The grammar library writes it, on the loop's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from aserve.errors import ClientError
from aserve.messages.requests import Grammar

FAILURE_S = 60.0
MAX_FAILURES = 256


class Sized(Protocol):
    @property
    def memory_size_bytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


@dataclass(frozen=True, slots=True)
class _Failure:
    error: ClientError
    until_s: float


class GrammarCache(Generic[T]):
    """An LRU cache. A grammar that is evicted while it is in use lives on without being counted."""

    def __init__(self, budget_bytes: int, *, clock: Callable[[], float]) -> None:
        self.size_bytes = 0
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._compiled: OrderedDict[Grammar, T] = OrderedDict()
        self._failures: OrderedDict[Grammar, _Failure] = OrderedDict()

    def get(self, grammar: Grammar) -> T | ClientError | None:
        failure = self._failures.get(grammar)
        if failure is not None and self._clock() < failure.until_s:
            return failure.error
        compiled = self._compiled.get(grammar)
        if compiled is not None:
            self._compiled.move_to_end(grammar)
        return compiled

    def keep(self, grammar: Grammar, compiled: T) -> None:
        """Adds a grammar, and evicts until the budget holds, which may evict the new one itself."""
        assert grammar not in self._compiled, "a cached grammar is not compiled again"
        self._compiled[grammar] = compiled
        self.size_bytes += compiled.memory_size_bytes
        while self.size_bytes > self._budget_bytes:
            _, oldest = self._compiled.popitem(last=False)
            self.size_bytes -= oldest.memory_size_bytes

    def keep_failure(self, grammar: Grammar, error: ClientError) -> None:
        self._failures[grammar] = _Failure(error, self._clock() + FAILURE_S)
        self._failures.move_to_end(grammar)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)
