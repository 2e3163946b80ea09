"""Rows whose drafts are rejected stop drafting for a while, and try again."""

from __future__ import annotations

import numpy as np

from aserve.scheduling.draft_length import PAUSE, is_drafting, note_windows
from aserve.scheduling.rows import RowTable

ROW = np.array([1])


def windows_until(table: RowTable, num_tokens: int, *, accepted: int) -> int:
    """The number of windows among the decodes up to `num_tokens`, each with so many accepted."""
    num_windows = 0
    while table.num_tokens[1] < num_tokens:
        drafts = np.where(is_drafting(table, ROW), 4, 0)
        outputs = np.where(drafts > 0, 1 + accepted, 1).astype(np.int32)
        num_windows += int(drafts[0] > 0)
        table.num_tokens[1] += int(outputs[0])
        note_windows(table, ROW.astype(np.int32), drafts, outputs)
    return num_windows


def test_a_row_whose_drafts_are_rejected_tries_less_and_less_often() -> None:
    table = RowTable(2)
    assert windows_until(table, PAUSE, accepted=0) == 2
    assert windows_until(table, 2000, accepted=0) == 5  # after 32, 64, 128, 256 and 512


def test_drafts_that_pay_go_on_for_ever_and_a_row_that_recovers_drafts_at_once() -> None:
    table = RowTable(2)
    assert windows_until(table, 400, accepted=1) == 200
    assert windows_until(table, 600, accepted=0) == 6 + 2
    table.num_tokens[1] = int(table.drafts_from[1])
    assert windows_until(table, int(table.num_tokens[1]) + 50, accepted=4) == 10


def test_other_rows_and_decodes_without_drafts_do_not_count() -> None:
    table = RowTable(3)
    rows = np.array([1, 2])
    for _ in range(3):
        note_windows(table, rows, np.array([4, 0]), np.array([1, 1], np.int32))
    assert is_drafting(table, np.array([1, 2, 3])).tolist() == [False, True, True]
