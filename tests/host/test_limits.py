"""The number of threads and the free memory, in laid-out copies of the kernel's files, and whether
there is a GPU, as far as the driver alone can tell.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from aserve.host import limits
from aserve.host.limits import (
    available_memory_bytes,
    may_have_cuda,
    num_cuda_devices,
    usable_cpus,
)

MIB = 1 << 20
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu/app"


def lay_out(root: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 CPUs on 4 cores; the process may run on all of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    cpu = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return lay_out(tmp_path, {cpu.format(n): f"{n % 4},{n % 4 + 4}" for n in range(8)})


@pytest.mark.parametrize(("allowed", "expected"), [(range(8), 4), ({1, 2, 6}, 2)])
def test_a_core_with_two_threads_counts_once_and_only_where_the_process_may_run(
    allowed: Iterable[int], expected: int, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    assert usable_cpus(machine) == expected


def v2_quota(where: str, quota: str) -> dict[str, object]:
    top = {"proc/self/cgroup": f"0::{where or '/'}", f"{V2}/cpu.max": "700000 100000"}
    return {**top, f"{V2}{where}/cpu.max": quota}


def v1_quota(quota: int) -> dict[str, object]:
    groups = "4:memory:/app\n3:cpu,cpuacct:/app"
    limits = {f"{V1}/cpu.cfs_quota_us": quota, f"{V1}/cpu.cfs_period_us": 100_000}
    return {"proc/self/cgroup": groups, **limits}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (v2_quota("/app", "200000 100000"), 2),
        (v2_quota("/app", "250000 100000"), 2),
        (v2_quota("/app", "max 100000"), 4),
        (v2_quota("/app", "50000 100000"), 1),
        (v2_quota("", "150000 100000"), 1),
        (v1_quota(300_000), 3),
        (v1_quota(-1), 4),
    ],
)
def test_a_containers_quota_limits_them(
    machine: Path, files: dict[str, object], expected: int
) -> None:
    assert usable_cpus(lay_out(machine, files)) == expected


def test_without_any_files_each_cpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert usable_cpus(tmp_path) == 3


def group(path: str, *, limit: object, usage: int, inactive: int = 0) -> dict[str, object]:
    return {
        f"{path}/memory.max": limit,
        f"{path}/memory.current": usage,
        f"{path}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7",
    }


def v1_group(limit: int) -> dict[str, object]:
    path = "sys/fs/cgroup/memory/box/memory"
    return {
        f"{path}.limit_in_bytes": limit,
        f"{path}.usage_in_bytes": 3 * MIB,
        f"{path}.stat": f"cache 1\ntotal_inactive_file {MIB}",
    }


MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8192 kB"}
ABOVE = {
    **group("sys/fs/cgroup/user/app", limit="max", usage=MIB),
    **group("sys/fs/cgroup/user", limit=6 * MIB, usage=4 * MIB),
    **group(V2, limit=7 * MIB, usage=4 * MIB),
}
V1_GROUPS = "12:cpu,cpuacct:/box\n5:memory:/box\n0::/"


@pytest.mark.parametrize(
    ("where", "groups", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/user/app", ABOVE, 2),  # the tightest above the process
        ("0::/", group(V2, limit=5 * MIB, usage=4 * MIB, inactive=2 * MIB), 3),
        ("0::/docker/0123abcd", group(V2, limit=4 * MIB, usage=MIB), 3),
        ("0::/", group(V2, limit=MIB, usage=2 * MIB), 0),
        (V1_GROUPS, v1_group(4 * MIB), 2),
        (V1_GROUPS, v1_group(2**63 - 4096), 8),
    ],
)
def test_free_memory_is_what_machine_and_groups_leave_and_file_pages_are_free(
    where: str, groups: dict[str, object], expected: int, tmp_path: Path
) -> None:
    root = lay_out(tmp_path, {**MACHINE, "proc/self/cgroup": where, **groups})
    assert available_memory_bytes(root) == expected * MIB


def test_a_machine_without_the_driver_has_no_devices() -> None:
    assert num_cuda_devices("libno-such-driver.so.1") == 0


@pytest.mark.parametrize(
    ("option", "num_found", "expected"),
    [("auto", 1, True), ("auto", 0, False), ("cpu", 1, False), ("cuda", 0, True)],
)
def test_what_the_user_says_comes_before_what_is_found(
    option: str, num_found: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "num_cuda_devices", lambda: num_found)
    assert may_have_cuda(option) is expected
