from __future__ import annotations

from aserve.messages.executor import SchedulerEvent
from aserve.scheduling.tick import Intake, max_received
from tests.scheduling.stage import cancel, request, result


def test_new_requests_are_split_over_turns_and_results_are_not_held() -> None:
    intake = Intake()
    events: list[SchedulerEvent] = [request(f"r{number}", [1]) for number in range(150)]
    back = [result(number, {}) for number in range(3)]
    turns = [intake.next_tick([*events, *back])]
    while intake:
        turns.append(intake.next_tick([]))
    assert turns[0] == [*back, *events[: max_received(0)]]
    assert [event for turn in turns for event in turn if event not in back] == events
    assert max(len(turn) for turn in turns) == max_received(0) + len(back)


def test_a_cancel_comes_at_once_unless_its_request_is_held() -> None:
    intake = Intake()
    big, small = request("big", [1], n=64), request("small", [1])
    assert intake.next_tick([big, small, cancel("small"), cancel("big"), cancel("x")]) == [
        cancel("x"),
        big,
    ]
    assert intake.next_tick([]) == [small, cancel("small"), cancel("big")]
    assert intake.next_tick([cancel("small")]) == [cancel("small")]
