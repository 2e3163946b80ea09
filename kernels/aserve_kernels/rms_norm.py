"""Root mean square norm of each token, of what is given or of a residual sum that is made first.

One program for each token, so its result doesn't depend on the others. It knows no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, size], the elements of a token side by side; weight [size] -> like x, contiguous.

    Summed and multiplied in float32, rounded once.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block, warps = _shape(x.shape[1])
    if len(x):
        _norm[(len(x),)](x, weight, out, x.stride(0), x.shape[1], eps, block, num_warps=warps)
    return out


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    root = (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return (wide / root * weight).to(x.dtype)


def add_rms_norm(
    hidden: Tensor, added: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """hidden, added [tokens, size], contiguous; weight [size] -> hidden + scale * added, rounded,
    and the norm of that.
    """
    total, out = torch.empty_like(hidden), torch.empty_like(hidden)
    size = hidden.shape[1]
    block, warps = _shape(size)
    if len(hidden):
        _add_norm[(len(hidden),)](
            hidden, added, weight, total, out, size, eps, scale, block, num_warps=warps
        )
    return total, out


def add_rms_norm_ref(
    hidden: Tensor, added: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    total = torch.add(hidden, added, alpha=scale)
    return total, rms_norm_ref(total, weight, eps)


def _shape(size: int) -> tuple[int, int]:
    """The block that holds a token, and its warps: 16 bytes of bfloat16 for each thread."""
    block = triton.next_power_of_2(size)
    return block, min(16, max(1, block // 256))


@triton.jit
def _norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    stride: int,
    size: int,
    eps: float,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < size
    values = tl.load(x + token * stride + columns, mask=is_in, other=0.0).to(tl.float32)
    factors = tl.load(weight + columns, mask=is_in, other=0.0).to(tl.float32)
    root = tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    normed = values / root * factors
    tl.store(out + token * size + columns, normed.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _add_norm(
    hidden: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    size: int,
    eps: float,
    scale: float,
    BLOCK: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    is_in = columns < size
    values = tl.load(hidden + first + columns, mask=is_in, other=0.0).to(tl.float32)
    more = tl.load(added + first + columns, mask=is_in, other=0.0).to(tl.float32)
    rounded = (values + more * scale).to(total.dtype.element_ty)
    tl.store(total + first + columns, rounded, mask=is_in)
    values = rounded.to(tl.float32)
    factors = tl.load(weight + columns, mask=is_in, other=0.0).to(tl.float32)
    root = tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    normed = values / root * factors
    tl.store(out + first + columns, normed.to(out.dtype.element_ty), mask=is_in)
