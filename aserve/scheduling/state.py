"""The scheduler as a value machine: events in, effects out, nothing else. The same events give the
same effects.

Knows no clock, no asyncio, no torch. This file is the table of contents: what an event means stands
in the module that its branch calls.
"""

from __future__ import annotations

from typing import assert_never

from aserve.messages import (
    AdmitRequest,
    Cancel,
    EngineSpec,
    FailRequest,
    MaskReady,
    SampleResult,
    SchedulerEffect,
    SchedulerEvent,
    StepFailed,
    StepResult,
)
from aserve.scheduling.admit import receive
from aserve.scheduling.board import Board
from aserve.scheduling.caps import waits_for_masks
from aserve.scheduling.check import check
from aserve.scheduling.commit import commit_samples, commit_step
from aserve.scheduling.decode import choose
from aserve.scheduling.held import awaits_masks, give_samples, receive_mask
from aserve.scheduling.launch import launch
from aserve.scheduling.leave import cancel, fail
from aserve.scheduling.recover import fail_step


class SchedulerState:
    """One engine's scheduler. `debug_checks` asserts every invariant after each call of `step`."""

    __slots__ = ("_debug_checks", "board")

    def __init__(self, spec: EngineSpec, *, debug_checks: bool = False) -> None:
        self.board = Board(spec)
        self._debug_checks = debug_checks

    @property
    def is_idle(self) -> bool:
        """No living request and nothing outstanding."""
        return not self.board.groups and self.board.is_device_idle

    def step(self, events: list[SchedulerEvent]) -> list[SchedulerEffect]:
        for event in events:
            self._handle(event)
        give_samples(self.board)
        while self._launch_next():
            give_samples(self.board)
        if self._debug_checks:
            check(self.board)
        return self.board.take_effects()

    def _handle(self, event: SchedulerEvent) -> None:
        match event:
            case AdmitRequest():
                receive(self.board, event)
            case Cancel():
                cancel(self.board, event)
            case StepResult():
                commit_step(self.board, event)
            case SampleResult():
                commit_samples(self.board, event)
            case StepFailed():
                fail_step(self.board, event)
            case MaskReady():
                receive_mask(self.board, event)
            case FailRequest():
                fail(self.board, event)
            case _:
                assert_never(event)

    def _launch_next(self) -> bool:
        """Launches one more step if there is a free slot and something to do; depth and lead are
        all that overlap is.
        """
        board = self.board
        if len(board.steps) >= board.spec.depth:
            return False
        has_held_rows = awaits_masks(board)
        if waits_for_masks(board.spec, num_in_flight=len(board.steps), has_held_rows=has_held_rows):
            return False
        chosen, admitted = choose(board)
        if not chosen:
            return False
        launch(board, chosen, admitted=admitted)
        return True
