"""Heads turned, keys and values into their pools, by one compiled kernel where tokens are few; in
torch where they are many. For the CPU.

It knows no page and no layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.kv.stored import Scales, TurnAndStore, turn_then_store
from aserve.gpu.layers.compiled import FEW_ELEMENTS
from aserve.gpu.layers.rotary import Turn
from aserve_kernels.cpu.turn_and_store import compile_turn_and_store, turn_and_store


def compiled_store(dtype: torch.dtype) -> TurnAndStore:
    """dtype: float32 or bfloat16.

    PERF: us of one thread at 1 and 32 tokens in bfloat16. Qwen3-0.6B's heads, which are normed: 18
    and 91 in torch behind a kernel that turns, 11 and 73 in one. A small model's, which are only
    turned: 21 and 33 in torch, 9 and 17 in one.
    """
    compile_turn_and_store(dtype)
    return _turn_and_store


def _turn_and_store(
    heads: Tensor,
    turn: Turn | None,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    scales: Scales,
    /,
) -> Tensor:
    if turn is None or heads.numel() > FEW_ELEMENTS or pools[0].dtype != heads.dtype:
        return turn_then_store(heads, turn, slots, pools, scales)
    norms = turn.norms
    weight, eps = (None, 0.0) if norms is None else (norms.weight, norms.eps)
    return turn_and_store(heads, slots, pools, turns=turn.turns, weight=weight, eps=eps)
