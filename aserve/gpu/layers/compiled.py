"""Norms and rotations of few tokens by compiled kernels; of many, in torch. For the CPU.

It knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.layers.elementwise import Elementwise
from aserve.gpu.layers.norm import AddNorm, RmsNorm
from aserve.gpu.layers.rotary import Turn, TurnHeads
from aserve.gpu.layers.rotary import turn_heads as turn_in_torch
from aserve_kernels.cpu.rms_norm import compile_rms_norm, rms_norm
from aserve_kernels.cpu.turn_heads import compile_turn_heads, turn_heads

# PERF: Qwen3-0.6B in bfloat16, us of one thread at 1 and 32 tokens: a norm 10 and 19 in torch, 4
# and 8 here; heads normed and turned 32 and 109 in torch, 7 and 54 here. Heads that are only
# turned, and silu(gate) * up, are as fast in torch.
FEW = 1 << 18  # elements: about 0.1 ms of one thread; torch divides more of them among threads


class CompiledNorm:
    __slots__ = ("_eps", "_in_torch", "weight")

    def __init__(self, weight: Tensor, /, *, eps: float) -> None:
        self._eps = eps
        self._in_torch = RmsNorm(weight, eps=eps)
        self.weight = weight.float()

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() > FEW:
            return self._in_torch(x)
        return rms_norm(x, self.weight, self._eps)


def compiled_add_norm(weight: Tensor, /, *, eps: float, scale: float) -> AddNorm:
    return AddNorm(CompiledNorm(weight, eps=eps), scale=scale)


def compiled_elementwise(dtype: torch.dtype) -> Elementwise:
    """dtype: float32 or bfloat16."""
    compile_rms_norm(dtype)
    return Elementwise(norm=CompiledNorm, add_norm=compiled_add_norm)


def compiled_turn_heads(dtype: torch.dtype) -> TurnHeads:
    """dtype: float32 or bfloat16. Heads that are not normed are turned in torch, which takes few
    calls for that."""
    compile_turn_heads(dtype)
    return _turn_few


def _turn_few(heads: Tensor, turn: Turn) -> Tensor:
    norms = turn.norms
    if norms is None or heads.numel() > FEW:
        return turn_in_torch(heads, turn)
    return turn_heads(heads, turn.turns, norms.weight, norms.eps)
