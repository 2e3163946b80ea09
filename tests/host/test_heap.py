"""What was freed goes back to the system, once there is much of it."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: its heap keeps what is freed, as that of a server on a CPU does.
SCRIPT = """
import sys
from aserve.host.memory import keep_freed_memory
from aserve.host.heap import GROWN_BYTES, HeapTrimmer, resident_bytes

keep_freed_memory()
trimmer = HeapTrimmer()
before = resident_bytes()
assert not trimmer.check()
texts = [b"x" * 100_000 for _ in range(4_000)]
keeps = b"y" * 100_000  # lies behind them, so that the heap cannot shrink at its end
assert trimmer.check()
del texts
kept = resident_bytes() - before
assert kept > 300 << 20, kept
trimmer.trim()
left = resident_bytes() - before
assert left < 100 << 20, left
assert not trimmer.check()
"""


def test_memory_that_was_freed_is_given_back_though_the_heap_keeps_it() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
