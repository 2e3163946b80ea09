"""SDAR: a diffusion language model, which is Qwen3 or Qwen3-MoE with attention over whole blocks.

Blocks have 4 tokens and the mask is 151669, unless the configuration says otherwise.

Reference: modeling_sdar.py of JetLM/SDAR-1.7B-Chat and modeling_sdar_moe.py of
JetLM/SDAR-30B-A3B-Chat.
"""

from __future__ import annotations

import msgspec

from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.families import qwen3 as dense
from aserve.gpu.models.families import qwen3_moe as sparse
from aserve.gpu.models.families.llada2 import block_attention

BLOCKS = {"block_size": 4, "mask_token_id": 151669}
DEFAULTS = {**dense.DEFAULTS, **BLOCKS}
MOE_DEFAULTS = {**sparse.DEFAULTS, **BLOCKS}


def sdar(config: ModelConfig) -> DecoderSpec:
    return _in_blocks(dense.qwen3(config))


def sdar_moe(config: ModelConfig) -> DecoderSpec:
    return _in_blocks(sparse.qwen3_moe(config))


def _in_blocks(spec: DecoderSpec) -> DecoderSpec:
    if any(window is not None for window in spec.windows):
        fields = spec.config.fields
        fields.refuse("use_sliding_window", expected="false: blocks have no windows")
    return msgspec.structs.replace(spec, mixers=(block_attention,) * len(spec.windows))
