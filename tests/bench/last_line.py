"""One bench as a user runs it, and what its last line says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aserve.cli import main

Captured = pytest.CaptureFixture[str]


def figures_of(capsys: Captured, *arguments: str) -> dict[str, Any]:
    """`aserve bench ...`; the JSON object that is the last line of its stdout."""
    assert main(["bench", *arguments]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["bench"] == arguments[0]
    return figures
