"""How this process computes on its machine: threads, heap, and where compiled kernels are kept.

It imports no library: what stands here is for those that are imported later. It knows no option but
the number of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from aserve.config import cache_home, set_environment
from aserve.host.limits import usable_cpus

# PERF: OpenMP's threads wait for each other in a loop. By default that loop is long enough to burn
# the turn of a busy neighbour: with one on 2 cores a decode step of Qwen3-0.6B's linears took 860
# ms, and 15 to 55 with this bound, which costs nothing on a quiet machine.
SPINNING = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}

# mallopt's names for them (malloc.h of glibc).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
KEPT_BYTES = (1 << 31) - 1

UNUSED_S = 30 * 24 * 3600  # after which a cache of kernels is removed

logger = logging.getLogger(__name__)


def prepare_process(threads: int | None) -> None:
    """Before torch and numba are imported; of what the user has set only `threads` is changed."""
    number = str(threads or usable_cpus())
    number = set_environment("OMP_NUM_THREADS", number, wins=threads is not None)
    if "numba" not in sys.modules:  # else its threads may run, and a change is an error
        set_environment("NUMBA_NUM_THREADS", number.partition(",")[0], wins=threads is not None)
    for name, value in SPINNING.items():
        set_environment(name, value)
    # OpenMP is the one layer of numba that takes calls of several threads, as torch does.
    set_environment("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")
    cache = kernel_cache()
    if cache is not None:
        set_environment("NUMBA_CACHE_DIR", str(cache))
    _set_malloc(M_ARENA_MAX, 1)  # else a thread has a heap of its own, to which no limit applies


def keep_freed_memory() -> None:
    """Once the model is loaded, so that what loading freed goes back to the system.

    PERF: a temporary of 64 MB, as a prefill has many, is else mapped and unmapped each time: 57 ms
    against 2.
    """
    _set_malloc(M_MMAP_MAX, 0)
    _set_malloc(M_TRIM_THRESHOLD, KEPT_BYTES)


def kernel_cache() -> Path | None:
    """A folder for each state of the kernels' sources: numba itself looks only at the file of the
    function that it keeps, not at those that it calls. None where no folder can be written.

    NOTE: numba unpickles what it finds there, so nobody else may write it.
    """
    path = cache_home() / "aserve" / f"kernels-{_digest_of_kernels()}"
    try:
        is_new = not path.exists()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            os.utime(path)  # its time is that of the last start that used it
        if is_new:
            _remove_unused(path.parent)
        return path
    except OSError as error:
        return _temporary_cache(error)


def _temporary_cache(refusal: OSError) -> Path | None:
    try:
        return Path(tempfile.mkdtemp(prefix="aserve-"))
    except OSError:
        logger.warning(
            "every start compiles all kernels, because neither %s (%s) nor a temporary folder can "
            "be written; set XDG_CACHE_HOME to a folder that can",
            *(cache_home(), refusal.strerror),
        )
        return None


def _remove_unused(caches: Path) -> None:
    """Of other states of the sources. Another process may remove the same ones."""
    for path in caches.glob("kernels-*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - UNUSED_S:
                shutil.rmtree(path, ignore_errors=True)


def _digest_of_kernels() -> str:
    package = importlib.util.find_spec("aserve_kernels")
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    sources = sorted(path for folder in folders for path in Path(folder).glob("cpu/*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _set_malloc(name: int, value: int) -> None:
    """Where the C library has such a thing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(name, value)


LIBRARY = "libcuda.so.1"


def may_have_cuda(device: str) -> bool:
    """`device` is what the option says. NOTE: torch may find that it cannot use what is there."""
    return device == "cuda" or (device == "auto" and num_devices(LIBRARY) > 0)


def num_devices(library: str) -> int:
    """0 where there is no driver."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def installed_version(package: str) -> str | None:
    """Reads the version without an import, because importing torch takes a second."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def start_logging(level: str) -> None:
    """`level` as the option says it: debug, info, warning or error."""
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT, stream=sys.stderr)
