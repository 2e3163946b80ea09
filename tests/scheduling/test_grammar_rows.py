"""What a grammar's matcher sees of a sequence with held rows."""

from __future__ import annotations

from collections import defaultdict, deque

import msgspec
import pytest

from aserve.errors import InvalidRequest
from aserve.messages.base import array_i32, num_mask_words
from aserve.messages.executor import SchedulerEffect, SchedulerEvent
from aserve.messages.output import Refused, Retired, StepOutput
from aserve.messages.requests import FailRequest
from aserve.messages.results import BuildMask, MaskReady, StepFailed
from aserve.messages.step import Launch, Resync, Sample, ScheduleBatch
from aserve.scheduling.scheduler import Scheduler
from tests.fakes.toy_device import TOY, FakeDevice, ToyMatchers, expected_outputs
from tests.scheduling.stage import Stage, request, result, spec


class Play:
    """Scheduler, device and matchers until nothing is left to do; events come one by one. The masks
    of requests that `slow` names are slow.
    """

    def __init__(self, device: FakeDevice, *, slow: str = "") -> None:
        self.scheduler = Scheduler(device.spec, debug_checks=True)
        self.seen: defaultdict[str, list[int]] = defaultdict(list)  # by the matcher of a request
        self.emitted: defaultdict[str, list[int]] = defaultdict(list)
        self.num_failed = 0
        self.num_slow_rows: list[int] = []  # after each turn
        self._slow = slow
        self._device = device
        self._matchers = ToyMatchers(device.spec.vocab_size)
        self._events: deque[SchedulerEvent] = deque()

    def run(self, *events: SchedulerEvent) -> None:
        self._events.extend(events)
        while self._events:
            for effect in self.scheduler.step([self._events.popleft()]):
                self._perform(effect)
            running = self.scheduler.state.running.values()
            self.num_slow_rows.append(sum(each.request_id in self._slow for each in running))

    def _perform(self, effect: SchedulerEffect) -> None:
        match effect:
            case Launch():
                [batch] = effect.batches
                self._answer(self._device.run(batch))
            case Sample() | Resync():
                self._answer(self._device.run(effect))
            case BuildMask():
                self.seen[effect.request_id] += array_i32(effect.new_ids).tolist()
                ready = self._matchers.fill(effect)
                is_slow = effect.request_id in self._slow
                self._answer(msgspec.structs.replace(ready, is_slow=is_slow))
            case StepOutput():
                for part in effect.outputs():
                    self.emitted[part.request_id] += array_i32(part.token_ids).tolist()
            case Retired():
                assert effect.error is None
            case _:
                raise AssertionError(effect)

    def _answer(self, event: SchedulerEvent | None) -> None:
        if event is not None:
            self.num_failed += isinstance(event, StepFailed)
            self._events.append(event)


def sent(scheduler: Scheduler, *events: SchedulerEvent) -> list[ScheduleBatch]:
    launches = [e for e in scheduler.step([*events]) if isinstance(e, Launch)]
    return [batch for launch in launches for batch in launch.batches]


@pytest.mark.parametrize(("depth", "lead"), [(1, 1), (2, 2), (3, 3)])
def test_trap_4_a_grammar_sees_every_emitted_token_once(depth: int, lead: int) -> None:
    """None of a wasted row's, and none a second time after a retraction or a failed step."""
    engine = spec(depth=depth, lead=lead, num_pages=15, page_size=1, max_rows=3)
    requests = [request(name, [ord(name), 2, 3], grammar=TOY) for name in "XYZ"]
    play = Play(FakeDevice(engine, must_fail=lambda batch: batch.iteration == 4))
    play.run(*requests)
    assert play.scheduler.is_idle
    assert play.scheduler.state.num_retracted > 0
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


@pytest.mark.parametrize(("depth", "lead"), [(1, 1), (2, 2), (3, 3)])
def test_requests_with_slow_masks_get_few_rows_and_the_same_tokens(depth: int, lead: int) -> None:
    engine = spec(depth=depth, lead=lead, num_pages=65, max_rows=16)
    slow = [request(name, [ord(name), 2], n=2, grammar=TOY) for name in "XY"]
    others = [request("F", [7, 2], grammar=TOY), request("P", [8, 2])]
    play = Play(FakeDevice(engine), slow="XY")
    play.run(*slow, *others)
    assert play.scheduler.is_idle
    assert max(play.num_slow_rows) == 4, "before the first mask nobody knows"
    assert play.scheduler.state.num_retracted == 2
    marked = play.num_slow_rows.index(2, play.num_slow_rows.index(4))
    assert max(play.num_slow_rows[marked:]) == 2
    for each in others:
        assert play.emitted[each.request_id] == expected_outputs(each, 0, engine)
    for each in slow:
        both = expected_outputs(each, 0, engine) + expected_outputs(each, 1, engine)
        assert sorted(play.emitted[each.request_id]) == sorted(both)


def test_a_flood_of_slow_masks_leaves_places_in_the_queue_for_others() -> None:
    stage = Stage(msgspec.structs.replace(spec(num_pages=400, max_rows=8), max_waiting=90))
    mask = b"\xff" * 4 * num_mask_words(stage.scheduler.state.spec.vocab_size)
    num_refused = 0
    answers: list[SchedulerEvent] = []
    for number in range(120):
        asked = request(str(number), [number % 90, 2], grammar=TOY, client="A", max_tokens=50)
        stage.play(asked, *answers)
        num_refused += len(stage.of(Refused))
        answers = [result(batch.iteration, {}) for batch in stage.batches]
        for ask in stage.of(BuildMask):
            answers.append(MaskReady(ask.request_id, ask.child, ask.position, mask, is_slow=True))
    state = stage.scheduler.state
    assert len(state.slow_waiting) == state.num_waiting < 90
    assert num_refused
    stage.play(*(request(f"b{number}", [1, 2], client=f"B{number}") for number in range(3)))
    assert not stage.of(Refused)


def test_a_row_whose_mask_is_slow_does_not_hold_up_the_launches_of_others() -> None:
    """With lead = depth a launch waits for held rows while a step is in flight."""
    scheduler = Scheduler(spec(depth=2, lead=2, max_rows=16), debug_checks=True)
    (first,) = sent(scheduler, request("S", [1, 2], grammar=TOY), request("p", [3, 4]))
    (slow_row,) = array_i32(first.held_rows).tolist()
    (free_row,) = set(array_i32(first.rows).tolist()) - {slow_row}
    (second,) = sent(scheduler, MaskReady("S", 0, 0, b"\0" * 16, is_slow=True))
    assert array_i32(second.held_rows).tolist() == [slow_row]
    (third,) = sent(scheduler, result(1, {free_row: [5]}))
    assert slow_row in scheduler.state.held, "its second mask is late"
    assert array_i32(third.rows).tolist() == [free_row]


def test_a_failed_request_ends_with_all_its_children_at_once() -> None:
    scheduler = Scheduler(spec(max_rows=2), debug_checks=True)
    scheduler.step([request("a", [1, 2], n=3, grammar=TOY), request("b", [3])])
    error = InvalidRequest("too slow", code="grammar_too_complex").info()
    effects = scheduler.step([FailRequest("a", error), FailRequest("unknown", error)])
    ends = [effect for effect in effects if isinstance(effect, Retired)]
    assert [(end.request_id, end.child, end.error) for end in ends] == [
        ("a", child, error) for child in range(3)
    ]
    assert list(scheduler.state.groups) == ["b"]
