"""Who waits, in the order in which they are looked at. Knows nothing of rows, pages or steps."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from aserve.scheduling.request import Sequence

Order = tuple[int, int]


def by_priority(sequence: Sequence) -> Order:
    """Lower priority numbers first, then arrival: a retracted sequence keeps its place."""
    return (sequence.priority, sequence.arrival)


POLICIES: dict[str, Callable[[Sequence], Order]] = {"priority": by_priority}


class WaitingQueue:
    __slots__ = ("_order", "_sequences")

    def __init__(self, policy: str = "priority") -> None:
        self._order = POLICIES[policy]
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=self._order)

    def remove(self, sequence: Sequence) -> None:
        start = bisect.bisect_left(self._sequences, self._order(sequence), key=self._order)
        index = self._sequences.index(sequence, start)
        del self._sequences[index]
