"""Chooses how many threads run a compiled step together, by the times of earlier steps.

A team meets several times in each layer. If other work wants the processors, a thread that has none
for some milliseconds makes all others wait, and fewer threads are faster. So now and then a step is
run by half or by twice as many threads as the others, and its time decides. All sizes of a team
give the same results.

PERF: Qwen3-0.6B in bfloat16 on 2 cores, ms per decode step of 1 and 8 rows: 35 and 46 with two
threads, 75 and 101 while another program keeps one of the cores busy.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")

FIRST, LONGEST = 8, 128  # steps between two trials; the number doubles while they change nothing
WEIGHT = 0.25  # of the last step in the running mean
LEAST_GAIN = 0.95  # a trial must take less than this share of the mean


class TeamChoice:
    """Each power of two of tokens has its own times."""

    __slots__ = ("_clock", "_sizes")

    def __init__(self, num_workers: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        sizes = tuple(num_workers >> halvings for halvings in range(num_workers.bit_length()))
        self._sizes: defaultdict[int, _Sizes] = defaultdict(lambda: _Sizes(sizes))

    def run(self, num_tokens: int, work: Callable[[int], R]) -> R:
        """Calls `work` with a number of threads, and returns what it returns."""
        sizes = self._sizes[num_tokens.bit_length()]
        place = sizes.next_place()
        start_s = self._clock()
        result = work(sizes.sizes[place])
        sizes.note(place, self._clock() - start_s)
        return result


class _Sizes:
    """The sizes of teams for steps of about the same number of tokens, the largest first."""

    __slots__ = ("_interval", "_mean_s", "_place", "_steps_left", "_tries_less", "sizes")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._place = 0  # of the size that is in use
        self._mean_s = 0.0  # of its steps
        self._interval = self._steps_left = FIRST
        self._tries_less = True

    def next_place(self) -> int:
        """Returns the place of the size for the next step."""
        if self._steps_left or len(self.sizes) == 1:
            return self._place
        last = len(self.sizes) - 1
        is_less = self._place == 0 or (self._tries_less and self._place < last)
        self._tries_less = not is_less
        return self._place + (1 if is_less else -1)

    def note(self, place: int, time_s: float) -> None:
        if place == self._place:
            self._mean_s += (WEIGHT if self._mean_s else 1) * (time_s - self._mean_s)
            self._steps_left = max(0, self._steps_left - 1)
            return
        self._interval = min(2 * self._interval, LONGEST)
        if time_s < LEAST_GAIN * self._mean_s:
            self._place, self._mean_s, self._interval = place, time_s, FIRST
        self._steps_left = self._interval
