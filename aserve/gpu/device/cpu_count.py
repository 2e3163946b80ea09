"""How many threads may compute at once: cores that this process may run on, within its quota.

Two threads on one core share its arithmetic, so a core counts once. Files of the kernel are read
below `root`, so that tests can lay out their own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from aserve.gpu.device.control_groups import ControlGroup, enclosing_groups, read_text


def usable_cpus(root: Path = Path("/")) -> int:
    """WHY: a part of a CPU is left to the event loop. One thread more would use it up, and then all
    of them wait for the next period."""
    quotas = (_quota(group) for group in enclosing_groups(root, "cpu"))
    return max(1, min([_num_cores(root), *(math.floor(quota) for quota in quotas if quota)]))


def _num_cores(root: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    return len({_siblings(root, cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(root: Path, cpu: int) -> str:
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return read_text(path).strip() or str(cpu)


def _quota(group: ControlGroup) -> float | None:
    """In CPUs; None: as many as there are."""
    if group.is_unified:
        words = read_text(group.directory / "cpu.max").split()
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [word for name in names for word in read_text(group.directory / name).split()]
    numbers = list(_numbers(words))
    return numbers[0] / numbers[1] if len(numbers) == 2 else None


def _numbers(words: list[str]) -> Iterator[int]:
    """ "max" and -1 mean that there is no limit."""
    return (int(word) for word in words if word.isdecimal())
