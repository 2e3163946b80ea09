"""The scheduler: a state machine that takes events and returns effects.

How it works:

- `Scheduler.step` is one tick. Events are what came since the last one: new requests, cancels,
  results of steps, token masks, failures. Effects are what must happen now: launches, outputs for
  the detokenizer, the last message of a sequence. The scheduler does nothing else. It reads no
  clock, waits for nothing and never sees a tensor, so the same events give the same effects, and a
  recorded run can be replayed (`actors/replay.py`).

- A request becomes `n` sequences. A sequence waits in the queue; it runs, with a row and KV pages,
  from its admission until it ends; or it is retracted, gives back row and pages, lingers until
  nothing of it is in flight, and waits again. `request.MOVES` is the whole machine.

- A tick has two halves. First the events are handled, each by the module that its kind names below.
  Then steps are launched as long as fewer than `depth` are in flight: `select` chooses the rows and
  how many tokens each of them computes, and `launch` turns that into one `ScheduleBatch`. Prefill,
  chunk, decode and verify window are the same thing with different numbers of tokens.

- Steps overlap. A step is launched before the tokens of the step before it are known. Its batch
  names such a token by its row (as -row), and the device puts it in. The scheduler therefore counts
  every sequence twice: what has come back (`committed_len`), and what will have come back once all
  flights have landed (`scheduled_len`). A row may sample in at most `lead` steps ahead. With
  `depth` = `lead` = 1 every result is awaited; (2, 2) hides the host behind the device; `depth` >
  `lead` is a pipeline, whose rows are spread over the steps in flight.

- A row that ends by a stop id was launched once too often. That result is ignored, because its
  flight was dropped. Its row and pages can be given to the next sequence at once: whatever writes
  them is launched later, on the same stream.

- A row with a grammar is launched without its mask and then held: the step computes its logits, and
  a `Sample` effect follows as soon as the mask is there. A row is never launched again before that.

- Pages never run out in a step. A sequence is admitted only if its whole prefill and one more step
  of every running row fit, and rows are retracted before a launch that would need more.

- A tick is bounded (`tick.py`): what is left over is done in the next one (`has_more`).

`check.py` asserts the invariants: each row and page has one owner, lengths agree with the flights,
and neither `depth` nor `lead` is exceeded.
"""

from __future__ import annotations

from typing import assert_never

from aserve.messages.changes import Amend, ChangeSettings
from aserve.messages.executor import EngineSpec, SchedulerEffect, SchedulerEvent
from aserve.messages.requests import AdmitRequest, Cancel, FailRequest
from aserve.messages.results import (
    MaskReady,
    SampleResult,
    StepFailed,
    StepResult,
    StepTimes,
)
from aserve.messages.transfers import KvFailed, KvLoaded, KvReady, TiersChanged
from aserve.scheduling.admit import consider, receive
from aserve.scheduling.amend import amend
from aserve.scheduling.batch import launch
from aserve.scheduling.check import check
from aserve.scheduling.commit import commit_samples, commit_step
from aserve.scheduling.finish import cancel, fail, finish_ended
from aserve.scheduling.grammar_rows import give_samples, receive_mask, waits_for_masks
from aserve.scheduling.loads import change_tiers, end_load, save_pages
from aserve.scheduling.recover import fail_step
from aserve.scheduling.select import select
from aserve.scheduling.state import SchedulerState
from aserve.scheduling.steady import repeat_step
from aserve.scheduling.tick import max_finished, max_looks
from aserve.scheduling.transfers import begin_transfers, end_transfer


class Scheduler:
    """One engine's scheduler. `debug_checks` asserts every invariant after each call of `step`."""

    __slots__ = ("_debug_checks", "state")

    def __init__(self, spec: EngineSpec, *, debug_checks: bool = False) -> None:
        self.state = SchedulerState(spec)
        self._debug_checks = debug_checks

    @property
    def is_idle(self) -> bool:
        """No living request and nothing outstanding."""
        return not self.state.groups and self.state.is_device_idle

    @property
    def has_more(self) -> bool:
        """Whether another tick has something to do though no event comes."""
        return bool(self.state.ended)

    def step(self, events: list[SchedulerEvent]) -> list[SchedulerEffect]:
        for event in events:
            self.handle(event)
        return self.end_tick()

    def end_tick(self) -> list[SchedulerEffect]:
        """Launches what can run after the tick's events, and returns the effects of all of them."""
        state = self.state
        num_finished = finish_ended(state, most=max_finished(state.spec))
        give_samples(state)
        state.looks_left = max_looks(state, num_finished=num_finished)
        while self._launch_next():
            give_samples(state)
        save_pages(state)
        begin_transfers(state)
        if self._debug_checks:
            check(state)
        return state.take_effects()

    def handle(self, event: SchedulerEvent) -> None:
        if not isinstance(event, StepResult | AdmitRequest):
            self.state.repeat = None
        match event:
            case AdmitRequest():
                receive(self.state, consider(self.state, event))
            case Cancel():
                cancel(self.state, event)
            case Amend():
                amend(self.state, event)
            case StepResult():
                commit_step(self.state, event)
            case SampleResult():
                commit_samples(self.state, event)
            case StepFailed():
                fail_step(self.state, event)
            case MaskReady():
                receive_mask(self.state, event)
            case KvReady() | KvFailed():
                end_transfer(self.state, event)
            case KvLoaded():
                end_load(self.state, event)
            case TiersChanged():
                change_tiers(self.state, event)
            case FailRequest():
                fail(self.state, event)
            case ChangeSettings():
                self.state.change_settings(event)
            case StepTimes():
                self.state.draft_choice.set_times(event, max_rows=self.state.spec.max_rows)
            case _:
                assert_never(event)

    def _launch_next(self) -> bool:
        """Launches one more step if there is a free slot and something to do; depth and lead are
        all that overlap is.
        """
        state = self.state
        if len(state.steps) >= state.spec.depth:
            return False
        if waits_for_masks(state):
            return False
        if repeat_step(state):
            return True
        chosen, admitted = select(state)
        save_pages(state)
        if not len(chosen.rows):
            return False
        launch(state, chosen.rows, chosen.query_lens, admitted=admitted)
        return True
