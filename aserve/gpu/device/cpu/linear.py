"""Linear layers of the CPU through libraries: y = x W^T + b with weights that oneDNN packs once
(float32, bfloat16) or that FBGEMM stores as float16.

device/cpu/weights.py decides which of them suits the processor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.layers.grouped_linear import ExpertWeights, Groups, split_experts
from aserve.gpu.layers.linear import Linear, LinearOp, Prepare
from aserve.gpu.layers.mlp import Activation, GatedActivation
from aserve.gpu.layers.ops import Elementwise
from aserve.gpu.lora.tables import LoraOps
from aserve_kernels.lora import LoraStack, add_lora_ref

# PERF: oneDNN packs for an expected number of tokens, and this one serves all of them. Float32
# linears of Qwen3-0.6B, ms per step at 1, 8 and 32 tokens: packed for 32 tokens 55, 74, 153; packed
# for 1 token 80, 111, 197.
PACKED_FOR = 32


class PackedLinear:
    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], bias [out], in the model's dtype."""
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


class Fp16StoredLinear:
    """A float32 product whose weights are stored as float16."""

    __slots__ = ("_packed",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], bias [out], both float32."""
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def __call__(self, x: Tensor, /) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product


def prepare_fp16_stored(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    assert (device.type, dtype) == ("cpu", torch.float32)  # FBGEMM has no others
    bias = linear.bias
    return Fp16StoredLinear(linear.weight.float(), None if bias is None else bias.float())


class LinearPerExpert:
    """One linear layer per expert, of any format, for the expert's own rows."""

    __slots__ = ("_num_outputs", "experts")

    def __init__(self, experts: tuple[LinearOp, ...], num_outputs: int) -> None:
        self.experts = experts
        self._num_outputs = num_outputs

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        out = x.new_empty(len(x), self._num_outputs)
        bounds = zip(*(each.numpy() for each in groups), strict=True)
        for expert, (start, end) in zip(self.experts, bounds, strict=True):
            if start < end:
                out[start:end] = expert(x[start:end])
        return out


def linear_per_expert(
    weights: ExpertWeights, biases: Tensor | None, prepare: Prepare, /
) -> LinearPerExpert:
    """A `PrepareGrouped`."""
    return LinearPerExpert(split_experts(weights, biases, prepare), weights.shape[1])


@dataclass(frozen=True, slots=True)
class PerToken:
    """Applies an operator to one token at a time, so that a token's result cannot depend on the
    number of tokens beside it."""

    op: LinearOp

    def __call__(self, x: Tensor, /) -> Tensor:
        # Rows are copied because sums may depend on the alignment as well.
        return torch.cat([self.op(row.clone()) for row in x.split(1)])


def per_token(format_: Prepare) -> Prepare:
    """The same linear layers, applied to one token at a time."""

    def prepare(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        return PerToken(format_(linear, device, dtype=dtype))

    return prepare


def _gated_per_token(activation: str) -> Activation:
    return PerToken(GatedActivation(activation))


# The elementwise operators of --deterministic. Norms and sums round alike in torch's vector loops
# and scalar tails; exp, tanh and erf do not, so activations run per token.
PER_TOKEN = Elementwise(gated=_gated_per_token)


def lora_per_token() -> LoraOps:
    """The adapters of --deterministic."""
    return LoraOps(_add_lora_per_token)


def _add_lora_per_token(y: Tensor, x: Tensor, slots: Tensor, stack: LoraStack) -> None:
    for token in range(len(x)):
        own = slice(token, token + 1)
        add_lora_ref(y[own], x[own].clone(), slots[own], stack)
