"""What a grammar's matcher sees of a sequence with held rows."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from aserve.messages import (
    BuildMask,
    Launch,
    Resync,
    Retired,
    Sample,
    SchedulerEffect,
    SchedulerEvent,
    StepFailed,
    StepOutput,
    array_i32,
)
from aserve.scheduling.state import SchedulerState
from tests.fakes import TOY, FakeDevice, ToyMatchers, expected_outputs
from tests.scheduling.stage import request, spec


class Play:
    """Scheduler, device and matchers until nothing is left to do; events come one by one."""

    def __init__(self, device: FakeDevice) -> None:
        self.state = SchedulerState(device.spec, debug_checks=True)
        self.seen: defaultdict[str, list[int]] = defaultdict(list)  # by the matcher of a request
        self.emitted: defaultdict[str, list[int]] = defaultdict(list)
        self.num_failed = 0
        self._device = device
        self._matchers = ToyMatchers(device.spec.vocab_size)
        self._events: deque[SchedulerEvent] = deque()

    def run(self, *events: SchedulerEvent) -> None:
        self._events.extend(events)
        while self._events:
            for effect in self.state.step([self._events.popleft()]):
                self._perform(effect)

    def _perform(self, effect: SchedulerEffect) -> None:
        match effect:
            case Launch():
                self._answer(self._device.run(effect.batch))
            case Sample() | Resync():
                self._answer(self._device.run(effect))
            case BuildMask():
                self.seen[effect.request_id] += array_i32(effect.new_ids).tolist()
                self._answer(self._matchers.fill(effect))
            case StepOutput():
                for part in effect.sequences:
                    self.emitted[part.request_id] += array_i32(part.token_ids).tolist()
            case Retired():
                assert effect.error is None
            case _:
                raise AssertionError(effect)

    def _answer(self, event: SchedulerEvent | None) -> None:
        if event is not None:
            self.num_failed += isinstance(event, StepFailed)
            self._events.append(event)


@pytest.mark.parametrize(("depth", "lead"), [(1, 1), (2, 2), (3, 3)])
def test_trap_4_a_grammar_sees_every_emitted_token_once(depth: int, lead: int) -> None:
    """None of a wasted row's, and none a second time after a retraction or a failed step."""
    engine = spec(depth=depth, lead=lead, num_pages=15, page_size=1, max_rows=3)
    requests = [request(name, [ord(name), 2, 3], grammar=TOY) for name in "XYZ"]
    play = Play(FakeDevice(engine, must_fail=lambda batch: batch.iteration == 4))
    play.run(*requests)
    assert play.state.is_idle
    assert play.state.board.num_retracted > 0
    assert play.num_failed > 0
    for each in requests:
        outputs = expected_outputs(each, 0, engine)
        assert play.emitted[each.request_id] == outputs
        # The last token is followed by no mask.
        assert play.seen[each.request_id] == outputs[:-1]


def test_trap_4_a_token_after_the_end_is_never_shown_to_the_grammar() -> None:
    engine = spec(depth=3, lead=3)
    # What is drawn hangs on all that a row is told, so a prompt that ends midway is looked for.
    candidates = [
        request("a", [4, 2, last], grammar=TOY, end_ids=tuple(range(20))) for last in range(50)
    ]
    asked, outputs = next(
        (each, outputs)
        for each in candidates
        if 1 < len(outputs := expected_outputs(each, 0, engine)) < 8
    )
    play = Play(FakeDevice(engine))
    play.run(asked)
    assert play.emitted["a"] == outputs
    assert play.seen["a"] == outputs[:-1]
