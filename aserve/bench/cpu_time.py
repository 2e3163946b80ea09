"""CPU time out of /proc: of a process and all that it started, and of everybody else.

It does not know what the processes do. Linux only.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

from aserve.bench.process_tree import PROC, living
from aserve.errors import ConfigError

TICKS = (13, 14, 15, 16)  # utime, stime, cutime, cstime in /proc/PID/stat, by proc(5)
IDLE, IO_WAIT = 3, 4  # of the first line of /proc/stat
AFTER_NAME = 2  # fields before the state: pid and name; a name may hold spaces


def tree_cpu_s(pid: int) -> float:
    """Seconds of all threads, of the living children, and of those that were waited for."""
    if not (PROC / str(pid) / "stat").exists():
        raise ConfigError(f"--server-pid {pid}: there is no such process here")
    ticks = 0
    for process in living(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(fields[number - AFTER_NAME]) for number in TICKS)
    return ticks / os.sysconf("SC_CLK_TCK")


class Quiet:
    """How much of the machine's CPU time other processes took since this was made: 0 is a quiet
    machine, and NaN one that doesn't say.
    """

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._foreign_s = _foreign_s()

    def foreign_share(self) -> float:
        wall_s = time.perf_counter() - self._start_s
        share = (_foreign_s() - self._foreign_s) / (wall_s * (os.cpu_count() or 1))
        return max(0.0, round(share, 3)) if math.isfinite(share) else share


def _foreign_s() -> float:
    """CPU seconds of everybody else since the machine started."""
    if not (PROC / "stat").exists():
        return math.nan
    ticks = [int(field) for field in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(ticks) - ticks[IDLE] - ticks[IO_WAIT]
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()
