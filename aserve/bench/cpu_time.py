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


def process_tree(pid: int) -> Iterator[Path]:
    """Yields the /proc folders of a process and all its descendants. NOTE: /proc lists children by
    the thread that started them.
    """
    waiting = [PROC / str(pid)]
    while waiting:
        process = waiting.pop()
        try:
            children = [(task / "children").read_text() for task in (process / "task").iterdir()]
        except OSError:
            continue  # the process has ended
        yield process
        waiting += [PROC / child for text in children for child in text.split()]


def run_when_idle(pid: int) -> None:
    """Gives all threads of a process and of its descendants only the time that others leave, and
    none while others want it."""
    for process in process_tree(pid):
        for task in (process / "task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


TICKS = (13, 14, 15, 16)  # indices of utime, stime, cutime and cstime in /proc/PID/stat: proc(5)
IDLE, IO_WAIT = 3, 4  # indices in the first line of /proc/stat
AFTER_NAME = 2  # fields up to the process name, which may contain spaces


def tree_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process and its descendants, with those that have ended."""
    if not (PROC / str(pid) / "stat").exists():
        raise ConfigError(f"--server-pid {pid}: there is no such process here")
    ticks = 0
    for process in process_tree(pid):
        with contextlib.suppress(OSError):  # the process has ended
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(fields[number - AFTER_NAME]) for number in TICKS)
    return ticks / os.sysconf("SC_CLK_TCK")


class ForeignCpu:
    """Measures the CPU time of other processes from its construction on."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._foreign_s = _foreign_s()

    def share(self) -> float:
        """Returns their share of the machine's CPU time, or NaN on systems without /proc."""
        wall_s = time.perf_counter() - self._start_s
        share = (_foreign_s() - self._foreign_s) / (wall_s * (os.cpu_count() or 1))
        return max(0.0, round(share, 3)) if math.isfinite(share) else share


def _foreign_s() -> float:
    """Returns the CPU seconds of all other processes since the machine started."""
    if not (PROC / "stat").exists():
        return math.nan
    ticks = [int(field) for field in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(ticks) - ticks[IDLE] - ticks[IO_WAIT]
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()
