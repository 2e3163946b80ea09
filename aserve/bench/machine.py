"""Describes the machine of a measurement: the processor, the versions and the date.

The processor's fields are read from Linux. On other systems some stay empty.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import msgspec

CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = ("amx_bf16", "amx_int8", "avx512_bf16")
FLAGS = (*BF16_FLAGS, "avx512f", "avx2")  # instruction sets for which there are fast kernels
PACKAGES = ("aserve", "torch", "numpy", "numba", "transformers")


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    cores: int  # that this process may use
    flags: tuple[str, ...]  # that torch may use
    versions: dict[str, str]
    date: str  # UTC

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        flags = " ".join(self.flags) or "none of the known flags"
        return f"{self.cpu}, {self.cores} cores ({flags}); {versions}; {self.date}"


def read_machine() -> Machine:
    info = _cpu_info()
    usable = set(info.get("flags", "").split()) - _capped_flags()
    return Machine(
        cpu=info.get("model name") or platform.processor() or platform.machine(),
        cores=_num_cores(),
        flags=tuple(flag for flag in FLAGS if flag in usable),
        versions={"python": platform.python_version(), **_versions()},
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _capped_flags() -> set[str]:
    """Returns the flags that environment variables hide from the libraries."""
    from aserve.gpu.device.cpu.isa import read_isa

    facts = read_isa()
    products = () if facts.bf16_products else BF16_FLAGS
    return {*products, *(() if facts.has_avx512 else ("avx512f",))}


def _cpu_info() -> dict[str, str]:
    """Returns the fields of the first processor."""
    if not CPU_INFO.exists():
        return {}
    first = CPU_INFO.read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
