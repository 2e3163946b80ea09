"""Kernels are what the compiler takes, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aserve.config import cache_home


@pytest.mark.slow
def test_every_kernel_compiles_for_ampere_and_hopper() -> None:
    """What an earlier run compiled of the very same source is there already."""
    cache = cache_home() / "aserve" / "triton-tests"
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "tests.kernels.compile_for_gpus"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sm_80" in done.stdout
    assert "sm_90" in done.stdout


@pytest.mark.slow
def test_steps_of_all_sizes_launch_the_same_kernels() -> None:
    """One that another number of rows has not launched before would be compiled in a step."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.kernels.launch_steps"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers = dict(line.split() for line in done.stdout.splitlines())
    assert {"_prepare", "_attend_blocks", "_select"} <= numbers.keys()
    assert {name for name, number in numbers.items() if number != "1"} == set(), done.stderr
