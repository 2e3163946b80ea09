"""Free memory, in laid-out copies of the kernel's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from aserve.host.limits import available_memory_bytes

MIB = 1 << 20


def lay_out(root: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def group(path: str, *, limit: object, usage: int, inactive: int = 0) -> dict[str, object]:
    return {
        f"{path}/memory.max": limit,
        f"{path}/memory.current": usage,
        f"{path}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7",
    }


MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8192 kB"}


ABOVE = {
    **group("sys/fs/cgroup/user/app", limit="max", usage=MIB),
    **group("sys/fs/cgroup/user", limit=6 * MIB, usage=4 * MIB),
    **group("sys/fs/cgroup", limit=7 * MIB, usage=4 * MIB),
}


@pytest.mark.parametrize(
    ("where", "groups", "expected"),
    [
        ("/", {}, 8),
        ("/user/app", ABOVE, 2),  # the tightest above the process
        ("/", group("sys/fs/cgroup", limit=5 * MIB, usage=4 * MIB, inactive=2 * MIB), 3),
        ("/docker/0123abcd", group("sys/fs/cgroup", limit=4 * MIB, usage=MIB), 3),
        ("/", group("sys/fs/cgroup", limit=MIB, usage=2 * MIB), 0),
    ],
)
def test_it_is_what_machine_and_groups_leave_and_file_pages_are_free(
    where: str, groups: dict[str, object], expected: int, tmp_path: Path
) -> None:
    files = {**MACHINE, "proc/self/cgroup": f"0::{where}", **groups}
    assert available_memory_bytes(lay_out(tmp_path, files)) == expected * MIB


@pytest.mark.parametrize(("limit", "expected"), [(4 * MIB, 2 * MIB), (2**63 - 4096, 8 * MIB)])
def test_the_older_interface_is_read_too(limit: int, expected: int, tmp_path: Path) -> None:
    files = {
        **MACHINE,
        "proc/self/cgroup": "12:cpu,cpuacct:/box\n5:memory:/box\n0::/",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": limit,
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": 3 * MIB,
        "sys/fs/cgroup/memory/box/memory.stat": f"cache 1\ntotal_inactive_file {MIB}",
    }
    assert available_memory_bytes(lay_out(tmp_path, files)) == expected
