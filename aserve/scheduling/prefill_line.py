"""The order in which prefills share a step's tokens, and for whom any are left."""

from __future__ import annotations

from bisect import bisect_left, insort

from aserve.scheduling.ranks import rows_by_rank, sequences_by_rank
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState


def prefill_order(sequence: Sequence) -> tuple[int, int, int]:
    """The client that was served least computes its prompts first, so that the long prompts of one
    do not delay the short ones of another.
    """
    return (sequence.priority, sequence.client.served, sequence.arrival)


class PrefillLine:
    """The prefills of a rank's step in the order in which they are fed, each with its tokens."""

    __slots__ = ("_line", "_num_tokens")

    def __init__(self, prefills: list[Sequence], num_tokens: int) -> None:
        """`num_tokens` are those that the step has for them."""
        self._num_tokens = num_tokens
        self._line = sorted((prefill_order(row), row.remaining) for row in prefills)

    def has_tokens_for(self, sequence: Sequence) -> bool:
        """Returns whether the prefills before the sequence leave it any."""
        end = bisect_left(self._line, (prefill_order(sequence), 0))
        return sum(num_tokens for _, num_tokens in self._line[:end]) < self._num_tokens

    def add(self, sequence: Sequence) -> None:
        insort(self._line, (prefill_order(sequence), sequence.remaining))


def next_lines(state: SchedulerState) -> list[PrefillLine]:
    """Returns the line of each rank in a step in which all running rows take part."""
    rows, budget = state.running_rows, state.spec.max_batched_tokens
    is_prefill = state.table.remaining[rows] > state.spec.decode.root_len
    num_decodes = [len(own) for own in rows_by_rank(state, rows[~is_prefill])]
    if not state.spec.decode.mixes_prefill:
        num_decodes = [0] * len(num_decodes)  # decodes wait while there are prefills
    prefills: list[Sequence] = state.table.sequences[rows[is_prefill]].tolist()
    by_rank = zip(sequences_by_rank(state, prefills), num_decodes, strict=True)
    return [PrefillLine(own, budget - num) for own, num in by_rank]
