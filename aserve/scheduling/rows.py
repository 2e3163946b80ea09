"""The lengths and counts of the running sequences as columns, which are arrays with a value per
row.

A tick does the same thing to most rows, so choosing, launching and committing a step are numpy
operations on whole columns. A `Sequence` reads and writes its own values by `Cell`. While it has a
row, they stand in the columns; while it has none, they stand in an array of its own.

A sequence has two clocks. `committed_len` is the KV length that came back from the device;
`scheduled_len` is the KV length once everything in flight is back, which is exact, or an upper
bound while it is not certain how many tokens come back. A flight takes the second clock ahead when
it is sent, and the first when it lands (flights.py).
"""

from __future__ import annotations

from array import array
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from aserve.scheduling.token_log import TokenLog

Column: TypeAlias = npt.NDArray[np.int64]
Objects: TypeAlias = npt.NDArray[np.object_]
Cells: TypeAlias = "array[int] | memoryview[int]"

NEVER = np.iinfo(np.int64).max  # the first iteration of a row without a sequence


class RowTable:
    """The columns, by row. Row 0 is padding. flights.py writes the lengths and the counts of
    flights. `num_tokens` and `last_id` are written where tokens come (token_writes.py,
    repeated_results.py with flights.py, forced.py), `num_pages` where pages are taken (select.py,
    loads.py, transfers.py).
    """

    committed_len: Column
    scheduled_len: Column
    num_flights: Column  # steps in flight that name it
    num_sampling: Column  # those of them that sample it
    # tokens that exist or are in flight and have no KV scheduled: `DecodeCaps.root_len` for a
    # decode, more for a prefill, 0 when nothing will be sampled after the prompt
    remaining: Column
    num_uncertain: Column  # tokens that these may bring or not
    first_iteration: Column  # results of earlier steps do not count for it
    last_iteration: Column  # the last step that named it: the row that waited longest goes first
    relay_stamp: Column  # of the last launched step that samples this row, 0 after a row init
    written_pages: Column  # page table entries that the device has; 0: it does not know the row yet
    # 1 if no further step may name it now: its last token is known, or it awaits a mask or its KV
    is_blocked: Column
    # prompt tokens that its client has not been charged for; known from its first admission on
    unpaid: Column
    failures: Column  # consecutive failed steps that named only this row
    cached_len: Column  # prompt tokens from the prefix cache at the first admission, -1 before it
    doubt: Column  # whether drafts pay for this row (draft_length.py writes these three)
    num_pauses: Column  # from drafting, one after the other
    drafts_from: Column  # the number of tokens from which on it drafts
    # What draft_choice.py knows of a row, where the times of steps were measured.
    num_cut: Column  # drafts by which its next window is shorter than it may be
    num_skipped: Column  # last steps that skipped the drafter, one after the other, as far as noted
    num_missed: Column  # tokens without KV of the drafter, because their steps skipped it
    match_level: Column  # of the match whose continuation it drafts (ngram_matches.py)
    accepted: Column  # drafts, in parts of SCALE, old ones counting less
    rejected: Column  # windows that ended with a rejected draft, likewise
    num_attempts: Column  # windows tried though drafts did not seem to pay, one after the other
    next_attempt: Column  # the number of tokens from which on another one is tried

    # Copies of what the sequence, its tokens and its pages say, to compute whole columns with.
    num_tokens: Column
    last_id: Column  # the last token
    num_pages: Column
    child: Column
    max_len: Column
    max_kv_len: Column
    max_tokens: Column
    whole_len: Column  # tokens up to which a prompt is not cut into chunks
    has_mask: Column
    look_len: Column  # tokens from which on each result of it is looked at
    max_step_tokens: Column  # that a decode of it computes (the last of the copies)

    def __init__(self, max_rows: int) -> None:
        self._values = np.zeros((len(NAMES), max_rows + 1), np.int64)
        for name, column in zip(NAMES, self._values, strict=True):
            setattr(self, name, column)
        self.first_iteration[:] = NEVER
        self.most_step_tokens = 0  # that a decode of any sequence computes which had a row
        self.clocks = self._values[:NUM_CLOCKS]  # the first columns: the clocks, and the flights
        # The objects of each row, so that a list of them is made without a loop.
        self.sequences: Objects = np.full(max_rows + 1, None, np.object_)
        self.request_ids: Objects = np.full(max_rows + 1, None, np.object_)
        self.clients: Objects = np.full(max_rows + 1, None, np.object_)
        # The methods that append an output.
        self.appends: Objects = np.full(max_rows + 1, None, np.object_)

    def enter(self, row: int, cells: Cells, *, copies: tuple[int, ...]) -> Cells:
        """Moves the values of a sequence into the columns. Returns a view of them, which is where
        the sequence keeps its cells from now on.
        """
        values = self._values[:, row]
        values[:] = (*cells, *copies)
        self.most_step_tokens = max(self.most_step_tokens, copies[-1])
        return values.data

    def leave(self, row: int, cells: Cells) -> Cells:
        """Moves the values of a sequence out of the columns, into an array of its own."""
        own = array("q", self._values[:NUM_CELLS, row].tobytes())
        self.first_iteration[row] = NEVER
        self.remaining[row] = 0
        for objects in (self.sequences, self.request_ids, self.clients, self.appends):
            objects[row] = None
        return own


NAMES = tuple(RowTable.__annotations__)
NUM_CLOCKS = NAMES.index("remaining")
NUM_CELLS, REMAINING = NAMES.index("num_tokens"), NAMES.index("remaining")
COMMITTED_LEN, SCHEDULED_LEN = NAMES.index("committed_len"), NAMES.index("scheduled_len")
FIRST_ITERATION, LAST_ITERATION = NAMES.index("first_iteration"), NAMES.index("last_iteration")
NUM_FLIGHTS = NAMES.index("num_flights")
# All sequences share these cells until one of their own is written, so most that wait have none.
NO_CELLS: Cells = memoryview(
    array("q", [-(name == "cached_len") for name in NAMES[:NUM_CELLS]]).tobytes()
).cast("q")


class HasCells(Protocol):
    cells: Cells
    tokens: TokenLog


def restart_cells(sequence: HasCells, committed_len: int) -> None:
    """Writes the clocks of a sequence that has so many positions of KV and nothing in flight."""
    cells = _make_cells(sequence) if sequence.cells is NO_CELLS else sequence.cells
    assert not cells[NUM_FLIGHTS]
    cells[COMMITTED_LEN] = cells[SCHEDULED_LEN] = committed_len
    cells[REMAINING] = sequence.tokens.num - committed_len
    cells[FIRST_ITERATION] = cells[LAST_ITERATION] + 1


def _make_cells(sequence: HasCells) -> Cells:
    """Gives a sequence cells of its own."""
    cells = sequence.cells = array("q", NO_CELLS)
    cells[REMAINING] = sequence.tokens.num
    return cells


class Cell:
    """An int of a sequence that stands in the column of this name while the sequence has a row."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._index = NAMES.index(name)

    def __get__(self, sequence: HasCells, owner: type) -> int:
        return sequence.cells[self._index]

    def __set__(self, sequence: HasCells, value: int) -> None:
        cells = sequence.cells
        if cells is NO_CELLS:
            cells = _make_cells(sequence)
        cells[self._index] = value


class RemainingCell(Cell):
    """The cell of `remaining`, which begins as the number of all tokens."""

    def __get__(self, sequence: HasCells, owner: type) -> int:
        return (
            sequence.tokens.num if sequence.cells is NO_CELLS else super().__get__(sequence, owner)
        )
