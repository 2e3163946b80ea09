"""A cache of compiled kernels begins with those that the installation brings, wherever it lies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aserve.host import kernel_cache as kernel_cache_module
from aserve.host.kernel_cache import link_compiled_kernels

# A kernel in a package as it is installed. It prints whether numba compiled it or had it.
KERNEL = """
from numba import njit
@njit(cache=True)
def triple(x):
    return 3 * x
if __name__ == "__main__":
    from aserve_kernels.cpu import kernel
    assert kernel.triple(2) == 6
    print("loaded" if kernel.triple.stats.cache_hits else "compiled")
"""


def install(site: Path) -> Path:
    """Returns the folder of an `aserve_kernels` with one kernel."""
    sources = site / "aserve_kernels" / "cpu"
    sources.mkdir(parents=True)
    (sources.parent / "__init__.py").touch()
    (sources / "kernel.py").write_text(KERNEL)
    (sources / "__init__.py").touch()
    return sources.parent


def ran(package: Path, cache: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(package.parent), "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "aserve_kernels.cpu.kernel"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_an_installation_that_was_moved_finds_the_kernels_it_brings(tmp_path: Path) -> None:
    built = install(tmp_path / "built")
    assert ran(built, built / "compiled") == "compiled"
    (built / "compiled" / "compiled-0-triple-float32-1").touch()
    moved = tmp_path / "elsewhere" / "aserve_kernels"
    shutil.copytree(built, moved)
    cache = tmp_path / "cache"
    cache.mkdir()
    link_compiled_kernels(moved, cache)
    link_compiled_kernels(moved, cache)  # a second start changes nothing
    assert ran(moved, cache) == "loaded"
    assert (cache / "compiled-0-triple-float32-1").exists()
    assert not list((moved / "compiled").glob("*.tmp*"))


def test_an_installation_without_compiled_kernels_leaves_the_cache_empty(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    link_compiled_kernels(install(tmp_path), cache)
    assert list(cache.iterdir()) == []


def test_each_place_of_the_sources_has_a_cache_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the marks of one checkout would say that the kernels of another are compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caches = []
    for name in ("one", "two", "one"):
        package = tmp_path / name / "aserve_kernels"
        if not package.exists():
            install(tmp_path / name)
        monkeypatch.setattr(kernel_cache_module, "_kernel_package", lambda found=package: found)
        caches.append(kernel_cache_module.kernel_cache())
    assert caches[0] == caches[2] != caches[1]
