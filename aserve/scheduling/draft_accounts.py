"""The accounts of draft_choice.py, which bound what speculation may lose. All values are in
microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from aserve.scheduling.step_times import WindowTimes

INCOME_PARTS = 128
MAX_WINDOWS = 32
MAX_PARTS = 8  # of a plain step, which is the least that a window of all rows counts
ATTEMPT_WINDOWS = 3
# WHY: the first windows may wait for something else, and their account would be overdrawn before it
# has gained anything. So it begins with more windows, if these cost next to nothing.
FIRST_WINDOWS, FIRST_US = 8, 3_000.0


@dataclass(slots=True)
class Account:
    balance_us: float  # that speculation may lose
    attempts_us: float  # that attempts may lose
    window_us: float = 0.0  # what a window of all rows costs


class Accounts:
    """One account for each power of two of rows."""

    __slots__ = ("_by_bits",)

    def __init__(self) -> None:
        self._by_bits: dict[int, Account] = {}

    def of(self, num_rows: int, times: WindowTimes) -> Account:
        """Opens the account if there is none. Applies its limits."""
        full, first = (
            times.price(num_rows, num_drafting=num, num_drafts=times.max_drafts)
            for num in (num_rows, 1)
        )
        attempt_us = ATTEMPT_WINDOWS * first
        more_us = min(FIRST_WINDOWS * full, FIRST_US)
        beginning = Account(full + attempt_us + more_us, attempt_us)
        account = self._by_bits.setdefault(num_rows.bit_length(), beginning)
        account.window_us = max(full, float(times.plain[num_rows]) / MAX_PARTS)
        account.balance_us = min(account.balance_us, MAX_WINDOWS * account.window_us)
        account.attempts_us = min(account.attempts_us, account.window_us + attempt_us)
        return account

    def pay_in(self, num_rows: int, plain_us: float, *, is_vain: bool) -> None:
        """Credits the income of plain steps, which took `plain_us` together. Attempts get half of
        it where the last ones were in vain."""
        income_us = plain_us / INCOME_PARTS
        self.credit(num_rows, income_us, attempts_us=income_us / (2 if is_vain else 1))

    def credit(self, num_rows: int, time_us: float, *, attempts_us: float = 0.0) -> bool:
        """Returns whether the account is overdrawn by more than one window."""
        account = self._by_bits.get(num_rows.bit_length())
        if account is None:
            return False
        account.balance_us += time_us
        account.attempts_us += attempts_us
        return account.balance_us < -account.window_us
