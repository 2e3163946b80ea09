"""Norm of each head, then its rotary position, for the queries and keys of a few tokens: one call
where torch takes two dozen.

It knows no layer and no table of positions. Halves are paired as in neox: element i turns with
element i + rotary_dim / 2; elements from rotary_dim on don't turn.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit, types
from torch import Tensor

from aserve_kernels.cpu.ahead import compile_ahead
from aserve_kernels.cpu.half import Float32s, Floats, as_array, narrow, rounded, widen

FAST = {"contract", "reassoc", "nsz", "arcp"}  # infinities and NaN keep their meaning


def turn_heads(heads: Tensor, turns: Tensor, weight: Tensor, eps: float) -> Tensor:
    """heads [tokens, heads, head_dim], those of a token side by side; turns [tokens, rotary_dim],
    contiguous: cosines, then sines; both float32 or both bfloat16. weight float32 [heads,
    head_dim]. All on the CPU -> like heads, contiguous."""
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    _turn(as_array(heads.flatten(1)), as_array(turns), weight.numpy(), eps, as_array(out))
    return out


def turn_heads_ref(heads: Tensor, turns: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = heads.float()
    root = (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    normed = (wide / root * weight).to(heads.dtype)
    rotary_dim = turns.shape[1]
    cos, sin = turns.unsqueeze(1).chunk(2, dim=-1)
    left, right = normed[..., :rotary_dim].chunk(2, dim=-1)
    turned_left = torch.addcmul(left * cos, right, sin, value=-1)
    turned_right = torch.addcmul(right * cos, left, sin)
    return torch.cat((turned_left, turned_right, normed[..., rotary_dim:]), dim=-1)


def compile_turn_heads(dtype: torch.dtype) -> None:
    """For this dtype."""
    floats = types.uint16 if dtype == torch.bfloat16 else types.float32
    compile_ahead(
        _turn,
        *(types.Array(floats, 2, "A"), types.Array(floats, 2, "C")),
        *(types.Array(types.float32, 2, "C"), types.float64, types.Array(floats, 3, "C")),
    )


# WHY: it keeps the GIL. A call takes microseconds; to get the GIL back may take milliseconds.
@njit(cache=True, fastmath=FAST)
def _turn(heads: Floats, turns: Floats, weight: Float32s, eps: float, out: Floats) -> None:
    """heads [tokens, heads * head_dim]; out [tokens, heads, head_dim]."""
    rows = out.reshape(heads.shape)
    row = np.empty(weight.size, np.float32)
    turn = np.empty(turns.shape[1], np.float32)
    for token in range(heads.shape[0]):
        widen(heads[token], row)
        widen(turns[token], turn)
        _turn_row(row, turn, weight, np.float32(eps), out)
        narrow(row, rows[token])


@njit(fastmath=FAST)
def _turn_row(
    row: Float32s, turn: Float32s, weight: Float32s, eps: np.float32, like: Floats
) -> None:
    """A token's heads, in place, rounded to what `like` holds wherever torch rounds.

    PERF: sums of unsigned numbers need no check for an index below zero, which keeps loops from
    being vectorised: 36 us against 67 at 32 tokens of 24 heads of 128.
    """
    head_dim = np.uint64(weight.shape[1])
    half = np.uint64(turn.shape[0] // 2)
    for head in range(np.uint64(weight.shape[0])):
        first = head * head_dim
        total = np.float32(0)
        for i in range(head_dim):
            total += row[first + i] * row[first + i]
        scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(head_dim) + eps))
        for i in range(head_dim):
            row[first + i] = rounded(row[first + i] * scale * weight[head, i], like)
        for i in range(half):
            left, right = row[first + i], row[first + half + i]
            row[first + i] = rounded(left * turn[i], like) - right * turn[half + i]
            row[first + half + i] = rounded(right * turn[i], like) + left * turn[half + i]
