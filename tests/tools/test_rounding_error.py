"""The table of errors of products whose weights have 8 and 4 bits."""

from __future__ import annotations

import pytest

from tools import rounding_error


def test_it_prints_how_much_rounded_inputs_add(capsys: pytest.CaptureFixture[str]) -> None:
    rounding_error.main()
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(rounding_error.INPUTS)
    for row in rows:
        cells = row.strip("| ").split(" | ")
        assert len(cells) == len(header.strip("| ").split(" | "))
        bf16, exact_8, rounded_8, exact_4, rounded_4 = (float(e.rstrip("%")) for e in cells[1:])
        assert bf16 < exact_8 <= rounded_8 < 2 * exact_8
        assert exact_4 <= rounded_4 < 1.1 * exact_4
