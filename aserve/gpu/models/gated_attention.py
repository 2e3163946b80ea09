"""Grouped-query attention whose output is gated, as in the layers of Qwen3-Next that keep KV.

    y = (attend(rope(norm(q)), rope(norm(k)), v) * sigmoid(g)) W_o^T,   [q ; g]_h = x W_q,h^T

q_proj gives for each head its query and its gate. Source: https://arxiv.org/abs/2505.06708,
modeling_qwen3_next.py in transformers
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.kv.layer_groups import AttentionInputs
from aserve.gpu.layers.rope import RopeInputs
from aserve.gpu.models.base import Attend
from aserve.gpu.models.decoder import layer_spec
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.heads import head_norms
from aserve.gpu.weights.source import WeightSource


class GatedAttention:
    """The `Mixer`. A device's fused step reads its parts."""

    __slots__ = ("head_norms", "layer", "out", "qkv")

    def __init__(self, index: int, spec: DecoderSpec, weights: WeightSource, /) -> None:
        hidden_size, prefix = spec.config.hidden_size, f"model.layers.{index}.self_attn"
        self.layer = layer = layer_spec(index, spec, weights)
        q_size = layer.num_heads * layer.head_dim
        kv_size = layer.num_kv_heads * layer.head_dim
        parts = {"q_proj": 2 * q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = weights.linear(
            {f"{prefix}.{name}": size for name, size in parts.items()},
            in_features=hidden_size,
            bias=spec.biases.qkv,
        )
        self.head_norms = head_norms(layer, spec, weights)
        self.out = weights.linear(
            {f"{prefix}.o_proj": hidden_size}, in_features=q_size, bias=spec.biases.attention_out
        )

    def __call__(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        layer = self.layer
        heads = self.qkv(x).view(len(x), -1, layer.head_dim)
        gated, stored = heads.split((2 * layer.num_heads, layer.num_stored_heads), dim=1)
        q, gate = gated.unflatten(1, (-1, 2)).unbind(2)
        inputs = AttentionInputs(
            torch.cat((q, stored), dim=1), RopeInputs(cos_sin, self.head_norms)
        )
        return self.out((attend(layer, inputs) * gate.sigmoid()).flatten(1))
