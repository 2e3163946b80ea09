"""A scheduler whose every launch is looked at from outside: what its statistics must say is counted
anew from phases and page tables, and who stepped back must be the right one.
"""

from __future__ import annotations

from collections import Counter

from aserve.cache.allocation import PageAllocation
from aserve.messages.base import ChildKey, array_i32
from aserve.messages.changes import Amend, Amended
from aserve.messages.executor import SchedulerEvent
from aserve.messages.results import MaskReady
from aserve.messages.step import Launch, ScheduleBatch, StepStats
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.scheduler import Scheduler

Holdings = dict[Sequence, PageAllocation | None]


class WatchedState(Scheduler):
    """Raises AssertionError in the launch that is wrong. `num_watched` counts them, so that a test
    sees that it watches at all.
    """

    changes: list[tuple[ChildKey, int, Amend]]
    failed_masks: list[MaskReady]
    num_retracted = 0
    num_watched = 0
    ranks: dict[Sequence, int]  # of the rows that ran before the last launch

    def handle(self, event: SchedulerEvent) -> None:
        """Notes how many outputs each child had when it was changed, and each failed mask for which
        a sequence waited.
        """
        if isinstance(event, MaskReady) and event.error is not None:
            waiting = self.state.groups.get(event.request_id, {}).get(event.child)
            if waiting is not None and waiting.mask and waiting.mask.asked == event.position:
                self.failed_masks.append(event)
        if not isinstance(event, Amend):
            super().handle(event)
            return
        children = self.state.groups.get(event.request_id, {})
        num_outputs = {child: sequence.num_outputs for child, sequence in children.items()}
        super().handle(event)
        answer = self.state.effects[-1]
        assert isinstance(answer, Amended)
        if answer.error is None:
            self.changes += [
                ((event.request_id, each.child), num_outputs[each.child], event)
                for each in answer.sequences
            ]

    def _launch_next(self) -> bool:
        before: Holdings = {row: row.allocation for row in self.state.running.values()}
        self.ranks = {row: row.rank for row in before}
        has_launched = super()._launch_next()
        # A sequence that stepped back and was admitted again at once has another allocation.
        retracted = [row for row, allocation in before.items() if row.allocation is not allocation]
        self._check_retracted(retracted, list(before))
        if has_launched:
            self.num_watched += 1
            running = self.state.running.values()
            admitted = [
                row
                for row in running
                if row.allocation is not before.get(row) and row.phase is Phase.RUNNING
            ]
            launch = self.state.effects[-1]
            assert isinstance(launch, Launch)
            stats, *others = [batch.stats for batch in launch.batches]
            expected = self._expected_stats(launch.batches, admitted)
            assert stats == expected, f"{stats} is not {expected}"
            assert all(other == StepStats() for other in others)
        return has_launched

    def _check_retracted(self, retracted: list[Sequence], before: list[Sequence]) -> None:
        """Lowest priority first, then fewest outputs, then latest; and never the last row. A client
        above its share of rows, or with many pages, may have to step back for another one's waiting
        sequence, but not with its only row, unless a sequence of its own gets one in this launch.
        """
        share = max(1, self.state.spec.max_rows // max(1, self.state.clients.num_active))
        num_rows = Counter(row.client for row in before)
        num_left = Counter(row.client for row in self.state.running.values())
        self.num_retracted += len(retracted)
        assert not retracted or len(retracted) < len(before), "the last row stepped back"
        for row in retracted:
            for other in before:
                has_many = num_rows[row.client] > share or num_left[row.client] > 0
                makes_way = row.client is not other.client and has_many
                is_bound = other.phase is Phase.AWAITING_KV or _is_elsewhere(other, self.ranks, row)
                assert other in retracted or makes_way or is_bound or _goes_before(row, other), (
                    f"{row.request_id}/{row.child} stepped back, not "
                    f"{other.request_id}/{other.child}"
                )

    def _expected_stats(
        self, batches: tuple[ScheduleBatch, ...], admitted: list[Sequence]
    ) -> StepStats:
        state = self.state
        phases = [sequence.phase for sequence in state.living()]
        rows, query_lens, kv_lens = (
            [value for batch in batches for value in array_i32(getattr(batch, name)).tolist()]
            for name in ("rows", "query_lens", "kv_lens")
        )
        sequences = [state.running[row] for row in rows]
        prefill_spans = [
            query_len
            for sequence, query_len, kv_len in zip(sequences, query_lens, kv_lens, strict=True)
            if sequence in admitted or sequence.tokens.num - kv_len > state.spec.decode.root_len
        ]
        pages = {
            (allocation.rank, page)
            for allocation in [
                *(row.allocation for row in state.running.values()),
                *(transfer.allocation for transfer in state.transfers.values()),
            ]
            if allocation is not None
            for page in allocation.pages[0]
        }
        return StepStats(
            num_prefill_rows=len(prefill_spans),
            num_prefill_tokens=sum(prefill_spans),
            num_decode_rows=len(sequences) - len(prefill_spans),
            num_running=phases.count(Phase.RUNNING) + phases.count(Phase.AWAITING_KV),
            num_waiting=phases.count(Phase.WAITING),
            num_retracted=self.num_retracted,
            num_cached_tokens=sum(_num_cached(row) for row in admitted) * state.spec.page_size,
            used_pages=len(pages),
            total_pages=state.spec.dp_size * (state.spec.groups[0].num_pages - 1),
        )


def _is_elsewhere(other: Sequence, ranks: dict[Sequence, int], row: Sequence) -> bool:
    """Whether the pages of the other would have been of no use on the row's rank."""
    return ranks[other] != ranks[row]


def _num_cached(sequence: Sequence) -> int:
    """Pages that were in the tree when it was admitted, and nothing of it is committed since."""
    assert sequence.allocation is not None
    return sequence.allocation.num_shared


def _goes_before(sequence: Sequence, other: Sequence) -> bool:
    """Whether it is the first of the two to step back. A greater number is a lower priority."""
    if sequence.priority != other.priority:
        return sequence.priority > other.priority
    if sequence.num_outputs != other.num_outputs:
        return sequence.num_outputs < other.num_outputs
    return sequence.arrival > other.arrival
