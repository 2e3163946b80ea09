"""This module sets how the process manages its memory: when Python's collector looks for cyclic
garbage, and what malloc keeps.
"""

from __future__ import annotations

import ctypes
import gc

# PERF: a collection of Python's cyclic garbage looks at every object of its generation, at 0.1 to
# 0.7 us each. So the young generations are small, and the oldest, in which thousands of requests
# may wait, is looked at once in 5 million new objects. A request leaves next to nothing that
# reference counts do not free.
COLLECTOR_THRESHOLDS = (100, 1, 25_000)  # new objects, then collections of the generation before

STARTUP_THRESHOLD = 100_000  # new objects

# Parameters of mallopt (malloc.h of glibc).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
KEPT_BYTES = (1 << 31) - 1


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


def use_one_arena() -> None:
    """WHY: by default a thread has an arena of its own, which ignores the limits of
    `keep_freed_memory`.
    """
    _set_malloc(M_ARENA_MAX, 1)


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
