"""One bench as a user runs it, and what its last line says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from aserve.bench.catalog import BENCHES, Bench
from aserve.cli import main

Captured = pytest.CaptureFixture[str]


def figures_of(
    capsys: Captured, *arguments: str, benches: Mapping[str, Bench] = BENCHES
) -> dict[str, Any]:
    """Runs `aserve bench ...` and returns the JSON object that is the last line of its stdout."""
    assert main(["bench", *arguments], benches=benches) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["bench"] == arguments[0]
    return figures
