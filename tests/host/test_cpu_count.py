"""The number of threads, in laid-out copies of the kernel's files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from aserve.host.limits import usable_cpus

V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 CPUs on 4 cores; the process may run on all of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for cpu in range(8):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(tmp_path, topology, f"{cpu % 4},{cpu % 4 + 4}")
    return tmp_path


def write(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


@pytest.mark.parametrize(("allowed", "expected"), [(range(8), 4), ({1, 2, 6}, 2)])
def test_a_core_with_two_threads_counts_once_and_only_where_the_process_may_run(
    allowed: Iterable[int], expected: int, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    assert usable_cpus(machine) == expected


@pytest.mark.parametrize(
    ("where", "quota", "expected"),
    [
        *(("/app", "200000 100000", 2), ("/app", "250000 100000", 2), ("/app", "max 100000", 4)),
        *(("/app", "50000 100000", 1), ("", "150000 100000", 1)),
    ],
)
def test_a_containers_quota_limits_them(
    machine: Path, where: str, quota: str, expected: int
) -> None:
    write(machine, "proc/self/cgroup", f"0::{where or '/'}")
    write(machine, f"{V2}/cpu.max", "700000 100000")
    write(machine, f"{V2}{where}/cpu.max", quota)
    assert usable_cpus(machine) == expected


@pytest.mark.parametrize(("quota", "expected"), [("300000", 3), ("-1", 4)])
def test_the_older_interface_is_read_too(machine: Path, quota: str, expected: int) -> None:
    write(machine, "proc/self/cgroup", "4:memory:/app\n3:cpu,cpuacct:/app")
    write(machine, f"{V1}/app/cpu.cfs_quota_us", quota)
    write(machine, f"{V1}/app/cpu.cfs_period_us", "100000")
    assert usable_cpus(machine) == expected


def test_without_any_files_each_cpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert usable_cpus(tmp_path) == 3
