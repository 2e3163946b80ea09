"""Compiled grammars within a byte budget, and for a while what was wrong with the others.

Must not know how grammars are compiled. Written by the compiler alone, on the loop's thread.
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
    """Least recently used ones go first. What is in use lives on without being counted."""

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
        """One that is larger than the budget is not kept."""
        assert grammar not in self._compiled, "it is compiled once while it is here"
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
