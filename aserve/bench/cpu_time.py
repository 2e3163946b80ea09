"""Reads the CPU time of a process tree, and of all other processes, from /proc (Linux only)."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from aserve.errors import ConfigError

PROC = Path("/proc")


def living(pid: int) -> Iterator[Path]:
    """The folders of those that live in /proc; a child belongs to the thread that started it."""
    waiting = [PROC / str(pid)]
    while waiting:
        process = waiting.pop()
        try:
            children = [(task / "children").read_text() for task in (process / "task").iterdir()]
        except OSError:
            continue  # it has ended meanwhile
        yield process
        waiting += [PROC / child for text in children for child in text.split()]


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
