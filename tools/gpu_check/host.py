"""Describes the machine that a part ran on: CPU, GPU, driver and versions."""

from __future__ import annotations

import importlib.metadata
import subprocess

import msgspec
import torch

from aserve.bench.machine import Machine, read_machine

PACKAGES = ("triton", "flashinfer-python")
ASK_S = 20.0


class Gpu(msgspec.Struct, frozen=True):
    name: str
    memory_gib: float
    capability: str  # compute capability, as in 9.0
    driver: str
    cuda: str  # the version that torch was built with
    versions: dict[str, str]

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        memory = f"{self.memory_gib:.0f} GiB, capability {self.capability}"
        return f"{self.name} ({memory}), driver {self.driver}, CUDA {self.cuda}; {versions}"


class Host(msgspec.Struct, frozen=True):
    machine: Machine
    gpu: Gpu | None


def read_host() -> Host:
    return Host(read_machine(), _read_gpu() if torch.cuda.is_available() else None)


def _read_gpu() -> Gpu:
    facts = torch.cuda.get_device_properties(0)
    return Gpu(
        name=facts.name,
        memory_gib=round(facts.total_memory / (1 << 30), 1),
        capability=f"{facts.major}.{facts.minor}",
        driver=_driver(),
        cuda=torch.version.cuda or "none",
        versions={name: _version(name) for name in PACKAGES},
    )


def _driver() -> str:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
        return result.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
