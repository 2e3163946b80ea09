"""The number of calls of each kind of step is the one that docs/performance.md has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.gpu.step_calls import table


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_the_table_of_the_docs_is_what_is_counted(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for line in table(tmp_path):
        assert line in page
