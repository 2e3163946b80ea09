"""What this processor has for products, as far as the libraries may use it: whoever caps their
instructions, as the tests do to play another machine, has a machine without the others.

It knows no form of weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

import torch

AMX, DOTS = "AMX", "AVX512-bf16"  # products of matrices, and of pairs of numbers


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """`bf16_products` names the instructions for products of bfloat16, None if there are none."""

    bf16_products: str | None
    has_onednn: bool
    has_fbgemm: bool
    has_numba: bool
    has_wide_vectors: bool  # of sixteen float32: what products of our own are made for


def read_cpu_facts() -> CpuFacts:
    """torch is capped by ATEN_CPU_CAPABILITY, oneDNN by ONEDNN_MAX_CPU_ISA."""
    capabilities = torch.cpu.get_capabilities()
    has_onednn = torch.backends.mkldnn.is_available()
    return CpuFacts(
        bf16_products=_bf16_products(capabilities) if has_onednn else None,
        has_onednn=has_onednn,
        has_fbgemm="fbgemm" in torch.backends.quantized.supported_engines
        and bool(capabilities.get("avx2")),
        has_numba=importlib.util.find_spec("numba") is not None,
        has_wide_vectors=bool(capabilities.get("avx512_f"))
        and torch.backends.cpu.get_cpu_capability() == "AVX512",
    )


def _bf16_products(capabilities: Mapping[str, object]) -> str | None:
    """PERF: without such instructions the linears of 2,048 tokens took 100 s in bfloat16, and 12 in
    float32 (Qwen3-0.6B's shape)."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    names = {"amx_bf16": AMX, "avx512_bf16": DOTS}
    return next((label for name, label in names.items() if capabilities.get(name)), None)
