"""Launches as the device gets them, checked against what the clients have: which request a row
belongs to, the token after each span, and the pages that rows share.
"""

from __future__ import annotations

from aserve.messages.base import array_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.step import ScheduleBatch, StateCopies
from aserve.scheduling.request import child_seed
from tests.stories import Story


class LaunchChecks:
    """`check` is called with every batch, after the outputs that were sent before it."""

    def __init__(self, spec: EngineSpec, stories: list[Story]) -> None:
        self.spec = spec
        self.num_shared_pages = 0  # summed over batches
        self.num_skipped = 0  # batches
        self._skipped: set[int] = set()  # rows
        self._by_seed = {
            child_seed(story.request.sampling.seed, story.child): story for story in stories
        }
        self._tenants: dict[int, Story] = {}  # by row
        self._ends: dict[int, int] = {}  # by row, of its last step
        self.num_checkpoint_reads = 0
        self._checkpoints: dict[int, int] = {}  # by page, the position whose states it holds
        self._pages: dict[int, list[int]] = {}  # by row, of the first group, as batches write them

    def check(self, batch: ScheduleBatch) -> None:
        for init in batch.row_inits:
            self._tenants[init.row] = self._by_seed[init.seed]
            self._pages[init.row] = []
        if self.spec.decode.is_recurrent:
            self._check_states(batch)
        self._check_next_ids(batch)
        self._check_shared_pages(batch)
        self._check_skipped(batch)

    def _check_states(self, batch: ScheduleBatch) -> None:
        """Each row goes on at the end of its last step, whether that failed or not, or before
        drafts of it; or it begins with its first token, or at a checkpoint of its position.
        """
        copies = batch.states or StateCopies(b"", b"", b"", b"")
        reads = _pairs(copies.read_rows, copies.read_pages)
        most_drafts = self.spec.depth * (self.spec.decode.max_tokens_per_step - 1)  # in flight
        columns = map(array_i32, (batch.rows, batch.kv_lens, batch.query_lens))
        for row, kv_len, query_len in zip(*(c.tolist() for c in columns), strict=True):
            end = self._ends.get(row, 0)
            allowed = [0, *range(end - most_drafts, end + 1)]
            if row in reads:
                allowed = [self._checkpoints[reads.pop(row)]]
                self.num_checkpoint_reads += 1
            assert kv_len in allowed, f"step {batch.iteration}, row {row}"
            self._ends[row] = kv_len + query_len
        assert not reads, f"step {batch.iteration} reads states of other rows: {reads}"
        for row, page in _pairs(copies.written_rows, copies.written_pages).items():
            self._checkpoints[page] = self._ends[row]

    def _check_skipped(self, batch: ScheduleBatch) -> None:
        """A row whose last step skipped a drafter with a model has no drafts."""
        rows = array_i32(batch.rows).tolist()
        if batch.skips_drafter:
            assert batch.verify is None
            self.num_skipped += 1
            self._skipped.update(rows)
            return
        if batch.verify is not None and not self.spec.decode.continues_repeats:
            drafts = zip(rows, array_i32(batch.verify.num_drafts).tolist(), strict=True)
            assert self._skipped.isdisjoint(row for row, num_drafts in drafts if num_drafts)
        self._skipped.difference_update(rows)

    def _check_next_ids(self, batch: ScheduleBatch) -> None:
        """-row where the row samples, or nothing comes after its span; else what the client knows
        to be there.
        """
        sampled = array_i32(batch.sample_rows + batch.held_rows).tolist()
        fields = (batch.rows, batch.query_lens, batch.kv_lens, batch.next_ids)
        columns = [array_i32(values).tolist() for values in fields]
        for row, query_len, kv_len, next_id in zip(*columns, strict=True):
            known, end = self._tenants[row].known, kv_len + query_len
            is_unknown = row in sampled or end >= len(known)
            expected = -row if is_unknown else known[end]
            assert next_id == expected, (
                f"step {batch.iteration}, row {row}: {next_id} follows its span, not {expected}"
            )

    def _check_shared_pages(self, batch: ScheduleBatch) -> None:
        """Counted as the rows' page tables say it, page by page."""
        writes = batch.page_writes[0]
        rows, columns, pages = map(array_i32, (writes.rows, writes.columns, writes.pages))
        for row, column, page in zip(rows.tolist(), columns.tolist(), pages.tolist(), strict=True):
            assert column == len(self._pages[row])
            self._pages[row].append(page)
        tables = [self._pages[row] for row in array_i32(batch.rows).tolist()]
        num_whole = int(array_i32(batch.kv_lens).min()) // self.spec.page_size
        num_shared = 0
        while num_shared < num_whole and len({table[num_shared] for table in tables}) == 1:
            num_shared += 1
        is_named = self.spec.names_shared_pages and len(tables) > 1
        assert batch.shared_pages == (num_shared if is_named else 0)
        self.num_shared_pages += batch.shared_pages


def _pairs(rows: bytes, pages: bytes) -> dict[int, int]:
    return dict(zip(array_i32(rows).tolist(), array_i32(pages).tolist(), strict=True))
