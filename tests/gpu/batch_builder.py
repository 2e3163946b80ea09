"""Hand-made steps: whatever spans a test wants, and what a naive scheduler knows of each row.

It checks nothing. Pages are given out in an order in which neighbours in a row are far apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from aserve.gpu.cudagraph.warmup import NOISY
from aserve.gpu.executor import TorchExecutor
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.results import SampleResult, StepResult
from aserve.messages.step import PageWrites, RowInit, ScheduleBatch

Spans = Mapping[int, Sequence[int]]  # row -> its ids of this step, -row for the last sampled one


def greedy(row: int, **changes: Any) -> RowInit:
    init = msgspec.structs.replace(NOISY, row=row, temperature=0.0, prompt_len=1)
    return msgspec.structs.replace(init, **changes)


@asynccontextmanager
async def running(executor: TorchExecutor) -> AsyncIterator[BatchBuilder]:
    executor.start(asyncio.get_running_loop())
    try:
        yield BatchBuilder(executor.spec)
    finally:
        executor.close()


def tokens_of(outcome: object) -> list[int]:
    assert isinstance(outcome, StepResult | SampleResult), outcome
    return array_i32(outcome.tokens).tolist()


class BatchBuilder:
    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.iteration = 0
        self.kv_lens: dict[int, int] = {}
        self.sampled_in: dict[int, int] = {}
        self.pages: list[dict[int, list[int]]] = [{} for _ in spec.groups]
        self._free = [_scattered(group.num_pages) for group in spec.groups]

    def batch(
        self,
        query_lens: Spans,
        *,
        sampling: Collection[int],
        held: Collection[int] = (),
        inits: Collection[RowInit] = (),
    ) -> ScheduleBatch:
        """Rows are greedy unless `inits` says otherwise; a row with an init is a new tenant."""
        self.iteration += 1
        for init in inits:
            self.end(init.row)
        known = {init.row: init for init in inits}
        new = tuple(known.get(row, greedy(row)) for row in query_lens if row not in self.kv_lens)
        before = {row: self.kv_lens.get(row, 0) for row in query_lens}
        reads = {row: min(ids) < 0 for row, ids in query_lens.items()}
        batch = ScheduleBatch(
            iteration=self.iteration,
            rows=pack_i32(list(query_lens)),
            query_lens=pack_i32([len(ids) for ids in query_lens.values()]),
            input_ids=pack_i32([token for ids in query_lens.values() for token in ids]),
            next_ids=pack_i32([-row for row in query_lens]),
            kv_lens=pack_i32(list(before.values())),
            bounds=bytes(len(query_lens)),
            expects=pack_i32([self.sampled_in[row] if reads[row] else 0 for row in query_lens]),
            sample_rows=pack_i32([row for row in query_lens if row in sampling]),
            held_rows=pack_i32([row for row in query_lens if row in held]),
            page_writes=tuple(
                self._grow(group, before, query_lens) for group in range(len(self.spec.groups))
            ),
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
        for free, pages in zip(self._free, self.pages, strict=True):
            free.extend(pages.pop(row, []))

    def _grow(self, group: int, before: Mapping[int, int], query_lens: Spans) -> PageWrites:
        rows: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for row, ids in query_lens.items():
            own = self.pages[group].setdefault(row, [])
            while len(own) * self.spec.page_size < before[row] + len(ids):
                rows.append(row)
                columns.append(len(own))
                own.append(self._free[group].pop())
                pages.append(own[-1])
        return PageWrites(pack_i32(rows), pack_i32(columns), pack_i32(pages))


def _scattered(num_pages: int) -> list[int]:
    pages = range(1, num_pages)
    return [*pages[::2], *reversed(pages[1::2])]
