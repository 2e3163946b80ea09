"""The activation of a gated MLP (Shazeer, "GLU variants improve Transformer", 2020).

    out = activation(gate) * up

`activation` is SiLU, GELU (`x / 2 * (1 + erf(x / sqrt(2)))`) or GELU's tanh form
(`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`). The operation is elementwise, so a
token's result does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from aserve_kernels.early_launch import launches_early, wait_for_inputs

BLOCK = 1024

KINDS: Mapping[str, int] = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
_REFS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def gated_mul(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [tokens, 2 * size], contiguous, the gates first; `activation` is one of KINDS
    -> [tokens, size] of the same dtype.

    The activation is computed in float32, and rounded to the dtype before the product.
    """
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty((len(gate_up), size))
    if len(gate_up):
        grid = (len(gate_up), triton.cdiv(size, BLOCK))
        early = launches_early(gate_up)
        _gated[grid](gate_up, out, size, KINDS[activation], BLOCK, early, launch_pdl=early)
    return out


def gated_mul_ref(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _REFS[activation](gate) * up


@triton.jit
def _gated(
    gate_up: tl.tensor,
    out: tl.tensor,
    size: int,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    wait_for_inputs(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = columns < size
    gates = gate_up + token * 2 * size + columns
    gate = tl.load(gates, mask=in_bounds, other=0.0).to(tl.float32)
    up = tl.load(gates + size, mask=in_bounds, other=0.0).to(tl.float32)
    if KIND == 0:
        active = gate * tl.sigmoid(gate)
    elif KIND == 1:
        active = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    else:  # 1 + tanh(x) is 2 * sigmoid(2 * x)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2 * inner)
    rounded = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * size + columns, (rounded * up).to(out.dtype.element_ty), mask=in_bounds)
