"""Heads turned, keys and values into their pools, by one Triton kernel.

It knows no page and no layer. The kernel computes in float32, so what is wider is left to torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.kv.stored import Scales, TurnAndStore, turn_then_store
from aserve.gpu.layers.rotary import Turn
from aserve_kernels.turn_and_store import turn_and_store


def triton_store(dtype: torch.dtype) -> TurnAndStore:
    return turn_then_store if dtype == torch.float64 else _turn_and_store


def _turn_and_store(
    heads: Tensor,
    turn: Turn | None,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    scales: Scales,
    /,
) -> Tensor:
    if heads.stride()[1:] != (heads.shape[2], 1):
        heads = heads.contiguous()
    if turn is None:
        return turn_and_store(heads, slots, pools, turns=None, scales=scales)
    norms = turn.norms
    weight, eps = (None, 0.0) if norms is None else (norms.weight, norms.eps)
    return turn_and_store(
        heads, slots, pools, turns=turn.turns, weight=weight, eps=eps, scales=scales
    )
