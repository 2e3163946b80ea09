"""Gives memory that was freed back to the system, after bodies, prompts and answers that took much.

WHY: the C library keeps what was freed for the next use, which is right for a step's temporaries.
After one large prompt it would keep gigabytes for as long as the server lives.

Must not know what the memory was for. Written by its own timer.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

CHECK_S = 5.0
GROWN_BYTES = 64 << 20  # beyond what was in use after the last time

STATM = Path("/proc/self/statm")


class HeapTrimmer:
    """Looks every few seconds how much memory is resident, which costs microseconds; only when it
    has grown is the heap trimmed, in a thread.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._least_bytes = resident_bytes()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self.num_trims = 0

    def start(self) -> None:
        if self._trim is not None and self._least_bytes:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> bool:
        """Whether memory has grown so much that trimming is worth its time."""
        now = resident_bytes()
        self._least_bytes = min(self._least_bytes, now)
        return now > self._least_bytes + GROWN_BYTES

    def trim(self) -> None:
        """In any thread. What is still in use is from now on not looked at as grown."""
        if self._trim is not None:
            self._trim(0)
        self.num_trims += 1
        self._least_bytes = resident_bytes()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(CHECK_S, self._tick)
        if self.check():
            loop.run_in_executor(None, self.trim)


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        pages = int(STATM.read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
