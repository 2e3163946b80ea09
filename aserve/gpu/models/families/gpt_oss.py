"""gpt-oss: biases everywhere, attention sinks, a window in every other layer, and experts whose
activation is clamped (layers/clamped.py).

Reference: modeling_gpt_oss.py in transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.layers.clamped import ClampedActivation
from aserve.gpu.models.config.layer_types import periodic_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec
from aserve.gpu.moe.layer import ExpertMlp, ExpertsSpec, GatedExperts
from aserve.gpu.moe.routing import Routing, Scores, checked_top_k
from aserve.gpu.weights.source import WeightSource

DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


def gpt_oss(config: ModelConfig) -> DecoderSpec:
    fields, bias = config.fields, config.attention_bias
    return DecoderSpec(
        config,
        windows=periodic_windows(fields, period=2),
        mlps=(_experts,) * config.num_layers,
        biases=Biases(qkv=bias, attention_out=bias),
        has_sinks=True,
    )


def _experts(index: int, spec: DecoderSpec, weights: WeightSource, /) -> ExpertMlp:
    """The published checkpoints have one tensor for the biases of all experts, with those of gate
    and up in turns. Others have two."""
    fields, hidden, size = (
        spec.config.fields,
        spec.config.hidden_size,
        spec.config.intermediate_size,
    )
    count = fields.integer("num_local_experts")
    prefix = f"model.layers.{index}.mlp"
    name = f"{prefix}.experts"
    parts = {"gate_proj": size, "up_proj": size}
    gate_up = weights.stacked(name, parts, count=count, in_features=hidden)
    if fields.flag("has_joined_biases", default=True):
        gate_up_bias = _halves(weights.tensor(f"{name}.gate_up_proj_bias", (count, 2 * size)))
    else:
        biases = [weights.tensor(f"{name}.{part}_bias", (count, size)) for part in parts]
        gate_up_bias = torch.cat(biases, dim=1)
    down = weights.stacked(name, {"down_proj": hidden}, count=count, in_features=size)
    experts = GatedExperts(
        weights.grouped(gate_up, gate_up_bias),
        weights.grouped(down, weights.tensor(f"{name}.down_proj_bias", (count, hidden))),
        ClampedActivation(fields.number("swiglu_alpha"), fields.number("swiglu_limit")),
    )
    routing = Routing(checked_top_k(fields, count), scores=Scores.LOGITS)
    router = weights.linear({f"{prefix}.router": count}, in_features=hidden, bias=True)
    own = ExpertsSpec(count, size, routing)
    return ExpertMlp(own, router=router, bias=None, experts=experts, shared=None)


def _halves(in_turns: Tensor) -> Tensor:
    """[experts, 2 n] with those of gate and up in turns -> all of gate, then all of up."""
    return torch.cat((in_turns[:, ::2], in_turns[:, 1::2]), dim=1)
