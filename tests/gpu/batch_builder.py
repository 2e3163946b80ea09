"""Hand-made steps: whatever spans a test wants, and what a naive scheduler knows of each row.

It checks nothing. Pages are given out in an order in which neighbours in a row are far apart. Pages
behind a window go back at once, and are taken next: a layer that looks back too far sees a
stranger's KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from aserve.engine_core import LocalExecutor
from aserve.gpu.cudagraph.warmup import NOISY
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import Executor, GroupSpec, Ticket
from aserve.messages.results import SampleResult, StepResult
from aserve.messages.step import PageWrites, RowInit, ScheduleBatch

Spans = Mapping[int, Sequence[int]]  # row -> its ids of this step, -row for the last sampled one


def greedy(row: int, **changes: Any) -> RowInit:
    init = msgspec.structs.replace(NOISY, row=row, temperature=0.0, prompt_len=1)
    return msgspec.structs.replace(init, **changes)


@asynccontextmanager
async def running(executor: LocalExecutor, **options: Any) -> AsyncIterator[BatchBuilder]:
    executor.start(asyncio.get_running_loop())
    try:
        yield BatchBuilder(executor, **options)
    finally:
        executor.close()


def tokens_of(outcome: object) -> list[int]:
    assert isinstance(outcome, StepResult | SampleResult), outcome
    return array_i32(outcome.tokens).tolist()


def tokens_by_row(result: object) -> dict[int, int]:
    """row -> the one token that it sampled in this step."""
    assert isinstance(result, StepResult), result
    assert array_i32(result.counts).tolist() == [1] * (len(result.rows) // 4)
    return dict(zip(array_i32(result.rows).tolist(), tokens_of(result), strict=True))


def schedule_batch(
    rows: Collection[int],
    query_lens: Collection[int],
    input_ids: Collection[int],
    kv_lens: Collection[int],
    **changes: Any,
) -> ScheduleBatch:
    """A step of exact lengths, in which all rows sample."""
    batch = ScheduleBatch(
        iteration=5,
        rows=pack_i32([*rows]),
        query_lens=pack_i32([*query_lens]),
        input_ids=pack_i32([*input_ids]),
        next_ids=pack_i32([-row for row in rows]),
        kv_lens=pack_i32([*kv_lens]),
        bounds=bytes(len(rows)),
        expects=pack_i32([0 for _ in rows]),
        sample_rows=pack_i32([*rows]),
        page_writes=(PageWrites(),),
    )
    return msgspec.structs.replace(batch, **changes)


class GroupPages:
    """One layer group's pages: which are free, and which page each row has in each column."""

    def __init__(self, spec: GroupSpec, *, page_size: int) -> None:
        self.window = spec.window
        self.page_size = page_size
        pages = range(1, spec.num_pages)
        self.free = [*pages[::2], *reversed(pages[1::2])]
        self.held: dict[int, dict[int, int]] = {}

    def step(self, kv_lens: Mapping[int, int], query_lens: Spans) -> PageWrites:
        for row in query_lens:
            self._release_behind(self.held.setdefault(row, {}), kv_lens[row])
        rows, columns, pages = [], [], []
        for row, ids in query_lens.items():
            first_new = -(-kv_lens[row] // self.page_size)
            for column in range(first_new, -(-(kv_lens[row] + len(ids)) // self.page_size)):
                page = self.held[row][column] = self.free.pop()
                rows.append(row)
                columns.append(column)
                pages.append(page)
        return PageWrites(pack_i32(rows), pack_i32(columns), pack_i32(pages))

    def _release_behind(self, held: dict[int, int], kv_len: int) -> None:
        first_seen = 0 if self.window is None else kv_len - self.window + 1
        for column in [c for c in held if (c + 1) * self.page_size <= first_seen]:
            self.free.append(held.pop(column))


class BatchBuilder:
    def __init__(self, executor: Executor, *, temperature: float = 0.0) -> None:
        self.executor = executor
        self.temperature = temperature  # of rows that no init is given for
        self.iteration = 0
        self.kv_lens: dict[int, int] = {}
        self.sampled_in: dict[int, int] = {}  # row -> the last iteration that sampled it
        spec = executor.spec
        self.groups = [GroupPages(group, page_size=spec.page_size) for group in spec.groups]

    def launch(self, query_lens: Spans, *, sampling: Collection[int]) -> Ticket:
        return self.executor.launch(self.batch(query_lens, sampling=sampling))

    def batch(
        self,
        query_lens: Spans,
        *,
        sampling: Collection[int],
        held: Collection[int] = (),
        inits: Collection[RowInit] = (),
    ) -> ScheduleBatch:
        """A row with an init is a new tenant."""
        self.iteration += 1
        for init in inits:
            self.end(init.row)
        known = {row: greedy(row, temperature=self.temperature) for row in query_lens}
        known |= {init.row: init for init in inits}
        new = tuple(known[row] for row in query_lens if row not in self.kv_lens)
        before = {row: self.kv_lens.get(row, 0) for row in query_lens}
        reads = {row: min(ids) < 0 for row, ids in query_lens.items()}
        batch = schedule_batch(
            query_lens,
            [len(ids) for ids in query_lens.values()],
            [token for ids in query_lens.values() for token in ids],
            before.values(),
            iteration=self.iteration,
            expects=pack_i32([self.sampled_in[row] if reads[row] else 0 for row in query_lens]),
            sample_rows=pack_i32([row for row in query_lens if row in sampling]),
            held_rows=pack_i32([row for row in query_lens if row in held]),
            page_writes=tuple(group.step(before, query_lens) for group in self.groups),
            row_inits=new,
        )
        for row, ids in query_lens.items():
            self.kv_lens[row] = before[row] + len(ids)
            if row in sampling or row in held:
                self.sampled_in[row] = self.iteration
        return batch

    def end(self, row: int) -> None:
        """The row and its pages are free at once."""
        self.kv_lens.pop(row, None)
        self.sampled_in.pop(row, None)
        for group in self.groups:
            group.free.extend(group.held.pop(row, {}).values())
