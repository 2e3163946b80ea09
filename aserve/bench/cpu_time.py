"""CPU time of a process and of all that it started, out of /proc.

It does not know what the processes do. Linux only.
"""

from __future__ import annotations

import os
from pathlib import Path

from aserve.errors import ConfigError

PROC = Path("/proc")
TICKS = (13, 14, 15, 16)  # utime, stime, cutime, cstime in /proc/PID/stat, by proc(5)
AFTER_NAME = 2  # fields before the state: pid and name; a name may hold spaces


def tree_cpu_s(pid: int) -> float:
    """Seconds of all threads, of the living children, and of those that were waited for."""
    if not (PROC / str(pid) / "stat").exists():
        raise ConfigError(f"--server-pid {pid}: there is no such process here")
    ticks, waiting = 0, [pid]
    while waiting:
        process = PROC / str(waiting.pop())
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            children = (process / "task" / process.name / "children").read_text()
        except OSError:
            continue  # it has ended meanwhile
        ticks += sum(int(fields[number - AFTER_NAME]) for number in TICKS)
        waiting += map(int, children.split())
    return ticks / os.sysconf("SC_CLK_TCK")
