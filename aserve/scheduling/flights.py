"""The flights of a step: how many tokens they bring, and how they move the two clocks of their
sequences (rows.py explains the clocks).

Only the functions of this file, and `restart` of a sequence, write the clocks and the sums over
flights, so that these cannot disagree. check.py counts them anew in debug mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aserve.messages.base import ArrayI32, array_i32, pack_i32
from aserve.messages.executor import DecodeCaps, EngineSpec
from aserve.scheduling.clients import Client
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.rows import Column, Objects, RowTable

# What a step that decodes one token of a row adds to `RowTable.clocks` when it is sent, and when it
# lands.
SENT, LANDED = np.array([[0], [1], [1], [1]]), np.array([[1], [0], [-1], [-1]])


class Spans(NamedTuple):
    """The rows of a step, and the number of tokens that it computes for each."""

    rows: Column
    query_lens: Column

    @property
    def num_tokens(self) -> int:
        return int(np.add.reduce(self.query_lens))

    def join(self, more: Spans) -> Spans:
        rows = np.concatenate([self.rows, more.rows])
        return Spans(rows, np.concatenate([self.query_lens, more.query_lens]))


NOTHING = Spans(np.empty(0, np.int64), np.empty(0, np.int64))


class Step(msgspec.Struct, gc=False, eq=False):
    """A launched step. Its columns have one value for each flight, which is the part of a sequence
    in the step.

    If the span of a flight reaches the last token that exists or is in flight, it samples, and
    brings up to `max_outputs` new tokens, of which the last `num_uncertain` may not come. With
    `max_outputs` the KV of `max_advance` more positions counts, and of one less for each token that
    it brings less.
    """

    iteration: int
    sequences: Objects  # of Sequence
    rows: Column
    query_lens: Column
    num_drafts: Column
    max_advance: Column
    max_outputs: Column
    num_uncertain: Column
    samples: npt.NDArray[np.bool_]
    packed_rows: bytes = b""  # int32
    is_plain: bool = False  # each flight brings one token for certain, and no drafts
    repeat: Repeat | None = None  # of which it is a step

    def of(self, packed_rows: bytes) -> Step:
        """Returns the step as if it had only these of its rows."""
        if packed_rows == self.packed_rows:
            return self
        return self.part(self.indices_of(array_i32(packed_rows)))

    def part(self, indices: Column) -> Step:
        """Returns the step as if it had only these flights."""
        rows = self.rows[indices]
        return Step(
            self.iteration,
            self.sequences[indices],
            rows,
            self.query_lens[indices],
            self.num_drafts[indices],
            self.max_advance[indices],
            self.max_outputs[indices],
            self.num_uncertain[indices],
            self.samples[indices],
            pack_i32(rows),
            self.is_plain,
        )

    def indices_of(self, rows: ArrayI32) -> Column:
        """Returns the indices of these rows in the columns."""
        places = np.zeros(np.maximum.reduce(self.rows) + 1, np.int64)
        places[self.rows] = np.arange(len(self.rows))
        indices: Column = places[rows]
        return indices

    def index_of(self, row: int) -> int:
        return int(self.indices_of(np.array([row], np.int32))[0])

    def is_dropped(self, index: int) -> bool:
        """Returns whether the result of this flight does not count, because its sequence has ended
        or a step failed.
        """
        sequence: Sequence = self.sequences[index]
        return sequence.phase is Phase.ENDED or sequence.first_iteration > self.iteration


class Repeat(msgspec.Struct, gc=False, eq=False):
    """The parts of steps and of their batches that stay the same while each step is the one before
    with one token more (steady.py). They hold for these rows and this spec, from step `first` on,
    as long as nothing else changes one of the rows. Lists have one value for each row.

    Step first + k launches as long as k < `num_launches`, and its tokens end no sequence by their
    number as long as k < `num_quiet`. In it the rows with `fill_phase` = k modulo the page size
    begin a page, and those with `page_phase` have committed one when it lands.
    """

    step: Step
    rows: Column
    running: Column  # `SchedulerState.running_rows`, among which `rows` are all that can go on
    spec: EngineSpec
    first: int  # iteration
    kv_lens: ArrayI32  # before the step that is launched next; steady.py writes it
    positions: Column  # outputs before the token of the first step
    fill_phase: Column
    page_phase: Column
    num_launches: int
    num_quiet: int
    most_pages: int  # that may be asked of each layer group
    ones: bytes  # int32, the length of each span, and the number of tokens that it brings
    minus_rows: bytes  # the ids of tokens that are not known
    places: slice | Column  # `rows`, as a slice where they are all rows from the first on
    request_ids: tuple[str, ...]
    children: bytes  # int32, as `cached_lens`
    cached_lens: bytes
    appends: list[Callable[[int], None]]
    clients: list[tuple[Client, int]]  # each with the number of its rows


def rows_of(sequences: list[Sequence]) -> Column:
    return np.array([sequence.row for sequence in sequences], np.int64)


def new_step(
    table: RowTable, rows: Column, query_lens: Column, *, iteration: int, caps: DecodeCaps
) -> Step:
    """Returns the step that computes `query_lens` tokens of each row. Tokens beyond the known ones
    are drafts.
    """
    remaining = table.remaining[rows]
    num_drafts = num_accepted = np.maximum(query_lens - remaining, 0)
    max_advance = query_lens
    if caps.tree is not None:
        num_accepted = np.array([caps.tree.depth(count) for count in num_drafts.tolist()], np.int64)
        max_advance = query_lens - num_drafts + num_accepted
    has_outputs = (query_lens >= remaining) & (table.max_tokens[rows] > 0)
    max_outputs = (num_accepted + caps.root_len) * has_outputs
    num_uncertain = np.maximum(max_outputs - caps.min_tokens_per_step, 0)
    has_one = np.count_nonzero(max_outputs == 1) == len(rows)
    return Step(
        iteration,
        table.sequences[rows],
        rows,
        query_lens,
        num_drafts,
        max_advance=max_advance,
        max_outputs=max_outputs,
        num_uncertain=num_uncertain,
        samples=max_outputs > 0,
        packed_rows=pack_i32(rows),
        is_plain=has_one and caps.root_len == caps.min_tokens_per_step == 1,
    )


def send(table: RowTable, step: Step, *, stamp: int) -> None:
    """Records the launch of a step. The relay marks what the step stashes with `stamp`."""
    rows, samples = step.rows, step.samples
    table.num_flights[rows] += 1
    table.last_iteration[rows] = step.iteration
    table.written_pages[rows] = table.num_pages[rows]
    table.scheduled_len[rows] += step.max_advance
    table.remaining[rows] += step.max_outputs - step.max_advance
    table.relay_stamp[rows[samples]] = stamp
    table.num_sampling[rows] += samples
    if not step.is_plain and np.count_nonzero(step.num_uncertain):
        table.num_uncertain[rows] += step.num_uncertain


def land(table: RowTable, step: Step, *, advance: Column) -> None:
    """Records the return of a step, or of a part of it, whose sequences still have their rows.
    `advance` is the number of positions whose KV each flight commits; it is `step.max_advance`
    itself where all that was expected has come. The caller has appended the sampled tokens.
    """
    rows = step.rows
    table.num_flights[rows] -= 1
    table.committed_len[rows] += advance
    table.num_sampling[rows] -= step.samples
    table.failures[rows] = 0
    if advance is not step.max_advance:
        table.scheduled_len[rows] += advance - step.max_advance
        table.num_uncertain[rows] -= step.num_uncertain


def send_alike(table: RowTable, rows: slice | Column, *, iteration: int, stamp: int) -> None:
    """Does what `send` does for a step that decodes one token of each of these rows."""
    table.clocks[:, rows] += SENT
    table.last_iteration[rows] = iteration
    table.relay_stamp[rows] = stamp


def land_alike(table: RowTable, rows: slice | Column) -> None:
    """Does what `land` does for such a step, and counts the tokens."""
    table.clocks[:, rows] += LANDED
    table.num_tokens[rows] += 1
    table.failures[rows] = 0


def land_without_row(step: Step, index: int) -> None:
    """Records the return of a flight whose sequence was retracted after the launch: its tokens
    count, but its pages are gone.
    """
    sequence = step.sequences[index]
    sequence.num_flights -= 1
    sequence.num_sampling -= bool(step.max_outputs[index])
    sequence.num_uncertain -= int(step.num_uncertain[index])
    sequence.failures = 0


def drop_flights(sequence: Sequence) -> None:
    """Forgets the flights of a sequence, so that their results do not count."""
    sequence.num_flights = 0
    sequence.num_sampling = 0
    sequence.num_uncertain = 0
    final_len = sequence.tokens.final_len(sequence.committed_len, sequence.block_len)
    goes_back = sequence.is_recurrent and not sequence.has_ended
    sequence.restart(_begin_len(sequence) if goes_back else final_len)


def _begin_len(sequence: Sequence) -> int:
    """Returns the last position of a sequence with recurrent states from which it can go on."""
    states = None if sequence.allocation is None else sequence.allocation.states
    return 0 if states is None else states.begin_len
