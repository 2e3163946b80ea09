"""How much memory this process may still take: the machine's, or what its container leaves.

It knows nothing of models. Files of the kernel are read below `root`, so that tests can lay out
their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from aserve.gpu.device.control_groups import enclosing_groups, read_text

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
