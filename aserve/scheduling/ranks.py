"""Data-parallel ranks: which rows are whose, each rank's part of a step, and where a waiting
sequence goes. With one rank everything here is the identity, but for the decodes that the stages
of a pipeline share. Nothing here changes the state.

A sequence gets its rank when it is admitted, and keeps it until it ends or is retracted. It goes
where the longest prefix of it is cached, and else to the rank whose running rows have the fewest
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from aserve.cache.page_keys import PageKeys
from aserve.messages.executor import EngineSpec
from aserve.scheduling.blocks import cached_prefix
from aserve.scheduling.flights import Step
from aserve.scheduling.request import Sequence
from aserve.scheduling.rows import Column
from aserve.scheduling.state import SchedulerState


def rows_by_rank(state: SchedulerState, rows: Column) -> Iterator[Column]:
    """Yields the rows of each rank, in their order."""
    num_ranks = state.spec.dp_size
    if num_ranks == 1:
        yield rows
        return
    ranks = (rows - 1) % num_ranks
    for rank in range(num_ranks):
        yield rows[ranks == rank]


def next_decodes(state: SchedulerState, ready: Column) -> list[Column]:
    """Returns the decodes of each rank that the next step may have, of those that are ready."""
    return [
        own[: max_decode_rows(state.spec, state.rows.num_taken_of(rank))]
        for rank, own in enumerate(rows_by_rank(state, ready))
    ]


def max_decode_rows(spec: EngineSpec, num_running: int) -> int:
    """Returns the maximum number of decode rows in one step. With lead < depth (a pipeline) the
    rows are spread over the steps in flight.
    """
    return -(-num_running * spec.lead // spec.depth)


def sequences_by_rank(state: SchedulerState, rows: list[Sequence]) -> list[list[Sequence]]:
    num_ranks = state.spec.dp_size
    if num_ranks == 1:
        return [rows]
    return [[row for row in rows if row.rank == rank] for rank in range(num_ranks)]


def step_parts(state: SchedulerState, step: Step) -> list[Step]:
    """Returns each rank's part of a step, some of which may be without rows."""
    if state.spec.dp_size == 1:
        return [step]
    places = np.zeros(state.spec.max_rows + 1, np.int64)
    places[step.rows] = np.arange(len(step.rows))
    return [step.part(places[rows]) for rows in rows_by_rank(state, step.rows)]


def rank_order(
    state: SchedulerState, sequence: Sequence, keys: PageKeys, ranks: Iterable[int]
) -> list[int]:
    """Returns the ranks in the order in which the sequence would have them; those with a free row
    come first.
    """
    order = list(ranks)
    if len(order) < 2:
        return order
    num_tokens = [
        int(state.table.num_tokens[rows].sum()) for rows in rows_by_rank(state, state.running_rows)
    ]

    def place(rank: int) -> tuple[bool, int, int]:
        prefix, _ = cached_prefix(state, sequence, keys, rank=rank)
        return not state.rows.num_free_of(rank), -prefix.num_pages, num_tokens[rank]

    return sorted(order, key=place)
