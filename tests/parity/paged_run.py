"""Drives an executor with hand-made steps: whatever spans a test wants, pages in a scattered order.

It checks nothing; it keeps what a scheduler would know of each row, and frees nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from aserve.messages import (
    Executor,
    PageWrites,
    RowInit,
    ScheduleBatch,
    StepResult,
    Ticket,
    array_i32,
    pack_i32,
)


@dataclass(slots=True)
class _Row:
    kv_len: int = 0
    num_pages: int = 0
    sampled_in: int = 0  # the last iteration that sampled it


@dataclass(slots=True)
class PagedRun:
    executor: Executor
    iteration: int = 0
    rows: dict[int, _Row] = field(default_factory=dict)
    num_taken: int = 0

    def launch(self, spans: Mapping[int, Sequence[int]], *, sampling: Sequence[int]) -> Ticket:
        """`spans`: row -> its ids of this step, -row for the token that it sampled last."""
        self.iteration += 1
        inits = tuple(_greedy(row) for row in spans if row not in self.rows)
        states = {row: self.rows.setdefault(row, _Row()) for row in spans}
        batch = ScheduleBatch(
            iteration=self.iteration,
            rows=pack_i32(list(spans)),
            spans=pack_i32([len(ids) for ids in spans.values()]),
            input_ids=pack_i32([token for ids in spans.values() for token in ids]),
            next_ids=pack_i32([-row for row in spans]),
            kv_lens=pack_i32([state.kv_len for state in states.values()]),
            bounds=bytes(len(spans)),
            expects=pack_i32([self._expected(row, ids) for row, ids in spans.items()]),
            sample_rows=pack_i32([row for row in spans if row in sampling]),
            page_writes=self._grow(spans),
            row_inits=inits,
        )
        for row, ids in spans.items():
            states[row].kv_len += len(ids)
            if row in sampling:
                states[row].sampled_in = self.iteration
        return self.executor.launch(batch)

    def _expected(self, row: int, ids: Sequence[int]) -> int:
        return self.rows[row].sampled_in if -row in ids else 0

    def _grow(self, spans: Mapping[int, Sequence[int]]) -> tuple[PageWrites, ...]:
        """Rows take turns, and pages come from the two ends of the pool: never one block."""
        size = self.executor.spec.page_size
        wanted = {row: -(-(self.rows[row].kv_len + len(ids)) // size) for row, ids in spans.items()}
        columns: list[tuple[int, int]] = []
        for column in range(max(wanted.values())):
            columns += [
                (row, column)
                for row, num_pages in wanted.items()
                if self.rows[row].num_pages <= column < num_pages
            ]
        for row, num_pages in wanted.items():
            self.rows[row].num_pages = max(num_pages, self.rows[row].num_pages)
        taken = range(self.num_taken, self.num_taken + len(columns))
        self.num_taken += len(columns)
        return tuple(
            PageWrites(
                rows=pack_i32([row for row, _ in columns]),
                columns=pack_i32([column for _, column in columns]),
                pages=pack_i32([_page(number, group.num_pages) for number in taken]),
            )
            for group in self.executor.spec.groups
        )


def tokens_of(result: object) -> dict[int, int]:
    """row -> the one token that it sampled in this step."""
    assert isinstance(result, StepResult), result
    assert np.all(array_i32(result.counts) == 1)
    rows, tokens = array_i32(result.rows).tolist(), array_i32(result.tokens).tolist()
    return dict(zip(rows, tokens, strict=True))


def _page(number: int, num_pages: int) -> int:
    page = 1 + number // 2 if number % 2 == 0 else num_pages - 1 - number // 2
    assert 0 < page < num_pages
    return page


def _greedy(row: int) -> RowInit:
    return RowInit(
        row=row,
        seed=0,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        prompt_len=1,
        min_len=0,
        end_ids=(),
        logit_bias=(),
        num_logprobs=-1,
    )
