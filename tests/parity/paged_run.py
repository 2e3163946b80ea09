"""Drives an executor with hand-made steps: whatever spans a test wants, on scattered pages.

It checks nothing; it keeps what a scheduler would know of each row. Pages behind a window go back
at once, and are the next to be taken: a layer that looks back too far sees a stranger's KV.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from aserve.messages.base import ArrayI32, array_i32, pack_i32
from aserve.messages.executor import Executor, GroupSpec, Ticket
from aserve.messages.results import StepResult
from aserve.messages.step import PageWrites, ScheduleBatch
from tests.gpu.batch_builder import greedy

Spans = Mapping[int, Sequence[int]]


class GroupPages:
    """One layer group's pages: which are free, and which page each row has in each column."""

    def __init__(self, spec: GroupSpec, *, page_size: int) -> None:
        self.window = spec.window
        self.page_size = page_size
        pages = range(1, spec.num_pages)
        self.free = [*pages[::2], *reversed(pages[1::2])]  # neighbours in a row are far apart
        self.held: dict[int, dict[int, int]] = {}

    def step(self, kv_lens: Mapping[int, int], query_lens: Spans) -> PageWrites:
        for row in query_lens:
            self._release_behind(self.held.setdefault(row, {}), kv_lens[row])
        rows, columns, pages = [], [], []
        for row, ids in query_lens.items():
            for column in range(-(-(kv_lens[row] + len(ids)) // self.page_size)):
                if column * self.page_size < kv_lens[row]:
                    continue  # began in an earlier step
                page = self.held[row][column] = self.free.pop()
                rows.append(row)
                columns.append(column)
                pages.append(page)
        return PageWrites(pack_i32(rows), pack_i32(columns), pack_i32(pages))

    def _release_behind(self, held: dict[int, int], kv_len: int) -> None:
        if self.window is None:
            return
        first_seen = kv_len - self.window + 1
        for column in [c for c in held if (c + 1) * self.page_size <= first_seen]:
            self.free.append(held.pop(column))


class PagedRun:
    def __init__(self, executor: Executor, *, temperature: float = 0.0) -> None:
        spec = executor.spec
        self.temperature = temperature
        self.executor = executor
        self.iteration = 0
        self.kv_lens: dict[int, int] = {}
        self.sampled_in: dict[int, int] = {}  # row -> the last iteration that sampled it
        self.groups = [GroupPages(group, page_size=spec.page_size) for group in spec.groups]

    def launch(self, query_lens: Spans, *, sampling: Collection[int]) -> Ticket:
        """`query_lens`: row -> its ids of this step, -row for the token that it sampled last."""
        self.iteration += 1
        inits = tuple(
            greedy(row, temperature=self.temperature)
            for row in query_lens
            if row not in self.kv_lens
        )
        before = {row: self.kv_lens.get(row, 0) for row in query_lens}
        batch = ScheduleBatch(
            iteration=self.iteration,
            rows=pack_i32(list(query_lens)),
            query_lens=pack_i32([len(ids) for ids in query_lens.values()]),
            input_ids=pack_i32([token for ids in query_lens.values() for token in ids]),
            next_ids=pack_i32([-row for row in query_lens]),
            kv_lens=pack_i32(list(before.values())),
            bounds=bytes(len(query_lens)),
            expects=pack_i32(
                [self.sampled_in[row] if -row in ids else 0 for row, ids in query_lens.items()]
            ),
            sample_rows=pack_i32([row for row in query_lens if row in sampling]),
            page_writes=tuple(group.step(before, query_lens) for group in self.groups),
            row_inits=inits,
        )
        for row, ids in query_lens.items():
            self.kv_lens[row] = before[row] + len(ids)
            if row in sampling:
                self.sampled_in[row] = self.iteration
        return self.executor.launch(batch)


def tokens_of(result: object) -> dict[int, int]:
    """row -> the one token that it sampled in this step."""
    assert isinstance(result, StepResult), result
    rows, tokens = array_i32(result.rows), array_i32(result.tokens)
    assert array_i32(result.counts).tolist() == [1] * len(rows)
    return dict(zip(_ints(rows), _ints(tokens), strict=True))


def _ints(values: ArrayI32) -> list[int]:
    return [int(value) for value in values]
