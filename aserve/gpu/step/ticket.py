"""`StepTicket`: a launched step as an awaitable, with its result, its published lengths and one
future per row.

Tickets live on the event loop's thread. The waiter posts the callbacks that complete them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

import numpy as np

from aserve.errors import BugError, StepError
from aserve.messages.base import array_i32
from aserve.messages.executor import Ticket
from aserve.messages.results import SampleResult, SeqLens, StepFailed, StepResult

T = TypeVar("T")
Outcome = StepResult | SampleResult | StepFailed
ReadLens = Callable[[], SeqLens]


class StepTicket:
    """Implements messages.Ticket. A failure is a value, not an exception, so that asyncio does not
    complain about a failed ticket that nobody awaits."""

    __slots__ = ("_lens", "_outcome", "iteration")

    def __init__(self, iteration: int, loop: asyncio.AbstractEventLoop) -> None:
        self.iteration = iteration
        self._outcome: _Shared[Outcome] = _Shared(loop)
        self._lens: _Shared[ReadLens | StepFailed] = _Shared(loop)

    @property
    def outcome(self) -> asyncio.Future[Outcome]:
        """The future itself, for use with asyncio.wait. It must not be cancelled."""
        return self._outcome.first

    @property
    def seq_lens(self) -> Awaitable[SeqLens]:
        return _PublishedLens(self._lens)

    def __getitem__(self, row: int) -> RowTokens:
        return RowTokens(self, row)

    def __await__(self) -> Generator[Any, None, Outcome]:
        return self._outcome.__await__()

    def publish(self, lens: ReadLens | StepFailed) -> None:
        """PERF: `lens` is a function, because in most steps nobody asks for the lengths."""
        if not self._lens.first.done():
            self._lens.settle(lens)

    def complete(self, outcome: Outcome) -> None:
        """Call it after the lengths were published. A failure completes the lengths as well."""
        if isinstance(outcome, StepFailed):
            self.publish(outcome)
        self._outcome.settle(outcome)


class RowTokens:
    """Implements messages.TokenFuture: the tokens that one step gives one row."""

    __slots__ = ("_ticket", "iteration", "row")

    def __init__(self, ticket: Ticket, row: int) -> None:
        self._ticket = ticket
        self.iteration = ticket.iteration
        self.row = row

    @property
    def placeholder(self) -> int:
        return -self.row

    def __await__(self) -> Generator[Any, None, tuple[int, ...]]:
        outcome = yield from self._ticket.__await__()
        if isinstance(outcome, StepFailed):
            raise StepError(outcome.error.message)
        return _tokens_of(outcome, self.row)


class _PublishedLens:
    __slots__ = ("_lens",)

    def __init__(self, lens: _Shared[ReadLens | StepFailed]) -> None:
        self._lens = lens

    def __await__(self) -> Generator[Any, None, SeqLens]:
        lens = yield from self._lens.__await__()
        if isinstance(lens, StepFailed):
            raise StepError(lens.error.message)
        return lens()


class _Shared(Generic[T]):
    """A future with any number of awaiters. Cancelling one of them does not affect the others.

    PERF: with asyncio.shield an awaiter wakes one loop iteration later; where an iteration took
    0.5 ms, a token took 0.5 ms longer at p99 (bench relay).
    """

    __slots__ = ("_others", "first")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first: asyncio.Future[T] = loop.create_future()
        self._others: list[asyncio.Future[T]] = []

    def settle(self, value: T) -> None:
        for future in (self.first, *self._others):
            if not future.done():
                future.set_result(value)

    def __await__(self) -> Generator[Any, None, T]:
        if self.first.done():
            return self.first.result()
        own: asyncio.Future[T] = self.first.get_loop().create_future()
        self._others.append(own)
        return (yield from own.__await__())


def _tokens_of(result: StepResult | SampleResult, row: int) -> tuple[int, ...]:
    rows = array_i32(result.rows)
    if row not in rows:
        raise BugError(f"step {result.iteration} samples no row {row}; it samples {rows}")
    index = int(np.flatnonzero(rows == row)[0])
    ends = np.cumsum(array_i32(result.counts))
    start = int(ends[index - 1]) if index else 0
    return tuple(int(token) for token in array_i32(result.tokens)[start : ends[index]])
