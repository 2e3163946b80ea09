"""Prepares the process for its machine: thread counts, heap and kernel cache.

It imports neither torch nor numba, because the variables that it sets are read by them at import.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import logging
import signal
import sys

from aserve.config import set_environment
from aserve.errors import ConfigError
from aserve.host.kernel_cache import kernel_cache
from aserve.host.limits import num_processors, usable_cpus

# PERF: OpenMP's threads spin while they wait for each other. By default they spin so long that they
# use up the time slice of a busy neighbour: beside one on 2 cores the linears of a decode step of
# Qwen3-0.6B took 860 ms, and 15 to 55 with this bound, which costs nothing on a quiet machine.
SPINNING = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}

# torch asks for huge pages for tensors of 2 MiB and more: weights, KV and the buffers of prefills.
# PERF: 2 threads of an AMD EPYC read 1 GiB at 22 to 27 GB/s from small pages, 23 to 29 from these.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"

# Parameters of mallopt (malloc.h of glibc).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
KEPT_BYTES = (1 << 31) - 1

# PERF: a collection of Python's cyclic garbage looks at every object of its generation, at 0.1 to
# 0.7 us each. So the young generations are small, and the oldest, in which thousands of requests
# may wait, is looked at once in 5 million new objects. A request leaves next to nothing that
# reference counts do not free.
COLLECTOR_THRESHOLDS = (100, 1, 25_000)  # new objects, then collections of the generation before

STARTUP_THRESHOLD = 100_000  # new objects

logger = logging.getLogger(__name__)


def prepare_process(threads: int | None) -> None:
    """Sets the variables that torch and numba read when they are imported; call it before.

    A variable that the user has set stays, unless `threads` is given. Raises ConfigError for more
    threads than there are processors: they spin while they wait for each other, and take turns.
    """
    if threads is not None and threads > (most := num_processors()):
        raise ConfigError(
            f"--threads {threads}: this process may run on {most} processors; give at most {most}, "
            "or leave the option out",
            param="threads",
        )
    number = str(threads or usable_cpus())
    number = set_environment("OMP_NUM_THREADS", number, wins=threads is not None)
    if (
        "numba" not in sys.modules
    ):  # else its threads may run already, and changing the number is an error
        set_environment("NUMBA_NUM_THREADS", number.partition(",")[0], wins=threads is not None)
    for name, value in SPINNING.items():
        set_environment(name, value)
    set_environment(HUGE_PAGES, "1")
    # OpenMP is numba's only threading layer that may be called from several threads.
    set_environment("NUMBA_THREADING_LAYER_PRIORITY", "omp workqueue tbb")
    cache = kernel_cache()
    if cache is not None:
        set_environment("NUMBA_CACHE_DIR", str(cache))
    _set_malloc(M_ARENA_MAX, 1)  # else a thread has an arena of its own, which ignores these limits


def ending_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that drain the server.

    A terminal sends SIGHUP when it closes. If it is ignored, as nohup sets it, it stays ignored.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def collect_rarely() -> None:
    """Makes collections of garbage rare. Call it before a start imports torch; `set_up_collector`
    follows when the start is done.

    PERF: by default the collector runs after each 700 new objects, and imports make 260,000 that
    stay. On a 2-core Xeon a server of the bundled model takes 2.4 s of CPU until it is ready with
    this bound, and 3.0 s without it.
    """
    gc.set_threshold(STARTUP_THRESHOLD)


def set_up_collector() -> None:
    """To be called when everything that lives as long as the process is there: later collections of
    garbage skip it.

    PERF: the youngest generation has what loading left. To look at all that was imported, too,
    would take 0.2 s, and frees nothing to speak of.
    """
    freeze_collector()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def freeze_collector() -> int:
    """Lets later collections skip what lives now, and returns the number of all such objects."""
    gc.collect(0)
    gc.freeze()
    return gc.get_freeze_count()


class PausedCollector:
    """Garbage is collected later, if this is the time to launch a step that waits for the host.

    PERF: it is entered in every tick; it takes 0.3 us, and a generator as context 1.0 us.
    """

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            gc.enable()


def keep_freed_memory() -> None:
    """Makes malloc keep large blocks for reuse. Call it once the model is loaded, so that what
    loading freed still goes back to the system.

    PERF: a temporary of 64 MB, of which a prefill has many, takes 2 ms; it takes 57 ms when it is
    mapped and unmapped each time.
    """
    _set_malloc(M_MMAP_MAX, 0)
    _set_malloc(M_TRIM_THRESHOLD, KEPT_BYTES)


def _set_malloc(name: int, value: int) -> None:
    """Calls mallopt where the C library has it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(name, value)


LIBRARY = "libcuda.so.1"


def may_have_cuda(device: str) -> bool:
    """Returns whether the engine may run on CUDA; `device` is the value of --device.

    NOTE: it only asks the driver. torch may still be unable to use the devices.
    """
    return device == "cuda" or (device == "auto" and num_devices(LIBRARY) > 0)


def num_devices(library: str) -> int:
    """Returns the number of CUDA devices, 0 where there is no driver."""
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
