"""activation(gate) * up, of gate and up side by side: silu and both forms of gelu.

Each element by itself, so a token's result doesn't depend on the others. It knows no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

BLOCK = 1024

KINDS: Mapping[str, int] = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
_REFS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def gated_mul(joined: Tensor, activation: str) -> Tensor:
    """joined [tokens, 2 * size], contiguous: gate, then up; `activation` is one of KINDS
    -> [tokens, size].

    The activation is made in float32, and rounded before it multiplies.
    """
    size = joined.shape[1] // 2
    out = joined.new_empty((len(joined), size))
    if len(joined):
        grid = (len(joined), triton.cdiv(size, BLOCK))
        _gated[grid](joined, out, size, KINDS[activation], BLOCK)
    return out


def gated_mul_ref(joined: Tensor, activation: str) -> Tensor:
    gate, up = joined.chunk(2, dim=-1)
    return _REFS[activation](gate) * up


@triton.jit
def _gated(
    joined: tl.tensor, out: tl.tensor, size: int, KIND: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    gates = joined + token * 2 * size + columns
    gate = tl.load(gates, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gates + size, mask=is_in, other=0.0).to(tl.float32)
    if KIND == 0:
        active = gate * tl.sigmoid(gate)
    elif KIND == 1:
        active = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    else:  # 1 + tanh(x) is 2 * sigmoid(2 * x)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2 * inner)
    rounded = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * size + columns, (rounded * up).to(out.dtype.element_ty), mask=is_in)
