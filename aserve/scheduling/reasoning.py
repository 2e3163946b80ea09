"""Follows the reasoning of one sequence through its outputs, and says when its limit is reached.

Where reasoning begins and ends is decided from token ids alone, so that the same outputs always
give the same answer, however they were cut into steps. The tokens of the tags do not count.
"""

from __future__ import annotations

from collections.abc import Iterable

from aserve.messages.requests import ReasoningIds

MAX_BEFORE = 16  # outputs among which reasoning begins if at all: its tag and whitespace before it


class Reasoning:
    """`max_tokens` is the limit, None for none; a client may set it while the sequence runs."""

    __slots__ = (
        "_closes",
        "_end",
        "_last",
        "_max_last",
        "_opens",
        "_start",
        "is_over",
        "max_tokens",
        "num_read",
    )

    def __init__(self, ids: ReasoningIds) -> None:
        self._opens = ids.opens
        self._closes = ids.closes
        self._max_last = max(map(len, (*ids.opens, *ids.closes)))
        self._last: tuple[int, ...] = ()  # outputs that may be a part of a tag
        self._start = 0 if ids.is_open else None  # outputs before the first reasoning token
        self._end: int | None = None  # outputs before the closing tag
        self.max_tokens = ids.max_tokens
        self.is_over = False  # it has ended, or will never begin
        self.num_read = 0  # outputs

    @property
    def is_limited(self) -> bool:
        return self.max_tokens is not None and not self.is_over

    @property
    def is_due(self) -> bool:
        """Whether the reasoning must end before the next output."""
        if self.max_tokens is None or self.is_over or self._start is None:
            return False
        return self.num_read - self._start >= self.max_tokens

    @property
    def num_tokens(self) -> int:
        """The number of reasoning tokens so far."""
        if self._start is None:
            return 0
        return (self.num_read if self._end is None else self._end) - self._start

    def read_rest(self, outputs: Iterable[int]) -> None:
        """Reads the outputs behind those that were read, whatever the limit says."""
        for token_id in outputs:
            self._read(token_id)

    def read_to_limit(self, new_ids: list[int]) -> int:
        """Reads new outputs up to the limit, and returns how many it read."""
        for number, token_id in enumerate(new_ids):
            if self.is_due:
                return number
            self._read(token_id)
        return len(new_ids)

    def missing_ids(self) -> tuple[int, ...]:
        """Returns the tokens of the closing tag that the outputs do not end with already."""
        tag = self._closes[0]
        return next(tag[n:] for n in range(len(tag) - 1, -1, -1) if self._ends_with(tag[:n]))

    def _read(self, token_id: int) -> None:
        self.num_read += 1
        self._last = (*self._last, token_id)[-self._max_last :]
        if self._start is None:
            if any(map(self._ends_with, self._opens)):
                self._start, self._last = self.num_read, ()
            elif self.num_read >= MAX_BEFORE:
                self.is_over = True
        elif not self.is_over and (tag := next(filter(self._ends_with, self._closes), None)):
            self.is_over = True
            self._end = self.num_read - len(tag)

    def _ends_with(self, tag: tuple[int, ...]) -> bool:
        start = len(self._last) - len(tag)
        return start >= 0 and self._last[start:] == tag


def forced_ids(ids: ReasoningIds | None, outputs: list[int]) -> dict[int, int]:
    """Returns the tokens that the limit forces among these outputs, by position."""
    if ids is None:
        return {}
    reasoning = Reasoning(ids)
    num_read = reasoning.read_to_limit(outputs)
    forced = reasoning.missing_ids() if reasoning.is_due else ()
    return {num_read + i: forced[i] for i in range(min(len(forced), len(outputs) - num_read))}
