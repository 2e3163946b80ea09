"""`aserve doctor` reports what the machine has, what aserve uses, and what would be faster."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from aserve.config import cache_home
from aserve.gpu.attention.flashinfer.wrappers import is_slow
from aserve.gpu.device.cpu.isa import read_isa
from aserve.gpu.device.cpu.kernels import count_kernels
from aserve.gpu.links import Links, describe_links, examine_links, link_advice
from aserve.host.environment import installed_version
from aserve.host.kernel_cache import kernel_cache
from aserve.host.limits import (
    available_memory_bytes,
    cpu_quota,
    may_have_cuda,
    memory_limit_bytes,
    num_cores,
    read_text,
    usable_cpus,
)
from aserve.messages.base import GIB
from aserve.parallel.topology import SHARED_FOLDER

PACKAGES = (
    *("aserve", "torch", "numpy", "numba", "triton", "flashinfer-python", "transformers"),
    *("tokenizers", "xgrammar", "uvloop"),
)
SMALL_MEMORY_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class CudaDevice:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Findings:
    """The facts about machine and installation. A limit of None means that there is none."""

    versions: dict[str, str | None]  # None: not installed
    python: str
    system: str
    cpu_name: str
    num_cores: int
    usable_cpus: int  # the cores that aserve computes on, within the container's quota
    cpu_quota: float | None  # in CPUs
    instructions: tuple[str, ...]  # of torch.cpu.get_capabilities()
    bf16_products: str | None  # the instructions for products of bfloat16
    has_avx512: bool
    free_memory_bytes: int
    shared_bytes: int | None  # free in the folder through which ranks exchange; None: no folder
    memory_limit_bytes: int | None
    has_cuda_driver: bool
    torch_cuda: str | None  # the CUDA version that torch was built for
    cuda_devices: tuple[CudaDevice, ...]
    kernel_cache: Path | None
    num_compiled_kernels: int
    num_kernels: int
    links: Links


def examine() -> Findings:
    """Looks at the machine. NOTE: kernels are looked for where `prepare_process` said."""
    isa = read_isa()
    num_compiled, num_kernels = count_kernels()
    capabilities = torch.cpu.get_capabilities()
    return Findings(
        versions={name: installed_version(name) for name in PACKAGES},
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_name=_cpu_name(),
        num_cores=num_cores(),
        usable_cpus=usable_cpus(),
        cpu_quota=cpu_quota(),
        instructions=tuple(name for name, value in capabilities.items() if value is True),
        bf16_products=isa.bf16_products,
        has_avx512=isa.has_avx512,
        free_memory_bytes=available_memory_bytes(),
        shared_bytes=_shared_bytes(),
        memory_limit_bytes=memory_limit_bytes(),
        has_cuda_driver=may_have_cuda("auto"),
        torch_cuda=torch.version.cuda,
        cuda_devices=_cuda_devices(),
        kernel_cache=kernel_cache(),
        num_compiled_kernels=num_compiled,
        num_kernels=num_kernels,
        links=examine_links(SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else None),
    )


def report(found: Findings) -> Iterator[str]:
    """Yields the lines of the report."""
    yield f"aserve {found.versions['aserve'] or 'from its source'}, Python {found.python}"
    yield f"  system        {found.system}"
    packages = ", ".join(
        f"{name} {version or '(not installed)'}"
        for name, version in found.versions.items()
        if name != "aserve"
    )
    yield f"  packages      {packages}"
    quota = "no limit" if found.cpu_quota is None else f"a limit of {found.cpu_quota:g} CPUs"
    yield f"  CPU           {found.cpu_name}: {found.num_cores} cores, {quota} by control groups"
    yield f"  threads       {found.usable_cpus} for computing"
    yield f"  instructions  {', '.join(found.instructions) or 'none that torch names'}"
    yield f"  bfloat16      {found.bf16_products or 'no instructions for products of bfloat16'}"
    limit = found.memory_limit_bytes
    limited = "no limit" if limit is None else f"a limit of {_gib(limit)}"
    yield f"  memory        {_gib(found.free_memory_bytes)} free, {limited} by control groups"
    yield f"  ranks         {_shared_words(found)}"
    yield from (f"  {title:<13} {words}" for title, words in describe_links(found.links))
    yield f"  device        {_device_words(found)}"
    yield f"  kernels       {_kernel_words(found)}"
    hints = list(advice(found))
    yield ""
    yield "What would make it faster:" if hints else "Nothing was found that would make it faster."
    yield from (f"  - {hint}" for hint in hints)


def advice(found: Findings) -> Iterator[str]:
    """Yields one sentence per change that would make serving on this machine faster."""
    if found.has_cuda_driver and not found.cuda_devices:
        built = f"for CUDA {found.torch_cuda}" if found.torch_cuda else "without CUDA"
        yield (
            "This machine has a CUDA driver, but torch cannot use it: torch is built "
            f"{built}. Install a torch build that fits the driver."
        )
    flashinfer = found.versions["flashinfer-python"]
    if found.cuda_devices and flashinfer is None:
        yield "FlashInfer is not installed. Its attention is faster on a GPU."
    elif found.cuda_devices and flashinfer is not None and is_slow(flashinfer):
        yield (
            f"FlashInfer {flashinfer} plans attention in Python loops over the rows of a step. "
            "Install flashinfer-python 0.7 or later."
        )
    if found.versions["numba"] is None:
        yield "numba is not installed, so the CPU runs without compiled kernels. Install numba."
    elif found.kernel_cache is None or cache_home() not in found.kernel_cache.parents:
        kept = f"kernels are kept in the temporary folder {found.kernel_cache}"
        effect = "every start compiles all kernels" if found.kernel_cache is None else kept
        yield (
            f"{cache_home()} cannot be written, so {effect}. Set XDG_CACHE_HOME to a folder that "
            "can be written."
        )
    elif found.num_compiled_kernels < found.num_kernels:
        yield (
            f"{found.num_kernels - found.num_compiled_kernels} kernels are not compiled yet, so "
            "the first start takes longer. Run `aserve kernels build`."
        )
    yield from link_advice(found.links, found.shared_bytes)
    if found.cuda_devices:
        return
    if found.cpu_quota is not None and found.cpu_quota < found.num_cores:
        yield (
            f"The container may use {found.cpu_quota:g} of {found.num_cores} cores. A higher CPU "
            "limit gives more threads."
        )
    if found.bf16_products is None:
        yield (
            "This processor has no instructions for products of bfloat16 (AVX512-bf16 or AMX), so "
            "models run in float32, large ones with weights of 16 bits. A processor that has them "
            "multiplies faster; here --quantization int8 reads half as many bytes per token, and "
            "int4 a quarter."
        )
    if found.free_memory_bytes < SMALL_MEMORY_BYTES:
        yield (
            f"Only {_gib(found.free_memory_bytes)} of memory are free, and KV gets a quarter of "
            "it. More memory keeps more sequences and more cached prompts."
        )


def _cpu_name() -> str:
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _cuda_devices() -> tuple[CudaDevice, ...]:
    if not torch.cuda.is_available():
        return ()
    known = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(CudaDevice(item.name, item.total_memory) for item in known)


def _device_words(found: Findings) -> str:
    if found.cuda_devices:
        return ", ".join(f"{item.name} ({_gib(item.memory_bytes)})" for item in found.cuda_devices)
    return "cpu" + (", although a CUDA driver is there" if found.has_cuda_driver else "")


def _shared_bytes() -> int | None:
    return shutil.disk_usage(SHARED_FOLDER).free if os.access(SHARED_FOLDER, os.W_OK) else None


def _shared_words(found: Findings) -> str:
    if found.versions["numba"] is None:
        return "exchange over gloo, which is slower, because numba is not installed"
    if found.shared_bytes is None:
        return f"exchange through a file on disk, because {SHARED_FOLDER} cannot be written"
    return f"exchange through {SHARED_FOLDER}, {_gib(found.shared_bytes)} free"


def _kernel_words(found: Findings) -> str:
    if not found.num_kernels:
        return "none, because numba is not installed"
    where = f", kept in {found.kernel_cache}" if found.kernel_cache else ", and none can be kept"
    return f"{found.num_compiled_kernels} of {found.num_kernels} compiled{where}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
