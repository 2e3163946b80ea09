"""The scheduler's whole state as data: the sequences that wait and run, the steps in flight, and
the groups of rows to try again. The comment at each field names the modules that write it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np

from aserve.cache.allocation import PageAllocation
from aserve.cache.pools import RowPool
from aserve.cache.rank_caches import RankCaches
from aserve.messages.base import ChildKey
from aserve.messages.changes import ChangeSettings
from aserve.messages.executor import EngineSpec, SchedulerEffect
from aserve.scheduling.clients import Clients
from aserve.scheduling.draft_choice import DraftChoice
from aserve.scheduling.flights import Repeat, Step
from aserve.scheduling.queue import WaitingQueue
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.rows import Column, RowTable


class Transfer(msgspec.Struct, gc=False):
    """The KV of a sequence on its way to these pages, which steps up to `after` may still write.
    `step` has its flight; what the tiers below the prefix cache bring is none.
    """

    sequence: Sequence
    step: Step | None
    allocation: PageAllocation
    after: int  # iteration


class SchedulerState:
    __slots__ = (
        *("arrivals", "cache", "caution", "clients", "draft_choice", "effects", "end_ids", "ended"),
        *("groups", "has_senders", "has_uncut", "held", "landed", "leaders", "looks_left"),
        *(
            "masked",
            "next_iteration",
            "num_followers",
            "num_retracted",
            "repeat",
            "resync_at",
            "retries",
        ),
        *("retry_iteration", "rows", "running", "_running_rows", "samples", "slow_waiting"),
        *("spec", "steps", "table", "transfers", "unsent", "waiting"),
    )

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.cache = RankCaches(spec)
        self.rows = RowPool(spec.max_rows, dp_size=spec.dp_size)
        self.table = RowTable(spec.max_rows)
        self.effects: list[SchedulerEffect] = []  # of the current call of Scheduler.step
        # admit, select, batch, steady, token_writes, commit, loads, transfers, scheduler
        self.draft_choice = DraftChoice(spec.decode)
        self.waiting = WaitingQueue()  # admit, make_way, finish, followers, grammar_rows, amend
        # sequences with slow masks for which there is no row: grammar_rows, admit
        self.slow_waiting = WaitingQueue()
        self.looks_left = 0  # waiting sequences that this tick may still look at: scheduler, admit
        self.clients = Clients()  # admit, finish
        # by the key of the page that a running row commits next; followers of such rows wait
        # outside the queue: followers
        self.leaders: dict[bytes, Sequence] = {}
        self.num_followers = 0
        self.running: dict[int, Sequence] = {}  # by row, in order of admission: admit, finish
        self._running_rows: Column | None = None  # of `running`, None if they have changed
        # by token id, whether it ends a sequence that has run: admit
        self.end_ids = np.zeros(spec.vocab_size, np.bool_)
        self.masked: dict[int, Sequence] = {}  # those of `running` with a host-side sampler
        # living children by request id: admit, finish
        self.groups: dict[str, dict[int, Sequence]] = {}
        self.steps: dict[int, Step] = {}  # launched, not back: batch, steady, commit, recover
        # by row, whose logits wait for a mask: batch, grammar_rows, forced, finish, recover
        self.held: dict[int, Step] = {}
        # by (iteration, row), Sample given, not back: grammar_rows, commit, recover
        self.samples: dict[tuple[int, int], Step] = {}
        self.ended: deque[Sequence] = deque()  # rows whose last token is known: commit, finish
        # after a failed step: groups to try alone: recover, select
        self.retries: list[list[Sequence]] = []
        self.retry_iteration = 0  # the step that tries such a group: select
        self.resync_at = 1  # failures of steps before this one were acted on: recover
        self.next_iteration = 1  # batch, steady
        self.landed = 0  # all steps up to this one are back: commit, recover
        self.repeat: Repeat | None = None  # steady, batch, commit, scheduler
        self.has_senders = False  # some request wanted SendKv
        self.has_uncut = False  # some request had a picture that sees itself
        self.unsent: list[Transfer] = []  # in the order of `after`: transfers, loads
        # that have begun: transfers, loads
        self.transfers: dict[ChildKey, Transfer] = {}
        self.arrivals = 0  # admit
        self.num_retracted = 0  # finish
        # how far ahead pages are kept free, in steps until it is forgotten: forecast
        self.caution = 0

    @property
    def is_recovering(self) -> bool:
        return bool(self.retries) or self.retry_iteration in self.steps

    @property
    def is_device_idle(self) -> bool:
        """Nothing outstanding at all: no step, no sample."""
        return not self.steps and not self.samples

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.slow_waiting) + self.num_followers

    @property
    def running_rows(self) -> Column:
        """The rows of `running`, in their order."""
        if self._running_rows is None:
            self._running_rows = np.fromiter(self.running, np.int64, len(self.running))
        return self._running_rows

    def seat(self, sequence: Sequence) -> None:
        self.running[sequence.row] = sequence
        self._running_rows = None

    def unseat(self, sequence: Sequence) -> None:
        del self.running[sequence.row]
        self._running_rows = None

    def retractable(self) -> list[Sequence]:
        """Running rows whose pages no transfer writes."""
        return [row for row in self.running.values() if row.phase is Phase.RUNNING]

    def living(self) -> Iterator[Sequence]:
        for children in self.groups.values():
            yield from children.values()

    def num_pages(self, num_positions: int) -> int:
        return -(-num_positions // self.spec.page_size)

    def change_settings(self, event: ChangeSettings) -> None:
        """NOTE: a step must still take what is not cut of every living prompt, and a block."""
        uncut = [each.uncut_len for each in self.living()]
        least_tokens = max([self.spec.decode.block_len, *uncut])
        self.spec = self.spec.changed(event, least_tokens=least_tokens)

    def take_effects(self) -> list[SchedulerEffect]:
        effects, self.effects = self.effects, []
        return effects
