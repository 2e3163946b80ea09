"""SmolLM3: the Llama decoder, without rotary positions in every fourth layer.

Reference: modeling_smollm3.py in transformers.
"""

from __future__ import annotations

import msgspec

from aserve.gpu.layers.rope_scaling import NoRope
from aserve.gpu.models.config.layer_types import Windows, named_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.families.llama import llama

ROTATED = "no_rope_layers"  # its name says the opposite: 1 for a layer whose heads are rotated
DEFAULTS = {
    "no_rope_layer_interval": 4,
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
}


def smollm3(config: ModelConfig) -> DecoderSpec:
    fields, num_layers = config.fields, config.num_layers
    if fields.has(ROTATED):
        is_rotated = [bool(value) for value in fields.integers(ROTATED)]
    else:
        interval = fields.integer("no_rope_layer_interval")
        is_rotated = [number % interval != 0 for number in range(1, num_layers + 1)]
    if len(is_rotated) != num_layers:
        fields.refuse(ROTATED, expected=f"{num_layers} numbers, one for each layer")
    windows: Windows = (None,) * num_layers
    if fields.flag("use_sliding_window"):
        window = fields.integer("sliding_window")
        windows = named_windows(fields, window=window, is_full=is_rotated)
    return msgspec.structs.replace(
        llama(config),
        windows=windows,
        ropes=tuple(config.rope if rotated else NoRope() for rotated in is_rotated),
    )
