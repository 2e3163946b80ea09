"""Drafts of steps that wait for their turn in the last stage of a pipeline.

    last stage    draft A' | verify B, extend B | draft B' | verify A', extend A' | draft A''
    first stage            | embed A', forward  |          | embed B', forward    |

The first stage embeds the drafts of a step, so it begins when they have come. If the last stage
made them in the step's turn, the step before it would have ended by then, and one stage would wait
while the other computes. So before the last stage computes a step, it drafts for those which have
been launched since: no row is in two steps, so what a row's drafts follow from is in the relay as
soon as its next step is launched. That takes the scheduler a moment after the step before, and the
last stage waits for it, if there are rows to be launched. A device that runs behind is waited for
first: it has to be asked for the drafts before it is asked for the step.

Until the step's turn, nothing else of it is done: no row gets its parameters, no page is cleared in
the target's pools, and only rows with drafts get their pages. The step that runs has none of these
rows, and may still read a page that a later step gives away.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from aserve.gpu.decode.base import DecodeMode, StepRunner
from aserve.gpu.parallel.collectives import Collectives
from aserve.gpu.parallel.staged_drafts import DraftSender, TurnDevice, drafting_rows
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import StepPlan, plan_step
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.step import ScheduleBatch

LAUNCH_S = 0.005  # for the scheduler to launch the rows of a step that has ended
NO_ROWS: ArrayI32 = np.empty(0, np.int32)


class EarlyDrafts:
    """The steps that have been launched and wait. `note` is called on the event loop's thread, and
    everything else on the executor's."""

    def __init__(
        self, mode: DecodeMode, sender: DraftSender, ranks: Collectives, *, vocab_size: int
    ) -> None:
        """ranks: those of the last stage, which draft for the same steps at the same places."""
        self.made: set[int] = set()  # steps that wait and have their drafts, if any
        self._mode = mode
        self._sender = sender
        self._ranks = ranks
        self._vocab_size = vocab_size
        self._launched: deque[ScheduleBatch] = deque()
        self._row_params: RowParams | None = None
        self._failed: set[int] = set()  # rows
        self._noted = threading.Event()
        self._sampled = NO_ROWS  # by the step that has its turn
        self._ready = NO_ROWS  # sampled by the step before, and not in this one

    def note(self, batch: ScheduleBatch) -> None:
        self._launched.append(batch)
        self._noted.set()

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        """Drafts for a step that has its turn, if that was not done before."""
        while self._launched and self._launched[0].iteration <= plan.iteration:
            self._take(runner)
        if plan.iteration not in self.made:
            self._mode.draft(runner, plan, arrays)
            self._sender.pass_step(plan.iteration)
        self._failed.difference_update(drafting_rows(plan.batch))
        self.made = {each for each in self.made if each > plan.iteration}
        self._ready = np.setdiff1d(self._sampled, plan.rows)
        self._sampled = plan.logits.rows

    def await_launch(self, device: TurnDevice) -> None:
        """Waits for a step, if the step before has rows for it."""
        self._noted.clear()
        if len(self._ready) and not self._launched:
            device.wait()
            self._noted.wait(LAUNCH_S)

    def make(self, runner: StepRunner, device: TurnDevice) -> None:
        """Drafts for the steps that wait, in their order.

        An error fails the step that runs, which is innocent. So the rows of the guilty one draft in
        the turn of their step until that has succeeded: then the error is that of their step.
        """
        for _ in range(self._ranks.least(len(self._launched))):
            batch = self._launched[0]
            drafting = {int(row) for row in drafting_rows(batch)}
            if not self._failed.union(init.row for init in batch.row_inits).isdisjoint(drafting):
                return  # a row that begins anew gets its parameters in the step's turn
            params = self._take(runner)
            self._failed.update(drafting)
            if drafting:
                size, most = self._vocab_size, len(batch.input_ids)
                plan = plan_step(batch, params, vocab_size=size, slice_len=most)
                arrays = HostArrays()
                plan.stage(arrays)
                _stage_pages(batch, arrays)
                staged = device.stage(arrays)
                _write_pages(batch, staged, runner)
                self._mode.draft(runner, plan, staged)
            self._sender.pass_step(batch.iteration)
            self._failed.difference_update(drafting)
            self.made.add(batch.iteration)

    def _take(self, runner: StepRunner) -> RowParams:
        """Takes the first step that waits, and returns the parameters of all rows as of then."""
        if self._row_params is None:
            self._row_params = RowParams(len(runner.relay.written_iter) - 1)
        self._row_params.write(self._launched.popleft().row_inits)
        return self._row_params


def _stage_pages(batch: ScheduleBatch, arrays: HostArrays) -> None:
    """Adds the page-table entries of rows with drafts, whose new pages the drafter may write."""
    drafting = drafting_rows(batch)
    for group, writes in enumerate(batch.page_writes):
        is_own = np.isin(array_i32(writes.rows), drafting)
        each = (array_i32(values)[is_own] for values in (writes.rows, writes.columns, writes.pages))
        arrays.add(f"page_writes{group}", np.concatenate([*each]))


def _write_pages(batch: ScheduleBatch, arrays: DeviceArrays, runner: StepRunner) -> None:
    state = runner.state
    for group in range(len(batch.page_writes)):
        rows, columns, pages = arrays.ints(f"page_writes{group}").view(3, -1)
        if len(pages):
            state.pools.write_pages(group, rows=rows, columns=columns, pages=pages)
            if state.draft_pools is not None:
                state.draft_pools.clear(group, pages)
