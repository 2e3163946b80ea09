"""Changes to sequences that wait or run, as values. The random traces amend, too."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.changes import Amend, Amended, SequenceState
from aserve.messages.output import Retired, StepOutput
from tests.scheduling.stage import Stage, query_lens, request, result, rows, spec
from tests.scheduling.test_reasoning import limited


def change(name: str = "a", number: int = 1, **fields: Any) -> Amend:
    return Amend(name, number, **fields)


def answer(stage: Stage) -> Amended:
    (found,) = stage.of(Amended)
    return found


def test_max_tokens_below_what_is_out_ends_the_answer_there() -> None:
    stage = Stage(spec())
    stage.play(request("a", [5, 6, 7], max_tokens=20))
    stage.play(result(1, {1: [20]}))
    stage.play(result(2, {1: [21]}), change(max_tokens=1))
    (retired,) = stage.of(Retired)
    assert (retired.reason, retired.num_outputs) == ("length", 2)
    assert answer(stage).sequences == (SequenceState(0, "ended", 3, 2, 1, 0),)
    stage.play(change(number=2, max_tokens=9))
    assert (answer(stage).sequences, answer(stage).error) == ((), None)
    stage.play(result(3, {1: [22]}), result(4, {1: [23]}))
    assert not stage.of(StepOutput)
    assert stage.scheduler.is_idle


def test_a_raised_max_tokens_lets_a_row_go_on_that_waited_for_its_last_token() -> None:
    stage = Stage(spec())
    stage.play(request("a", [5, 6, 7], max_tokens=2))
    assert not stage.play(), "both tokens are in flight"
    stage.play(change(max_tokens=3), change(number=2, max_tokens=3))
    stage.play(result(1, {1: [20]}))
    assert [rows(batch) for batch in stage.batches] == [[1]]
    stage.play(result(2, {1: [21]}))
    stage.play(result(3, {1: [22]}))
    assert [each.num_outputs for each in stage.of(Retired)] == [3]


@pytest.mark.parametrize(
    ("fields", "code", "numbers"),
    [
        ({"max_tokens": 126}, "context_length_exceeded", ("128", "3", "125 are left")),
        ({"max_tokens": 60}, "exceeds_kv_capacity", ("16 KV pages", "has 9")),
        ({"ends_reasoning": True, "max_tokens": 5}, "no_reasoning", ()),
    ],
)
def test_what_could_not_be_kept_is_refused_with_the_numbers(
    fields: dict[str, Any], code: str, numbers: tuple[str, ...]
) -> None:
    stage = Stage(spec(num_pages=10))
    stage.play(request("a", [5, 6, 7], max_tokens=9))
    stage.play(change(**fields))
    error = answer(stage).error
    assert error is not None
    assert error.code == code
    assert all(number in error.message for number in numbers)
    assert answer(stage).sequences[0].max_tokens == 9


def test_a_priority_reorders_the_queue_and_can_be_taken_back() -> None:
    stage = Stage(spec(max_rows=1, depth=1, lead=1))
    stage.play(*(request(name, [number], max_tokens=1) for number, name in enumerate("abcd")))
    stage.play(change("c", priority=1), change("c", 2, priority=0), change("d", 3, priority=-1))
    assert [each.sequences[0].num_ahead for each in stage.of(Amended)] == [2, 1, 0]
    stage.play(change("b", 4, priority=2))
    ended: list[str] = []
    for iteration in range(1, 5):
        stage.play(result(iteration, {1: [50]}))
        ended += [each.request_id for each in stage.of(Retired)]
    assert ended == ["a", "d", "c", "b"]


def test_reasoning_ends_at_once_wherever_the_sequence_is() -> None:
    """It runs, it waits with outputs, and its reasoning has not begun."""
    stage = Stage(spec(max_rows=1))
    begun = {"outputs": (pack_i32([8, 50]),)}
    stage.play(limited("a", **begun), limited("b", **begun), limited("c"))
    for name in "abc":
        stage.play(change(name, ends_reasoning=True), change(name, 2, ends_reasoning=True))
        forced = [array_i32(each.token_ids).tolist() for each in stage.outputs]
        assert forced == ([] if name == "c" else [[1, 1, 2]])
    stage.play(result(1, {1: [60]}), result(2, {1: [61]}))
    assert not stage.of(StepOutput), "what was in flight does not count"
    assert query_lens(stage.batches[0]) == [8], "nothing was committed before"
    stage.play(msgspec.structs.replace(result(3, {1: [62]})))
    (output,) = stage.outputs
    assert (output.position, array_i32(output.token_ids).tolist()) == (5, [62])
