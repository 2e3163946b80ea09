"""Prepares the process for its machine: thread counts, malloc and the kernel cache.

It imports neither torch nor numba, because the variables that it sets are read by them at import.
"""

from __future__ import annotations

import importlib.metadata
import logging
import signal
import sys

from aserve.config import set_environment
from aserve.errors import ConfigError
from aserve.host.kernel_cache import kernel_cache
from aserve.host.limits import num_processors, usable_cpus
from aserve.host.memory import use_one_arena

# PERF: OpenMP's threads spin while they wait for each other. By default they spin so long that they
# use up the time slice of a busy neighbour: beside one on 2 cores the linears of a decode step of
# Qwen3-0.6B took 860 ms, and 15 to 55 with this bound, which costs nothing on a quiet machine.
SPINNING = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}

# torch asks for huge pages for tensors of 2 MiB and more: weights, KV and the buffers of prefills.
# PERF: 2 threads of an AMD EPYC read 1 GiB at 22 to 27 GB/s from small pages, 23 to 29 from these.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"

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
    # Once numba is imported its threads may run, and changing their number is an error.
    if "numba" not in sys.modules:
        set_environment("NUMBA_NUM_THREADS", number.partition(",")[0], wins=threads is not None)
    for name, value in SPINNING.items():
        set_environment(name, value)
    set_environment(HUGE_PAGES, "1")
    # OpenMP is numba's only threading layer that may be called from several threads.
    set_environment("NUMBA_THREADING_LAYER_PRIORITY", "omp workqueue tbb")
    cache = kernel_cache()
    if cache is not None:
        set_environment("NUMBA_CACHE_DIR", str(cache))
    use_one_arena()


def ending_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that drain the server.

    A terminal sends SIGHUP when it closes. If it is ignored, as nohup sets it, it stays ignored.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def installed_version(package: str) -> str | None:
    """Reads the version without an import, because importing torch takes a second."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
