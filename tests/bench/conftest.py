"""One bench as a user runs it, and what its last line says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from aserve.cli import main

RunBench: TypeAlias = Callable[..., dict[str, Any]]


@pytest.fixture
def run_bench(capsys: pytest.CaptureFixture[str]) -> RunBench:
    """`aserve bench ...`; the JSON object that is the last line of its stdout."""

    def run(*arguments: str) -> dict[str, Any]:
        assert main(["bench", *arguments]) == 0
        figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert figures["bench"] == arguments[0]
        return figures

    return run
