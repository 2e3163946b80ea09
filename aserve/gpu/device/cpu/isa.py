"""The instruction sets of this processor, and the kernels that are made for them.

An instruction set counts only where the libraries use it. So a cap on their instructions, with
which the tests imitate another machine, counts as a processor without them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

import torch

AMX, AVX512_BF16 = "AMX", "AVX512-bf16"
KERNEL_DTYPES = (torch.float32, torch.bfloat16)  # that kernels/aserve_kernels/cpu are made for


@dataclass(frozen=True, slots=True)
class CpuIsa:
    """The instruction sets and libraries that decide about weights and kernels."""

    bf16_products: str | None  # the instructions for bfloat16 products; None: there are none
    has_onednn: bool
    has_fbgemm: bool
    has_numba: bool
    has_avx2: bool  # or more, for which aserve's own products are written
    has_avx512: bool


def read_isa() -> CpuIsa:
    """torch is capped by ATEN_CPU_CAPABILITY, oneDNN by ONEDNN_MAX_CPU_ISA."""
    capabilities, used = torch.cpu.get_capabilities(), torch.backends.cpu.get_cpu_capability()
    has_onednn = torch.backends.mkldnn.is_available()
    return CpuIsa(
        bf16_products=_bf16_products(capabilities) if has_onednn else None,
        has_onednn=has_onednn,
        has_fbgemm="fbgemm" in torch.backends.quantized.supported_engines
        and bool(capabilities.get("avx2")),
        has_numba=importlib.util.find_spec("numba") is not None,
        has_avx2=bool(capabilities.get("avx2")) and used in ("AVX2", "AVX512"),
        has_avx512=bool(capabilities.get("avx512_f")) and used == "AVX512",
    )


def _bf16_products(capabilities: Mapping[str, object]) -> str | None:
    """PERF: without such instructions the linears of 2,048 tokens took 100 s in bfloat16, and 12 in
    float32 (Qwen3-0.6B's shape)."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    names = {"amx_bf16": AMX, "avx512_bf16": AVX512_BF16}
    return next((label for name, label in names.items() if capabilities.get(name)), None)


def has_large_tiles(dtype: torch.dtype, isa: CpuIsa) -> bool:
    """Whether models of any size have tiled weights.

    PERF: at 1, 4, 8 and 16 rows, layers of Qwen3-0.6B take 0.61, 0.68, 0.63 and 0.78 of the time
    of oneDNN's.
    """
    return has_tiles(dtype, isa) and dtype == torch.bfloat16


def has_tiles(dtype: torch.dtype, isa: CpuIsa) -> bool:
    if not (isa.has_numba and isa.has_avx2 and isa.has_onednn):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and isa.bf16_products is not None)


def has_chunk_attention(dtype: torch.dtype, isa: CpuIsa) -> bool:
    """Whether aserve's own kernel attends many queries of this dtype."""
    return dtype in KERNEL_DTYPES and has_tiles(dtype, isa)


def chunk_kv_dtype(dtype: torch.dtype, kv_dtype: torch.dtype, isa: CpuIsa) -> torch.dtype | None:
    """Returns the dtype of the keys and values that the kernel for many queries of `dtype` reads:
    that of the KV, or the queries' own, of which it gets copies, where pairs of bfloat16 are
    multiplied fast. None if there is no such kernel."""
    if not has_chunk_attention(dtype, isa):
        return None
    from aserve_kernels.cpu.chunk_tiles import HAS_PAIRS

    return dtype if dtype == torch.bfloat16 and HAS_PAIRS else kv_dtype


def widens_tiles(isa: CpuIsa) -> bool:
    """Whether float32 models of any size may have tiles of bfloat16, which are widened as they are
    multiplied."""
    return isa.bf16_products is None and has_tiles(torch.float32, isa)
