"""How much memory this process may still take: the machine's, or what its container leaves.

It knows nothing of models. Files of the kernel are read below `root`, so that tests can lay out
their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 62  # the older interface says "no limit" with a number near 2^63


def available_memory_bytes(root: Path = Path("/")) -> int:
    """The least of what the machine has free and what each enclosing control group still allows."""
    return max(0, min([_machine_bytes(root), *_group_bytes(root)]))


def _machine_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    # Not Linux: all of it, since what is free is not told in a portable way.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_bytes(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
            yield from _allowed(
                mount, path, names=("memory.max", "memory.current", "inactive_file")
            )
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _allowed(mount, path, names=names)


def _allowed(mount: Path, path: str, *, names: tuple[str, str, str]) -> Iterator[int]:
    """One number for each limited group from `path` up to the mount. Inside a container the path
    may be the host's, and only its top is mounted: what is not there is passed over."""
    limit_name, usage_name, reclaimable_name = names
    below = PurePosixPath(path.lstrip("/"))
    for group in (below, *below.parents) if below.name else (below,):
        limit = _number(mount / group / limit_name)
        usage = _number(mount / group / usage_name)
        if limit is None or usage is None or limit >= UNLIMITED:
            continue
        yield limit - usage + _reclaimable(mount / group / "memory.stat", reclaimable_name)


def _reclaimable(path: Path, name: str) -> int:
    """File pages that the kernel gives back before it refuses memory."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None  # "max": no limit


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
