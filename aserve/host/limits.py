"""Reads how many CPUs and how much memory this process may use, as control groups limit them, and
how many CUDA devices the driver has.

Files of the kernel are read below `root`, so that tests can lay out their own.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group of cgroup v2 if `is_unified`, else of v1, whose files have other names."""

    directory: Path
    is_unified: bool


def enclosing_groups(root: Path, controller: str) -> Iterator[ControlGroup]:
    """Yields the process's own group first, then each parent up to the mount.

    Inside a container the path may be the host's while only its top is mounted. A group that is not
    mounted has no files.
    """
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
    """Returns an empty text when the file cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def usable_cpus(root: Path = Path("/")) -> int:
    """Returns the number of threads that should compute: one per core, within the quota.

    WHY: a quota is rounded down, so that part of a CPU is left to the event loop. One more thread
    would use it up, and then all threads wait for the next period.
    """
    quota = cpu_quota(root)
    return max(1, num_cores(root) if quota is None else min(num_cores(root), math.floor(quota)))


def num_cores(root: Path = Path("/")) -> int:
    """Returns the number of physical cores that this process may be scheduled on."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    return len({_siblings(root, cpu) for cpu in os.sched_getaffinity(0)})


def num_processors() -> int:
    """Returns the number of logical processors that this process may be scheduled on."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the lowest quota of the enclosing groups in CPUs, or None if there is none."""
    quotas = (_quota(group) for group in enclosing_groups(root, "cpu"))
    return min((quota for quota in quotas if quota), default=None)


def _siblings(root: Path, cpu: int) -> str:
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return read_text(path).strip() or str(cpu)


def _quota(group: ControlGroup) -> float | None:
    """Returns the group's quota in CPUs, or None if it has none."""
    if group.is_unified:
        words = read_text(group.directory / "cpu.max").split()
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [word for name in names for word in read_text(group.directory / name).split()]
    numbers = list(_numbers(words))
    return numbers[0] / numbers[1] if len(numbers) == 2 else None


def _numbers(words: list[str]) -> Iterator[int]:
    # "max" and -1 mean that there is no limit.
    return (int(word) for word in words if word.isdecimal())


# The files of limit and usage, and the key of memory.stat whose bytes the kernel can reclaim.
UNIFIED = ("memory.max", "memory.current", "inactive_file")
OLDER = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
UNLIMITED = 1 << 62  # the older interface says "no limit" with a number near 2^63


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the least of what the machine has free and what each control group allows."""
    free = (group.free_bytes for group in _memory_groups(root))
    return max(0, min([_machine_bytes(root), *free]))


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Returns the lowest limit of the enclosing groups, or None if there is none."""
    return min((group.limit_bytes for group in _memory_groups(root)), default=None)


class _MemoryGroup(NamedTuple):
    limit_bytes: int
    free_bytes: int


def _machine_bytes(root: Path) -> int:
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    # Not Linux: no portable call returns free memory, so all of it is taken as free.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_groups(root: Path) -> Iterator[_MemoryGroup]:
    """Yields the groups that have a limit."""
    for group in enclosing_groups(root, "memory"):
        limit_name, usage_name, reclaimable_name = UNIFIED if group.is_unified else OLDER
        limit = _number(group.directory / limit_name)
        usage = _number(group.directory / usage_name)
        if limit is None or usage is None or limit >= UNLIMITED:
            continue
        reclaimable = _reclaimable(group.directory / "memory.stat", reclaimable_name)
        yield _MemoryGroup(limit, limit - usage + reclaimable)


def _reclaimable(path: Path, name: str) -> int:
    """Returns the bytes of file pages, which the kernel reclaims before it refuses memory."""
    for line in read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None  # "max": no limit


CUDA_DRIVER = "libcuda.so.1"


def may_have_cuda(device: str) -> bool:
    """Returns whether the engine may run on CUDA; `device` is the value of --device.

    NOTE: it only asks the driver. torch may still be unable to use the devices.
    """
    return device == "cuda" or (device == "auto" and num_cuda_devices() > 0)


def num_cuda_devices(library: str = CUDA_DRIVER) -> int:
    """Asks the driver, without torch, whose import takes a second; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
