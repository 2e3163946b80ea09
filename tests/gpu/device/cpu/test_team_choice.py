"""How many threads run a step, by times on a clock that only the steps move."""

from __future__ import annotations

from collections.abc import Mapping

from aserve.gpu.device.cpu.team_choice import FIRST, LONGEST, TeamChoice


class Machine:
    """Steps take a time for each number of threads."""

    def __init__(self, times: Mapping[int, float]) -> None:
        self.times = times
        self.now_s = 0.0
        self.used: list[int] = []
        self.choice = TeamChoice(max(times), clock=lambda: self.now_s)

    def step(self, num_threads: int) -> str:
        self.now_s += self.times[num_threads]
        self.used.append(num_threads)
        return "a result"

    def run(self, num_steps: int, num_tokens: int = 1) -> list[int]:
        """Returns how many threads each step had."""
        self.used = []
        for _ in range(num_steps):
            assert self.choice.run(num_tokens, self.step) == "a result"
        return self.used


def test_all_threads_run_most_steps_where_that_is_fastest() -> None:
    machine = Machine({4: 1.0, 2: 1.8, 1: 3.5})
    assert machine.run(FIRST + 1) == [4] * FIRST + [2]
    used = machine.run(10 * LONGEST)
    assert set(used) == {4, 2}
    assert used.count(2) < 16


def test_fewer_threads_take_over_while_others_need_the_processors() -> None:
    machine = Machine({4: 1.0, 2: 1.8, 1: 3.5})
    machine.run(LONGEST)
    machine.times = {4: 9.0, 2: 5.0, 1: 3.5}
    machine.run(8 * LONGEST)
    assert machine.run(LONGEST).count(1) > LONGEST * 0.8
    machine.times = {4: 1.0, 2: 1.8, 1: 3.5}
    machine.run(8 * LONGEST)
    assert machine.run(LONGEST).count(4) > LONGEST * 0.8


def test_numbers_of_tokens_have_choices_of_their_own() -> None:
    machine = Machine({2: 2.0, 1: 1.0})
    machine.run(4 * LONGEST, num_tokens=1)
    machine.times = {2: 1.0, 1: 2.0}
    assert machine.run(FIRST, num_tokens=64) == [2] * FIRST
    assert machine.run(FIRST, num_tokens=1).count(1) >= FIRST - 1


def test_a_single_thread_has_no_choice() -> None:
    machine = Machine({1: 1.0})
    assert machine.run(3 * LONGEST) == [1] * (3 * LONGEST)
