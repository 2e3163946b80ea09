"""How Python's cyclic garbage collector is set up in a process that serves.

PERF: a collection looks at every object of its generation, at about 0.1 us each, whatever runs. By
default the middle generation holds up to 7,000 objects and the oldest is looked at after each tenth
collection of it, which adds 1 to 5 ms to a turn while thousands of requests wait. Nearly everything
that a request leaves is freed by its reference count.
"""

from __future__ import annotations

import gc

THRESHOLDS = (700, 5, 100)  # new objects, and collections of each generation before the next's


def set_up_collector() -> None:
    """To be called when everything that lives as long as the process is there: later collections
    skip it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
