"""Linear layers whose weights oneDNN has packed once, in float32 or bfloat16.

It knows no checkpoint and no machine: whether bfloat16 products are fast, or there at all, is known
where this form is chosen (`gpu/device/cpu_weights.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.layers.linear import Linear, LinearOp, Prepare
from aserve.gpu.layers.mlp import Activation, GatedBy
from aserve.gpu.layers.ops import Elementwise

# PERF: one layout serves all numbers of tokens. Float32 linears of Qwen3-0.6B, ms per step at 1, 8
# and 32 tokens: packed for 32 tokens 55, 74, 153; packed for 1 token 80, 111, 197.
PACKED_FOR = 32


class PackedLinear:
    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], bias [out], in the dtype of the products."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        self._bias = bias

    def __call__(self, x: Tensor, /) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return product


def prepare_packed(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    bias = linear.bias
    return PackedLinear(
        linear.weight.to(device, dtype), None if bias is None else bias.to(device, dtype)
    )


class HalfStoredLinear:
    __slots__ = ("_packed",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], bias [out], both float32."""
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def __call__(self, x: Tensor, /) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product


def prepare_half_stored(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    assert (device.type, dtype) == ("cpu", torch.float32)  # the only products that FBGEMM has
    bias = linear.bias
    return HalfStoredLinear(linear.weight.float(), None if bias is None else bias.float())


@dataclass(frozen=True, slots=True)
class EachAlone:
    op: LinearOp

    def __call__(self, x: Tensor, /) -> Tensor:
        # Copies begin at the same alignment, on which sums may depend too.
        return torch.cat([self.op(row.clone()) for row in x.split(1)])


def per_token(format_: Prepare) -> Prepare:
    def prepare(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        return EachAlone(format_(linear, device, dtype=dtype))

    return prepare


def _gated_alone(activation: str) -> Activation:
    return EachAlone(GatedBy(activation))


# Norms and sums round alike in all loops of torch; exp, tanh and erf do not.
ALONE = Elementwise(gated=_gated_alone)
