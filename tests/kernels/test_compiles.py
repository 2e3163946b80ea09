"""Kernels are what the compiler takes, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aserve.config import cache_home


@pytest.mark.slow
def test_every_kernel_compiles_and_steps_of_all_sizes_launch_the_same() -> None:
    """What an earlier run compiled of the very same source is there already."""
    cache = cache_home() / "aserve" / "triton-tests"
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "tests.kernels.compile_for_gpus"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers = dict(line.split() for line in done.stdout.splitlines())
    assert len(numbers) > 10
    assert {name for name, number in numbers.items() if number != "1"} == set(), done.stderr
