"""The number of threads, in laid-out copies of the kernel's files."""

from __future__ import annotations

import os
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


def test_a_core_with_two_threads_counts_once(machine: Path) -> None:
    assert usable_cpus(machine) == 4


def test_only_cores_that_the_process_may_run_on_count(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 6})
    assert usable_cpus(machine) == 2


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        *(("200000 100000", 2), ("250000 100000", 2), ("max 100000", 4)),
        *(("150000 100000", 1), ("50000 100000", 1)),
    ],
)
def test_a_containers_quota_limits_them(machine: Path, quota: str, expected: int) -> None:
    write(machine, "proc/self/cgroup", "0::/app")
    write(machine, f"{V2}/app/cpu.max", quota)
    write(machine, f"{V2}/cpu.max", "700000 100000")
    assert usable_cpus(machine) == expected


def test_a_quota_counts_in_a_container_that_sees_itself_at_the_top(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/")
    write(machine, f"{V2}/cpu.max", "150000 100000")
    assert usable_cpus(machine) == 1


@pytest.mark.parametrize(("quota", "expected"), [("300000", 3), ("-1", 4)])
def test_the_older_interface_is_read_too(machine: Path, quota: str, expected: int) -> None:
    write(machine, "proc/self/cgroup", "4:memory:/app\n3:cpu,cpuacct:/app")
    write(machine, f"{V1}/app/cpu.cfs_quota_us", quota)
    write(machine, f"{V1}/app/cpu.cfs_period_us", "100000")
    assert usable_cpus(machine) == expected


def test_without_any_files_each_cpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert usable_cpus(tmp_path) == 3
