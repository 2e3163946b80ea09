"""Chooses the rows of a step that draft, and how many tokens, from step times that were measured
when the engine started. Without them, draft_length.py decides alone.

Written here: `num_cut`, `num_skipped`, `num_missed`, `match_level`, `accepted`, `rejected`,
`num_attempts` and `next_attempt` of the row table. Rows with a prediction are not chosen here.
"""

# Theory of operation
#
# Choice. step_times.py says which rows draft, given each row's probability of acceptance p. It
# holds for some steps, or until rows come or go, or until a repetition begins or ends. While nobody
# drafts, steps skip the drafter, and cost what plain decoding costs; here they are only counted.
#
# Acceptance. `accepted` and `rejected` of a row count the drafts that were accepted, and the
# windows that ended with a rejected one; old windows count less. p = accepted / (accepted +
# rejected), where the mean over all rows counts as PRIOR observations more: a new row is taken
# for a usual one.
#
# Repetitions. A drafter without a model continues what the row has said before, or another row. The
# length of the row's own match is known without drafting (ngram_matches.py), and a row is usual for
# that length. Whether others say the same is not known. So from time to time any row tries one
# window, and what rows without a match may expect is learned from these.
#
# Rows that accept alike. Few windows say little about a row. So a row whose drafts differ from the
# usual ones by no more than chance counts as usual; else chance alone would choose some of many
# rows that are alike.
#
# Accounts. Estimates may be wrong, so speculation has accounts (draft_accounts.py), one for each
# power of two of rows: what pays for one row may lose for many. A step with drafts is charged what
# it takes longer than a plain one, and its accepted tokens are credited with what they are worth to
# the rows that are there (step_times.py). Each plain step credits 1 / INCOME_PARTS of its time. No
# row drafts while the account is overdrawn. It begins with what a window of all rows and an attempt
# of one cost, and a few milliseconds, and never has more than MAX_WINDOWS of the first. So whatever
# the estimates are, speculation loses no more than what it begins with, that part of the time, and
# what it has gained before.
#
# Times. Results tell how long their steps took, those of all steps with drafts and of some plain
# ones. This corrects the times that were measured, and the account. Where all steps draft, there is
# a probe of plain ones from time to time.
#
# Attempts. Where drafts do not seem to pay, some are tried, because estimates may be wrong and text
# changes. A row tries ATTEMPT_WINDOWS windows if the account pays for them: at its start, and again
# with distances that double. While attempts are in vain, whatever their rows, the account gets half
# as much for more of them, and choices are rarer.
#
# A skipped drafter with a model does not know the tokens of the step. Before such a row drafts
# again, it takes part in one step that the drafter follows, which leaves the row's last hidden
# state in the relay. The drafter's KV of the skipped tokens stays empty. So its next drafts are
# worse, and the tokens the same; what is accepted then says nothing about a usual row, and such
# attempts are rarer.
#
# Everything follows from the measured times, from those that results bring, and from counts, never
# from a clock, so that a recording replays.

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from aserve.messages.base import ArrayI32
from aserve.messages.executor import DecodeCaps
from aserve.messages.results import StepTimes
from aserve.messages.step import StepStats
from aserve.scheduling.draft_accounts import ATTEMPT_WINDOWS, Accounts
from aserve.scheduling.draft_length import note_windows
from aserve.scheduling.flights import Step
from aserve.scheduling.ngram_matches import USUAL_OF_LEVELS, UsualWindows, match_levels, near_usual
from aserve.scheduling.request import Sequence
from aserve.scheduling.rows import Column, RowTable
from aserve.scheduling.step_times import MIN_GAIN, NO_DRAFTS, Choice, Floats, WindowTimes

SCALE = 256  # of the counts in the row table
FADING = 12  # windows after which an observation counts 1/e for its row
USUAL = 0.8  # the probability of acceptance before any window, for a drafter with a model
HOLD = 8  # steps
IDLE_HOLD = 64  # the same where no row drafts, because plain steps may be short
LOOKS_HOLD = 64  # the same where rows are looked at in between
LOOK_DISTANCE = 4  # steps between two looks for repetitions
TIMED = 8  # steps of which one is timed where no row drafts
PROBE_DISTANCE = 256  # steps with drafts between two probes of plain steps
PROBE_STEPS = 2
ATTEMPT_DISTANCE = 64  # tokens
RARE_DISTANCE = 256  # the same where a drafter lacks KV
TRIAL_DISTANCE = 512  # steps without drafts, where repetitions would have shown
MAX_ATTEMPTS = 2  # 64 << 2 tokens
MAX_VAIN = 1  # doublings of IDLE_HOLD


class DraftChoice:
    __slots__ = (
        *("_accounts", "_attempts_left", "_caps", "_expected", "_fixed", "_hold", "_is_drafting"),
        *("_is_named", "_levels", "_looks", "_most", "_num_decodes", "_num_idle", "_num_skips"),
        *("_num_vain", "_num_window_steps", "_packed", "_rows", "_times", "_usual", "_worth_us"),
    )

    def __init__(self, caps: DecodeCaps) -> None:
        self._caps = caps
        self._most = caps.max_tokens_per_step - caps.root_len
        self._fixed: tuple[int, int] | None = None
        self._times: WindowTimes | None = None
        self._looks = caps.continues_repeats
        # Without repetitions all windows are of level 0.
        self._usual = UsualWindows(USUAL_OF_LEVELS if self._looks else (USUAL,))
        self._accounts = Accounts()
        self._num_decodes, self._packed = 0, b""  # of the last choice, with a prediction or without
        self._is_named = np.zeros(0, np.bool_)  # by row, whether it was among them
        self._worth_us = np.zeros(0)  # of an accepted token, by row
        self._rows: list[int] = []  # those without
        self._levels: list[int] = []  # of their matches
        self._hold = 0  # steps for which it still holds
        self._is_drafting = False
        self._num_idle = 0  # steps since the last one with drafts
        self._num_skips = 0  # steps that skipped the drafter, and are not in the row table yet
        self._attempts_left = 0  # windows of an attempt
        self._num_vain = 0  # attempts since windows accepted a draft or more on average
        # Steps in flight: their iteration, time in microseconds, and rows if some draft.
        self._expected: deque[tuple[int, float, int]] = deque()
        self._num_window_steps = PROBE_DISTANCE  # since the last plain ones

    @property
    def is_on(self) -> bool:
        return self._times is not None or self._fixed is not None

    @property
    def is_drafting(self) -> bool:
        """Whether the last choice has a row draft, other than those with a prediction."""
        return self._is_drafting

    def set_times(self, times: StepTimes, *, max_rows: int) -> None:
        """NOTE: where tokens depend on the windows, these do not depend on times and load."""
        if not self._caps.whole_windows:
            self._worth_us = np.zeros(max_rows + 1)
            self._times = WindowTimes(times, max_rows=max_rows, tree=self._caps.tree)

    def fix(self, num_rows: int, num_drafts: int) -> None:
        """Gives each of the first decodes so many drafts, in order to measure the times; with -1
        steps skip the drafter."""
        self._fixed, self._hold = (num_rows, num_drafts), 0

    def choose(self, table: RowTable, decodes: Column, running: Mapping[int, Sequence]) -> None:
        """Decides how many drafts these decodes may have in their next step."""
        if not self.is_on or not len(decodes) or self.holds(decodes, running):
            return
        self._note_skips(table)
        rows = decodes[self._is_own(table, decodes)]
        self._num_decodes, self._packed = len(decodes), decodes.tobytes()
        self._is_named = np.zeros(len(table.num_cut), np.bool_)
        self._is_named[decodes] = True
        self._rows, self._levels = rows.tolist(), [0] * len(rows)
        self._hold = LOOK_DISTANCE if self._looks else HOLD
        # NOTE: a row that is not ready now may be in a step before the next choice.
        table.num_cut[self._is_own(table, slice(None))] = self._most
        if self._fixed is not None:
            num_rows, num_drafts = self._fixed
            table.num_cut[rows[:num_rows]] = self._most - max(num_drafts, 0)
            self._is_drafting = num_drafts >= 0
        elif self._times is not None and len(rows):
            self._is_drafting = False
            if not self._looks or self._looks_good(table, rows, running):
                self._choose_anew(table, rows, self._times)
            if not self._is_drafting:
                idle_hold = IDLE_HOLD << min(self._num_vain, MAX_VAIN)
                self._hold = LOOKS_HOLD if self._looks else idle_hold

    def holds(self, decodes: Column, running: Mapping[int, Sequence]) -> bool:
        """Returns whether the last choice is good for the next step of these decodes, too."""
        is_look = self._looks and not (self._is_drafting or self._hold % LOOK_DISTANCE)
        is_same = self._hold > 0 and self._is_same(decodes)
        return is_same and not (is_look and self._repeats_more(running))

    def _is_same(self, decodes: Column) -> bool:
        """Whether the last choice was about these rows."""
        return len(decodes) == self._num_decodes and (
            decodes.tobytes() == self._packed or bool(self._is_named[decodes].all())
        )

    def _repeats_more(self, running: Mapping[int, Sequence]) -> bool:
        """Returns whether a row has begun to repeat itself since no row was chosen to draft."""
        levels = match_levels([running[row].tokens for row in self._rows])
        return any(map(operator.gt, levels, self._levels))

    def _looks_good(self, table: RowTable, rows: Column, running: Mapping[int, Sequence]) -> bool:
        """Returns whether a row may repeat itself or others, or is due to try a window."""
        self._levels = match_levels([running[row].tokens for row in self._rows])
        table.match_level[rows] = self._levels
        best = float(self._usual.chances[self._levels].max())
        return best > MIN_GAIN - 1 or self._num_idle >= TRIAL_DISTANCE

    def _choose_anew(self, table: RowTable, rows: Column, times: WindowTimes) -> None:
        chances = self._chances(table, rows)
        choice = self._best(rows, times, chances)
        self._attempts_left = 0
        if len(choice.indices):
            if self._num_window_steps >= PROBE_DISTANCE:
                self._is_drafting, self._num_window_steps, self._hold = True, 0, PROBE_STEPS
                return  # without drafts, but followed by the drafter
            table.num_attempts[rows[choice.indices]] = 0
            self._put_off(table, rows[choice.indices])
        else:
            choice = self._attempt(table, rows, times)
            self._attempts_left = 1 if self._looks else ATTEMPT_WINDOWS
        self._is_drafting = len(choice.indices) > 0
        drafting = rows[choice.indices]
        table.num_cut[drafting] = self._most - choice.num_drafts
        self._worth_us = np.zeros(len(table.num_cut))
        if self._is_drafting:
            self._worth_us[drafting] = times.worth_us(
                len(rows), choice.num_drafts, chances[choice.indices]
            )

    def _chances(self, table: RowTable, rows: Column) -> Floats:
        counts = table.accepted[rows] / SCALE, table.rejected[rows] / SCALE
        return near_usual(*counts, self._usual.chances[table.match_level[rows]])

    def _best(self, rows: Column, times: WindowTimes, chances: Floats) -> Choice:
        if self._accounts.of(len(rows), times).balance_us < 0:
            return NO_DRAFTS
        return times.best(chances)

    def _attempt(self, table: RowTable, rows: Column, times: WindowTimes) -> Choice:
        """Returns the rows that try windows although drafts do not seem to pay."""
        indices = np.arange(len(rows) if self._num_idle >= TRIAL_DISTANCE else 0)
        if not self._looks:
            indices = np.flatnonzero(table.num_tokens[rows] >= table.next_attempt[rows])
        if len(indices):
            account = self._accounts.of(len(rows), times)
            budget_us = min(account.balance_us, account.attempts_us) / ATTEMPT_WINDOWS
            num = times.num_affordable(len(rows), budget_us)
            behind = table.num_missed[rows[indices]] - table.match_level[rows[indices]]
            order = np.argsort(behind, kind="stable")
            indices = indices[order[:num]]
        tried = rows[indices]
        self._num_vain += len(tried) > 0
        self._put_off(table, tried)
        table.num_attempts[tried] = np.minimum(table.num_attempts[tried] + 1, MAX_ATTEMPTS)
        return Choice(indices, times.max_drafts, gain=1.0)

    def _put_off(self, table: RowTable, rows: Column) -> None:
        """Says when rows may try windows again that do not seem to pay."""
        is_rare = table.num_missed[rows] > 0
        distance = np.where(is_rare, RARE_DISTANCE, ATTEMPT_DISTANCE) << table.num_attempts[rows]
        table.next_attempt[rows] = table.num_tokens[rows] + distance

    def note_decode(self, table: RowTable, row: int) -> None:
        """A row begins with a decode, without a prefill that would tell of it: its KV is cached or
        came from elsewhere, or its prompt is one token. Its drafter has followed no step of it, and
        the last choice may hold for a former request.
        """
        if self.is_on and self._is_own(table, slice(None))[row]:
            table.num_cut[row] = self._most  # until a choice names it
            table.num_skipped[row] = 1
            self._hold = 0

    def note_launch(self, table: RowTable, step: Step, stats: StepStats) -> bool:
        """Charges a step that is about to be sent. Returns whether it skips the drafter.

        WHY so little is done where nothing drafts: then a step must cost what a plain one does.
        """
        if not self.is_on:
            return False
        self._hold -= 1
        has_prefill = stats.num_prefill_rows > 0
        if not (self._is_drafting or has_prefill or step.num_drafts.any()):
            self._num_skips += 1
            self._num_idle += 1
            self._num_window_steps = 0
            if not self._hold % TIMED:
                self._expect(step, 0.0, has_drafts=False)
            return True
        self._note_skips(table)
        rows = step.rows
        is_prefill = table.remaining[rows] > self._caps.root_len
        is_own = self._is_own(table, rows)
        own, num_drafts = rows[is_own & ~is_prefill], step.num_drafts[is_own & ~is_prefill]
        new = is_own & is_prefill
        table.num_cut[rows[new]] = self._most  # until a choice names them
        if (step.samples & new).any():
            self._hold = 0
        table.num_skipped[own] = 0
        num_drafting = int(np.count_nonzero(num_drafts))
        if num_drafting:
            self._num_idle = 0
        is_attempt = num_drafting > 0 and self._attempts_left > 0
        if is_attempt:
            self._attempts_left -= 1
            self._hold = min(self._hold, self._attempts_left)
            if self._looks:  # one window, whose result decides whether there is another choice
                table.num_cut[own], self._is_drafting, self._hold = self._most, False, LOOKS_HOLD
        if self._times is not None and len(own) and (num_drafting or not has_prefill):
            price_us = self._times.price(
                len(own), num_drafting=num_drafting, num_drafts=int(num_drafts.max())
            )
            self._credit(len(own), -price_us, attempts_us=-price_us if is_attempt else 0.0)
            self._num_window_steps += 1
            if len(own) == len(rows):
                self._expect(step, price_us, has_drafts=num_drafting > 0)
        return False

    def _expect(self, step: Step, price_us: float, *, has_drafts: bool) -> None:
        if self._times is not None:
            time_us = float(self._times.plain[len(step.rows)]) + price_us
            self._expected.append((step.iteration, time_us, len(step.rows) if has_drafts else 0))

    def note_time(self, iteration: int, took_us: float) -> None:
        """Charges what a step took longer than expected."""
        while self._expected and self._expected[0][0] <= iteration:
            number, expected_us, num_rows = self._expected.popleft()
            if number == iteration and took_us and self._times is not None:
                late_us = self._times.correct(took_us, expected_us, has_drafts=num_rows > 0)
                if num_rows:
                    self._credit(num_rows, -late_us)

    def note_results(
        self, table: RowTable, rows: Column, num_drafts: Column, num_outputs: ArrayI32
    ) -> None:
        """Counts the results of a step, which are in `num_tokens` already."""
        if not num_drafts.any():
            return
        if self._times is None:
            note_windows(table, rows, num_drafts, num_outputs)
            return
        is_own = self._is_own(table, rows)
        if not is_own.all():
            others = ~is_own
            note_windows(table, rows[others], num_drafts[others], num_outputs[others])
        is_window = is_own & (num_drafts > 0) & (num_outputs > 0)
        if is_window.any():
            num_accepted = num_outputs[is_window].astype(np.int64) - 1
            self._count(table, rows[is_window], num_drafts[is_window], num_accepted)
            worth_us = self._worth_us[rows[is_window]] * num_accepted
            of_attempts = worth_us[table.num_attempts[rows[is_window]] > 0]
            self._credit(
                int(np.count_nonzero(is_own)),
                float(worth_us.sum()),
                attempts_us=float(of_attempts.sum()),
            )

    def _note_skips(self, table: RowTable) -> None:
        """Writes the steps that have skipped the drafter since the last call into the row table.

        NOTE: they count for rows between two chunks of a prompt, too, which costs a step at most.
        """
        num, self._num_skips = self._num_skips, 0
        if not num:
            return
        if self._times is not None and (num_rows := len(self._rows)):
            is_vain = self._num_vain > 0 and not self._looks
            plain_us = num * float(self._times.plain[num_rows])
            self._accounts.pay_in(num_rows, plain_us, is_vain=is_vain)
        if not self._looks:
            is_own = self._is_own(table, slice(None))
            table.num_skipped[is_own] += num
            table.num_missed[is_own] += num

    def _credit(self, num_rows: int, time_us: float, *, attempts_us: float = 0.0) -> None:
        if self._accounts.credit(num_rows, time_us, attempts_us=attempts_us):
            self._hold = 0

    def _count(
        self, table: RowTable, rows: Column, num_drafts: Column, num_accepted: Column
    ) -> None:
        tree = self._caps.tree
        longest = num_drafts
        if tree is not None:
            longest = np.array([tree.depth(count) for count in num_drafts.tolist()], np.int64)
        is_rejected = num_accepted < longest
        table.accepted[rows] += SCALE * num_accepted - table.accepted[rows] // FADING
        table.rejected[rows] += SCALE * is_rejected - table.rejected[rows] // FADING
        if num_accepted.mean() >= 1:
            self._num_vain = 0
        is_usual = table.num_missed[rows] == 0
        levels = table.match_level[rows[is_usual]]
        self._usual.note(levels, num_accepted[is_usual], is_rejected[is_usual])
        if self._looks and (is_rejected if self._is_drafting else num_accepted > 0).any():
            self._hold = 0  # a repetition has ended, or a trial has found one

    def _is_own(self, table: RowTable, rows: Column | ArrayI32 | slice) -> npt.NDArray[np.bool_]:
        """Whether this file decides about the rows."""
        is_own: npt.NDArray[np.bool_] = (
            table.max_step_tokens[rows] == self._most + self._caps.root_len
        )
        return is_own
