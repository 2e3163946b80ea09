"""What is set before torch is imported: seen from a process that has not imported it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from aserve.gpu.device.process import prepare_process
prepare_process({threads})
assert not {{"torch", "numba"}} & sys.modules.keys()
import numba
print(os.environ["OMP_NUM_THREADS"], numba.config.NUMBA_NUM_THREADS)
print(numba.config.CACHE_DIR, os.environ["GOMP_SPINCOUNT"])
"""


def prepared(threads: int | None, **environment: str) -> list[str]:
    given = {"PYTHONPATH": ":".join(sys.path), "HOME": "/dev/null", **environment}
    program = PROGRAM.format(threads=threads)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=given, check=True
    )
    return done.stdout.split()


@pytest.mark.slow
def test_threads_spinning_and_the_kernel_cache_are_set_before_the_libraries(tmp_path: Path) -> None:
    environment = {"OMP_NUM_THREADS": "3", "XDG_CACHE_HOME": str(tmp_path)}
    cache = str(tmp_path / "aserve")
    assert prepared(1, **environment) == ["1", "1", cache, "10000"]
    assert prepared(None, GOMP_SPINCOUNT="7", **environment) == ["3", "3", cache, "7"]


@pytest.mark.slow
def test_a_user_without_a_writable_home_still_gets_a_cache_of_his_own() -> None:
    *_, cache, _ = prepared(1)
    directory = Path(cache)
    assert directory.stat().st_mode & 0o077 == 0
    directory.rmdir()
