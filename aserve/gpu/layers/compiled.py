"""Norms of few tokens by compiled kernels; of many, in torch. For the CPU.

It knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.layers.elementwise import Elementwise
from aserve.gpu.layers.norm import AddNorm, RmsNorm
from aserve_kernels.cpu.rms_norm import compile_rms_norm, rms_norm

# PERF: Qwen3-0.6B in bfloat16, us of one thread at 1 and 32 tokens: a norm 10 and 19 in torch, 4
# and 8 here; silu(gate) * up is as fast in torch.
FEW_ELEMENTS = 1 << 18  # about 0.1 ms of one thread; torch divides more of them among threads


class CompiledNorm:
    __slots__ = ("_eps", "_in_torch", "weight")

    def __init__(self, weight: Tensor, /, *, eps: float) -> None:
        self._eps = eps
        self._in_torch = RmsNorm(weight, eps=eps)
        self.weight = weight.float()

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() > FEW_ELEMENTS:
            return self._in_torch(x)
        return rms_norm(x, self.weight, self._eps)


def compiled_add_norm(weight: Tensor, /, *, eps: float, scale: float) -> AddNorm:
    return AddNorm(CompiledNorm(weight, eps=eps), scale=scale)


def compiled_elementwise(dtype: torch.dtype) -> Elementwise:
    """dtype: float32 or bfloat16."""
    compile_rms_norm(dtype)
    return Elementwise(norm=CompiledNorm, add_norm=compiled_add_norm)
