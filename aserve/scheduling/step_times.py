"""The times of decode steps with drafts, and the choice that gives the most tokens per time.

In a step of n decodes, k rows verify d drafts each. With F(n, d) the time of a step in which one
row drafts, and W(n, d) that of a step in which all do, the step takes

    T(n, k, d) = F(n, d) + (W(n, d) - F(n, d)) (k - 1) / (n - 1)

The first row costs more than others, because with it the whole step is one with windows. A row
whose drafts are accepted with probability p gives a(d) = p + p^2 + ... + p^d tokens beside the one
of plain decoding.

What does a choice gain? All rows wait for the windows, so a row that drafts takes T / (1 + a) for
each of its tokens, and one that does not takes T, where both took P(n), the time of a plain step.
The gain is the old time over the new one, each the mean of all rows:

    gain = n P(n) / (T * (n - sum of a / (1 + a)))

So requests end no later in the mean. WHY not the sum of all tokens over T: a row that drafts among
many then seems to pay for all, but the others are slower, and the last of them ends later. For
given k and d the k rows with the largest p are the best, so sorting finds the best choice. In the
same sense an accepted token is worth P(n) / (1 + a) / (n - sum of a / (1 + a)), which is P(n) / n
if all rows are alike, and less for one that is ahead of the others anyway.

The load of the machine and the lengths of the rows change. So each step tells how long it took, and
T is multiplied by how much slower steps with windows have become than plain ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aserve.messages.results import StepTimes
from aserve.messages.step import DraftTree

Floats = npt.NDArray[np.float64]


class Choice(NamedTuple):
    """Indices of the rows that draft, the number of drafts of each, and the expected speed over
    that of plain decoding."""

    indices: npt.NDArray[np.int64]
    num_drafts: int
    gain: float


MIN_GAIN = 1.1  # that a choice must promise, because the times are not exact
PLAIN_FADING = 4  # steps after which the time of a plain one counts 1/e
WINDOW_FADING = 16
SLOWNESS_FADING = 512
MOST_PACE = 8.0
MOST_JUMP = 2.0  # of a pace, in one step
NO_DRAFTS = Choice(np.empty(0, np.int64), num_drafts=0, gain=1.0)


class WindowTimes:
    """Tables of the times in microseconds, by number of rows."""

    __slots__ = ("_depths", "_firsts", "_followed", "_plain_pace", "_slowness", "_windows", "plain")

    def __init__(self, times: StepTimes, *, max_rows: int, tree: DraftTree | None) -> None:

        def table(values: tuple[float, ...]) -> Floats:
            return _for_all(times.num_rows, values, max_rows)

        # NOTE: noise of the measurement must not make more work cheaper than less.
        self.plain = np.maximum.accumulate(table(times.plain_us))
        self._followed = np.maximum(table(times.window_us[0]), self.plain)
        self._windows = {
            num_drafts: np.maximum(table(values) - self._followed, 0)
            for num_drafts, values in times.window_us.items()
            if num_drafts
        }
        # Of the first row; one that was not measured costs as much as the others.
        self._firsts = {
            num_drafts: windows / np.maximum(np.arange(max_rows + 1), 1)
            for num_drafts, windows in self._windows.items()
        }
        for num_drafts, values in times.first_us.items():
            first = np.maximum(table(values) - self._followed, 0)
            self._firsts[num_drafts] = np.minimum(first, self._windows[num_drafts])
        self._depths = {
            num_drafts: num_drafts if tree is None else tree.depth(num_drafts)
            for num_drafts in self._windows
        }
        self._plain_pace = 0.0  # of plain steps, over what was measured at the start; 0: unknown
        self._slowness = 1.0  # of steps with windows, over plain ones

    def correct(self, took_us: float, expected_us: float, *, has_drafts: bool) -> float:
        """Takes in the time of a step. Returns how much longer than expected it took, at the pace
        of plain steps.

        NOTE: what windows cost is forgotten while there are none, so that they are tried again.
        """
        pace = min(max(took_us / expected_us, 1 / MOST_PACE), MOST_PACE)
        if not has_drafts:
            first = self._plain_pace or pace
            self._plain_pace = first + (_near(pace, first) - first) / PLAIN_FADING
            self._slowness += (1 - self._slowness) / SLOWNESS_FADING
            return 0.0
        if not self._plain_pace:
            return 0.0
        lateness = _near(pace / self._plain_pace, 1.0) - 1
        self._slowness += self._slowness * lateness / WINDOW_FADING
        return lateness * expected_us

    @property
    def max_drafts(self) -> int:
        return max(self._windows)

    def price(self, num_rows: int, *, num_drafting: int, num_drafts: int) -> float:
        """Returns what a step takes longer than a plain one."""
        time = self._followed[num_rows]
        if num_drafting:
            first, whole = self._first_and_whole(num_rows, self._measured(num_drafts))
            time += first + (whole - first) * (num_drafting - 1) / max(num_rows - 1, 1)
            time *= self._slowness
        return float(time - self.plain[num_rows])

    def best(self, chances: Floats) -> Choice:
        """Returns the best choice for rows with these probabilities of acceptance, if its gain is
        at least MIN_GAIN."""
        num_rows = len(chances)
        order = np.argsort(-chances, kind="stable")
        best = NO_DRAFTS
        for num_drafts in self._windows:
            accepted = expected(chances[order], self._depths[num_drafts])
            times = self._slowness * (self._followed[num_rows] + self._more(num_rows, num_drafts))
            gains = self.plain[num_rows] / (times * _shares(num_rows, accepted))
            num = int(gains.argmax())
            if gains[num] > max(best.gain, MIN_GAIN):
                best = Choice(order[: num + 1], num_drafts, float(gains[num]))
        return best

    def worth_us(self, num_rows: int, num_drafts: int, chances: Floats) -> Floats:
        """Returns what an accepted token of each row that drafts is worth."""
        accepted = expected(chances, self._depths[num_drafts])
        share = float(_shares(num_rows, accepted)[-1])
        worth: Floats = self.plain[num_rows] / num_rows / (1 + accepted) / share
        return worth

    def num_affordable(self, num_rows: int, budget_us: float) -> int:
        """Returns how many rows may draft if the step must not take longer than a plain one by more
        than `budget_us`; 0 if drafts do not pay even where all of them are accepted.
        """
        most = self.max_drafts
        if not len(self.best(np.ones(num_rows)).indices):
            return 0
        times = self._slowness * (self._followed[num_rows] + self._more(num_rows, most))
        return int((times - self.plain[num_rows] <= budget_us).sum())

    def _more(self, num_rows: int, num_drafts: int) -> Floats:
        """Returns how much longer a step takes than one without drafts if 1, 2, ... rows draft."""
        return np.linspace(*self._first_and_whole(num_rows, num_drafts), num_rows)

    def _first_and_whole(self, num_rows: int, num_drafts: int) -> tuple[float, float]:
        """The same, if one row drafts and if all do."""
        whole = float(self._windows[num_drafts][num_rows])
        return float(self._firsts[num_drafts][num_rows]) if num_rows > 1 else whole, whole

    def _measured(self, num_drafts: int) -> int:
        """Returns the smallest number of drafts that was measured and is no less."""
        return min((num for num in self._windows if num >= num_drafts), default=self.max_drafts)


def _shares(num_rows: int, accepted: Floats) -> Floats:
    """Returns the mean of 1 / (1 + a) over all rows if the first row drafts, the first two, ..."""
    shares: Floats = 1 - (accepted / (1 + accepted)).cumsum() / num_rows
    return shares


def _near(pace: float, usual: float) -> float:
    return min(max(pace, usual / MOST_JUMP), usual * MOST_JUMP)


def _for_all(num_rows: tuple[int, ...], values: tuple[float, ...], max_rows: int) -> Floats:
    """Interpolates between the numbers of rows, and goes on behind the last as before it."""
    counts = np.arange(max_rows + 1)
    found = np.interp(counts, num_rows, values)
    if len(num_rows) > 1:
        slope = max(values[-1] - values[-2], 0) / (num_rows[-1] - num_rows[-2])
        found += slope * np.maximum(counts - num_rows[-1], 0)
    return found


def expected(chances: Floats, depth: int) -> Floats:
    """Returns how many of `depth` drafts in a row are accepted on average."""
    total = np.zeros_like(chances)
    for _ in range(depth):
        total = chances * (1 + total)
    return total
