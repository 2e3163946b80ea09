"""One server with the bundled model for all tests that only use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server_process import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    # float64: an answer may not depend on who else is in the batch, and rounding would.
    with ServerProcess("--debug-checks", "--dtype", "float64") as process:
        assert process.address, process.text
        yield process
