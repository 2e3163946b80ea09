"""What the engine says goes to the frontend that made the id of the request."""

from __future__ import annotations

from aserve.errors import BugError
from aserve.http.all_frontends import merged
from aserve.http.peers import Peers, owner_of
from aserve.messages.base import pack_i32
from aserve.messages.changes import Amend, Amended
from aserve.messages.output import (
    DetokenizerEvent,
    NextTokens,
    Refused,
    Retired,
    SequenceOutput,
    StepOutput,
)
from aserve.processes.frontends import RoutedOutputs

NUMBERS = (0, 1, 12)


def test_ids_name_their_frontend_also_as_ids_of_requests_and_answers() -> None:
    for number in NUMBERS:
        made = Peers(number).new_id()
        assert [owner_of(each) for each in (made, f"{made}-0", f"cmpl-{made}")] == [number] * 3
    for foreign in ("", "any", "my.1", "a" * 31 + ".1", "a" * 32, "a" * 32 + ".x"):
        assert owner_of(foreign) == 0


async def test_each_frontend_gets_what_is_about_its_requests_in_order() -> None:
    sent: list[tuple[int, DetokenizerEvent]] = []
    outputs = RoutedOutputs(lambda number, message: sent.append((number, message)))
    ids = [Peers(number).new_id() + "-0" for number in NUMBERS]
    first, second, third = (SequenceOutput(each, 0, 0, b"1234", 0) for each in ids)
    again = SequenceOutput(ids[1], 1, 0, b"5678", 0)
    others: list[DetokenizerEvent] = [
        Retired(ids[1], 0, "stop", 1),
        Refused(ids[2], BugError("any").info()),
        Amended(Amend(ids[0], 1)),
    ]
    for message in (StepOutput(7, (first, second, third, again)), *others):
        outputs.send(message)
    assert sent == [
        (0, StepOutput(7, (first,))),
        (1, StepOutput(7, (second, again))),
        (12, StepOutput(7, (third,))),
        *zip((1, 12, 0), others, strict=True),
    ]


def test_each_frontend_gets_its_part_of_the_next_tokens() -> None:
    sent: list[tuple[int, DetokenizerEvent]] = []
    outputs = RoutedOutputs(lambda number, message: sent.append((number, message)))
    ids = [Peers(number).new_id() + "-0" for number in NUMBERS]
    order = (1, 0, 1)  # frontends by their place among the numbers
    columns = [pack_i32([10 * place + column for place in range(3)]) for column in range(4)]
    tokens = NextTokens(tuple(ids[each] for each in order), *columns)
    record = SequenceOutput(ids[2], 0, 0, b"1234", 0)
    outputs.send(StepOutput(7, (record,), tokens))
    second = NextTokens((ids[1], ids[1]), *[pack_i32([each, 20 + each]) for each in range(4)])
    first = NextTokens((ids[0],), *[pack_i32([10 + each]) for each in range(4)])
    assert sent == [
        (1, StepOutput(7, (), second)),
        (0, StepOutput(7, (), first)),
        (12, StepOutput(7, (record,))),
    ]


def test_answers_of_all_frontends_are_added_up_to_the_time_that_all_of_them_tell_of() -> None:
    """What ended between two of them would be missed with the later time."""
    first = {"now_s": 8.5, "requests": ["a"], "load": 2, "is_paused": True, "model": "x"}
    second = {"now_s": 8.25, "requests": ["b"], "load": 3, "is_paused": True, "model": "y"}
    whole = {"now_s": 8.25, "requests": ["a", "b"], "load": 5, "is_paused": True, "model": "x"}
    assert merged([first, second]) == merged([first | {"now_s": 8.25}, second]) == whole
