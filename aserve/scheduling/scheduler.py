"""The scheduler as a value machine: events in, effects out, nothing else. The same events give the
same effects.

Knows no clock, no asyncio, no torch. This file is the table of contents: what an event means stands
in the module that its branch calls.
"""

from __future__ import annotations

from typing import assert_never

from aserve.messages.executor import EngineSpec, SchedulerEffect, SchedulerEvent
from aserve.messages.requests import AdmitRequest, Cancel, FailRequest
from aserve.messages.results import MaskReady, SampleResult, StepFailed, StepResult
from aserve.scheduling.admit import receive
from aserve.scheduling.batch import launch
from aserve.scheduling.check import check
from aserve.scheduling.commit import commit_samples, commit_step
from aserve.scheduling.finish import cancel, fail, finish_ended
from aserve.scheduling.grammar_rows import awaits_masks, give_samples, receive_mask
from aserve.scheduling.recover import fail_step
from aserve.scheduling.select import select, waits_for_masks
from aserve.scheduling.state import SchedulerState
from aserve.scheduling.turn import max_finished, max_looks


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
        """Whether another turn has something to do though no event comes."""
        return bool(self.state.ended)

    def step(self, events: list[SchedulerEvent]) -> list[SchedulerEffect]:
        """One turn. Its work is bounded: what is left over waits for the next, see `has_more`."""
        state = self.state
        for event in events:
            self._handle(event)
        finish_ended(state, most=max_finished(state.spec))
        give_samples(state)
        state.looks_left = max_looks(state.spec, num_running=len(state.running))
        while self._launch_next():
            give_samples(state)
        if self._debug_checks:
            check(state)
        return state.take_effects()

    def _handle(self, event: SchedulerEvent) -> None:
        match event:
            case AdmitRequest():
                receive(self.state, event)
            case Cancel():
                cancel(self.state, event)
            case StepResult():
                commit_step(self.state, event)
            case SampleResult():
                commit_samples(self.state, event)
            case StepFailed():
                fail_step(self.state, event)
            case MaskReady():
                receive_mask(self.state, event)
            case FailRequest():
                fail(self.state, event)
            case _:
                assert_never(event)

    def _launch_next(self) -> bool:
        """Launches one more step if there is a free slot and something to do; depth and lead are
        all that overlap is.
        """
        state = self.state
        if len(state.steps) >= state.spec.depth:
            return False
        has_held_rows = awaits_masks(state)
        if waits_for_masks(state.spec, num_in_flight=len(state.steps), has_held_rows=has_held_rows):
            return False
        chosen, admitted = select(state)
        if not chosen:
            return False
        launch(state, chosen, admitted=admitted)
        return True
