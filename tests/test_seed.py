"""A run that draws fresh random inputs says from which seed, and that seed draws them again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DRAWS = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=20, database=None)
@given(st.integers(0, 2**64))
def test_draws(number):
    print("drawn", number)
"""


def run(folder: Path, **environment: str) -> tuple[str, list[str]]:
    """The line about the seed, and what was drawn."""
    (folder / "test_draws.py").write_text(DRAWS)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.conftest", "test_draws.py"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ASERVE_TEST_")}
    environment = {**kept, "PYTHONPATH": str(ROOT), **environment}
    finished = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    seed = re.search(r"ASERVE_TEST_SEED=(\d+)", finished.stdout)
    return seed[1] if seed else "", re.findall(r"drawn (\d+)", finished.stdout)


@pytest.mark.slow
def test_the_large_profile_draws_a_fresh_seed_that_can_be_repeated(tmp_path: Path) -> None:
    seed, drawn = run(tmp_path, ASERVE_TEST_PROFILE="large")
    assert seed
    assert run(tmp_path, ASERVE_TEST_PROFILE="large", ASERVE_TEST_SEED=seed) == (seed, drawn)
    other = str(int(seed) + 1)
    assert run(tmp_path, ASERVE_TEST_SEED=other)[1] != drawn


@pytest.mark.slow
def test_without_a_seed_every_run_draws_the_same(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path)
    assert first == second
    assert first[0] == ""
