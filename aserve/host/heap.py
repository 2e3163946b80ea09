"""Returns freed memory to the system after large bodies, prompts and answers.

WHY: malloc keeps freed memory for reuse, which is right for a step's temporaries. After one large
prompt it would keep gigabytes for as long as the server runs.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

CHECK_S = 5.0
GROWN_BYTES = 64 << 20  # growth since the last trim that is worth another one

STATM = Path("/proc/self/statm")


class HeapTrimmer:
    """Checks every few seconds how much memory is resident, which costs microseconds. When it has
    grown, the heap is trimmed in a thread.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._least_bytes = resident_bytes()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def start(self) -> None:
        if self._trim is not None and self._least_bytes:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> bool:
        """Returns whether memory has grown so much that trimming is worth its time."""
        now = resident_bytes()
        self._least_bytes = min(self._least_bytes, now)
        return now > self._least_bytes + GROWN_BYTES

    def trim(self) -> None:
        """Trims the heap, in any thread. Growth is measured from the memory in use afterwards."""
        if self._trim is not None:
            self._trim(0)
        self._least_bytes = resident_bytes()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(CHECK_S, self._tick)
        if self.check():
            loop.run_in_executor(None, self.trim)


def resident_bytes() -> int:
    """Returns the resident memory of this process, 0 where the system does not report it."""
    try:
        pages = int(STATM.read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
