"""The control groups around this process, which limit what a container may take.

It knows no resource. Files of the kernel are read below `root`, so that tests can lay out their
own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """`is_unified`: of the newer interface, whose files have other names."""

    directory: Path
    is_unified: bool


def enclosing_groups(root: Path, controller: str) -> Iterator[ControlGroup]:
    """From the process's own up to the mount. Inside a container the path may be the host's, and
    only its top is mounted: what is not there has no files."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        below = PurePosixPath(path.lstrip("/"))
        for group in (below, *below.parents) if below.name else (below,):
            yield ControlGroup(mount / group, is_unified=controllers == "")


def read_text(path: Path) -> str:
    """Empty for what is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""


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


# Files of limit and usage, and what of the usage the kernel can take back.
UNIFIED = ("memory.max", "memory.current", "inactive_file")
OLDER = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
UNLIMITED = 1 << 62  # the older interface says "no limit" with a number near 2^63


def available_memory_bytes(root: Path = Path("/")) -> int:
    """The least of what the machine has free and what each enclosing control group still allows."""
    return max(0, min([_machine_bytes(root), *_group_bytes(root)]))


def _machine_bytes(root: Path) -> int:
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    # Not Linux: all of it, since what is free is not told in a portable way.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_bytes(root: Path) -> Iterator[int]:
    """One number for each limited group."""
    for group in enclosing_groups(root, "memory"):
        limit_name, usage_name, reclaimable_name = UNIFIED if group.is_unified else OLDER
        limit = _number(group.directory / limit_name)
        usage = _number(group.directory / usage_name)
        if limit is None or usage is None or limit >= UNLIMITED:
            continue
        yield limit - usage + _reclaimable(group.directory / "memory.stat", reclaimable_name)


def _reclaimable(path: Path, name: str) -> int:
    """File pages that the kernel gives back before it refuses memory."""
    for line in read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None  # "max": no limit
