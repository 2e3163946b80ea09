"""How many threads an engine's arithmetic takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from aserve.engine import Engine
with Engine({options}) as engine:
    engine.generate_sync(["x"], max_tokens=1)
    print(torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("options", "expected"), [("", "1"), ("threads=2", "2")])
def test_the_bundled_model_takes_one_thread_unless_more_are_asked_for(
    options: str, expected: str
) -> None:
    """In a process of its own: the number is the process's."""
    program = PROGRAM.format(options=options)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.stdout.split() == [expected], run.stderr
