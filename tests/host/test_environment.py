"""What is set before torch is imported, seen from a process that has not imported it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aserve.errors import ConfigError
from aserve.host import kernel_cache as kernel_cache_module
from aserve.host.environment import prepare_process
from aserve.host.kernel_cache import link_compiled_kernels

PROGRAM = """
import os, sys
from aserve.host.environment import prepare_process
prepare_process({threads})
assert not {{"torch", "numba"}} & sys.modules.keys()
import numba
print(os.environ["OMP_NUM_THREADS"], numba.config.NUMBA_NUM_THREADS)
print(numba.config.CACHE_DIR, os.environ["GOMP_SPINCOUNT"])
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"PYTHONPATH": ":".join(sys.path), "HOME": "/dev/null", **environment}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    return done


def prepared(threads: int | None, **environment: str) -> list[str]:
    return run(PROGRAM.format(threads=threads), **environment).stdout.split()


@pytest.mark.slow
def test_threads_spinning_and_the_kernel_cache_are_set_before_the_libraries(tmp_path: Path) -> None:
    environment = {"OMP_NUM_THREADS": "3", "XDG_CACHE_HOME": str(tmp_path)}
    *threads, cache, spinning = prepared(1, **environment)
    assert (threads, spinning) == (["1", "1"], "10000")
    assert Path(cache).parent == tmp_path / "aserve"
    assert prepared(None, GOMP_SPINCOUNT="7", **environment) == ["3", "3", cache, "7"]


def test_more_threads_than_processors_are_refused_in_words() -> None:
    """Their start took longer than anyone waits."""
    with pytest.raises(ConfigError, match=r"--threads 1025: this process may run on \d+ proc"):
        prepare_process(1025)


HUGE = """
import ctypes, re
from aserve.host.environment import prepare_process
prepare_process(1)
import torch
tensor = torch.zeros(16 << 20)
address = tensor.data_ptr()
for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read(), flags=re.M):
    bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+)", area)
    if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
        print(" hg" in area.partition("VmFlags:")[2])
"""


@pytest.mark.slow
def test_large_tensors_ask_for_huge_pages() -> None:
    has_them = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert run(HUGE).stdout.split() == [str(has_them)]
    assert run(HUGE, THP_MEM_ALLOC_ENABLE="0").stdout.split() == ["False"]


@pytest.mark.slow
def test_a_new_cache_removes_those_that_no_start_used_for_a_month(tmp_path: Path) -> None:
    caches = tmp_path / "aserve"
    old, recent, other = (caches / name for name in ("kernels-1", "kernels-2", "models"))
    for path, days in ((old, 31), (recent, 29), (other, 31)):
        (path / "numba").mkdir(parents=True)
        os.utime(path, (then := time.time() - days * 24 * 3600, then))
    used = Path(prepared(1, XDG_CACHE_HOME=str(tmp_path))[2])
    assert set(caches.iterdir()) == {recent, other, used}
    os.utime(used, (0, 0))
    prepared(1, XDG_CACHE_HOME=str(tmp_path))
    assert used.stat().st_mtime > time.time() - 3600, "a start marks its cache as used"


SPINNING = """
from aserve.host.environment import prepare_process
prepare_process(2)
import torch
"""


@pytest.mark.slow
def test_openmp_itself_sees_the_threads_and_the_bounded_spinning() -> None:
    shown = run(SPINNING, OMP_DISPLAY_ENV="VERBOSE").stderr
    assert "OMP_NUM_THREADS = '2'" in shown
    assert "GOMP_SPINCOUNT = '10000'" in shown


TEMPORARIES = """
import resource, threading
from aserve.host.environment import prepare_process
from aserve.host.memory import keep_freed_memory
prepare_process(1)
def page_faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        bytearray(1 << 26)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(page_faults(20))
keep_freed_memory()
def work():
    page_faults(2)
    print(page_faults(20))
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_large_temporaries_of_a_thread_are_not_mapped_anew_each_time() -> None:
    before, after = map(int, run(TEMPORARIES).stdout.split())
    assert before > 200
    assert after < 20


TWO_ENGINES = """
import numpy as np
from aserve.host.environment import prepare_process
prepare_process(1)
import numba
@numba.njit(parallel=True)
def first(x):
    for i in numba.prange(len(x)):
        x[i] += 1
@numba.njit(parallel=True)
def second(x):
    for i in numba.prange(len(x)):
        x[i] += 2
numbers = np.zeros(4)
first(numbers)
prepare_process(2)
second(numbers)
print(numbers.sum(), numba.config.NUMBA_NUM_THREADS)
"""


@pytest.mark.slow
def test_a_second_engine_with_other_threads_compiles_its_kernels_in_the_same_process() -> None:
    """Numba reads the environment when it compiles, and refuses another number of threads."""
    done = run(TWO_ENGINES)
    assert done.stderr == ""
    assert done.stdout.split() == ["12.0", "1"]


@pytest.mark.slow
def test_a_user_without_a_writable_home_gets_the_same_cache_of_his_own_in_each_start(
    tmp_path: Path,
) -> None:
    *_, cache, _ = prepared(1, TMPDIR=str(tmp_path))
    assert prepared(1, TMPDIR=str(tmp_path))[2] == cache
    private = Path(cache).parent
    assert (private.parent, private.stat().st_mode & 0o077) == (tmp_path, 0)


@pytest.mark.slow
@pytest.mark.parametrize("is_link", [True, False])
def test_kernels_are_never_read_from_a_temporary_folder_that_others_may_write(
    tmp_path: Path, is_link: bool
) -> None:
    other, taken = tmp_path / "other", tmp_path / f"aserve-{os.getuid()}"
    other.mkdir(mode=0o700)
    if is_link:
        taken.symlink_to(other)
    else:
        taken.mkdir()
        taken.chmod(0o777)
    cache = Path(prepared(1, TMPDIR=str(tmp_path))[2])
    assert taken not in cache.parents
    assert cache.parent.stat().st_mode & 0o077 == 0


WITHOUT_A_CACHE = """
import logging, sys, tempfile
tempfile.tempdir = "/dev/null"
logging.basicConfig()
from aserve.host.environment import prepare_process
prepare_process(1)
import numba
from numba.core import caching
assert not numba.config.CACHE_DIR
caching.CacheImpl._locator_classes.clear()  # which look for other folders, beside the source
import torch
from aserve_kernels.cpu.rms_norm import compile_rms_norm, rms_norm
compile_rms_norm(torch.float32)
print(rms_norm(torch.ones(1, 1), torch.ones(1), 0.0)[0, 0])
"""


@pytest.mark.slow
def test_kernels_are_compiled_for_this_process_where_no_folder_can_be_written() -> None:
    done = run(WITHOUT_A_CACHE)
    (line,) = done.stderr.splitlines()
    assert "every start compiles all kernels" in line
    assert "/dev/null/.cache" in line
    assert done.stdout == "tensor(1.)\n"


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


def test_each_place_and_state_of_the_sources_has_a_cache_of_its_own(
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
    # Numba keeps a function until its own file changes, whatever it calls.
    (tmp_path / "one/aserve_kernels/cpu/kernel.py").write_text(f"{KERNEL}# changed\n")
    assert kernel_cache_module.kernel_cache() not in caches
