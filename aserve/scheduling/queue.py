"""The waiting sequences, in the order in which they are admitted.

Lower priority numbers come first. Within a priority comes the client that was served least (see
clients.py), and within a client the arrival order: a retracted sequence keeps its place.

NOTE: each (client, priority) has one line, a heap of arrivals, and one valid entry in the heap of
lines. A client's key mostly grows, which makes its entry too low; such an entry is corrected when
it comes to the top. Where a key falls, `reorder` enters the client's lines anew. Every operation
costs O(log n) on average, however many sequences and clients wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TypeAlias

from aserve.scheduling.clients import Client
from aserve.scheduling.request import Sequence

Order: TypeAlias = tuple[int, int, int]  # priority, the client's key, arrival

SPARE_ENTRIES = 64  # entries of lines that are gone, beside as many as there are lines


class _Line:
    """The waiting sequences of one client at one priority."""

    __slots__ = ("arrivals", "client", "entry", "num_waiting", "priority", "queued")

    def __init__(self, client: Client, priority: int) -> None:
        self.client = client
        self.priority = priority
        self.num_waiting = 0
        self.arrivals: list[int] = []  # heap; those that left the queue are dropped at the top
        self.queued: set[int] = set()  # what is in that heap
        self.entry: Order | None = None  # its valid entry in the heap of lines


class WaitingQueue:
    __slots__ = ("_heap", "_lines", "_num_lines", "_sequences")

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}  # by arrival
        self._lines: dict[str, dict[int, _Line]] = {}  # by client and priority
        self._num_lines = 0
        self._heap: list[tuple[Order, str]] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.arrival) is sequence

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._sequences.values())

    @property
    def num_clients(self) -> int:
        return len(self._lines)

    def add(self, sequence: Sequence) -> None:
        client, arrival = sequence.client, sequence.arrival
        lines = self._lines.setdefault(client.client_id, {})
        line = lines.get(sequence.priority)
        if line is None:
            line = lines[sequence.priority] = _Line(client, sequence.priority)
            self._num_lines += 1
        self._sequences[arrival] = sequence
        if arrival not in line.queued:
            line.queued.add(arrival)
            heapq.heappush(line.arrivals, arrival)
        line.num_waiting += 1
        client.num_waiting += 1
        self._enter(line)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.arrival]
        sequence.client.num_waiting -= 1
        lines = self._lines[sequence.client.client_id]
        line = lines[sequence.priority]
        line.num_waiting -= 1
        if not line.num_waiting:
            del lines[sequence.priority]
            self._num_lines -= 1
        if not lines:
            del self._lines[sequence.client.client_id]

    def pop(self) -> Sequence | None:
        """Takes out the sequence that is next in order. A caller that cannot admit it gives it back
        by `add`, and it keeps its place.
        """
        while self._heap:
            order, client_id = self._heap[0]
            line = self._lines.get(client_id, {}).get(order[0])
            if line is None or line.entry != order:
                heapq.heappop(self._heap)
                continue
            now = self._order(line)
            if now == order:
                sequence = self._sequences[now[2]]
                self.remove(sequence)
                return sequence
            line.entry = now
            heapq.heapreplace(self._heap, (now, client_id))
        return None

    def reorder(self, client: Client) -> None:
        """To be called when a client's key fell."""
        for line in self._lines.get(client.client_id, {}).values():
            self._enter(line)

    def _enter(self, line: _Line) -> None:
        """Enters a line anew if it comes before its present entry."""
        order = self._order(line)
        if line.entry is not None and line.entry <= order:
            return
        line.entry = order
        heapq.heappush(self._heap, (order, line.client.client_id))
        if len(self._heap) > 2 * self._num_lines + SPARE_ENTRIES:
            self._compact()

    def _compact(self) -> None:
        """PERF: once in as many calls of `_enter` as there are lines, so that its cost is constant
        on average.
        """
        self._heap = [
            (line.entry, client_id)
            for client_id, lines in self._lines.items()
            for line in lines.values()
            if line.entry is not None
        ]
        heapq.heapify(self._heap)

    def _is_in(self, line: _Line, arrival: int) -> bool:
        """NOTE: a sequence whose priority was changed is in the queue, but in another line."""
        sequence = self._sequences.get(arrival)
        return sequence is not None and sequence.priority == line.priority

    def _order(self, line: _Line) -> Order:
        """Returns the order of its first sequence. A line has at least one."""
        while not self._is_in(line, line.arrivals[0]):
            line.queued.discard(heapq.heappop(line.arrivals))
        return (line.priority, line.client.key, line.arrivals[0])
