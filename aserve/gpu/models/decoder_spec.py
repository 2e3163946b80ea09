"""In what the families of one decoder differ: a record of plain values for each axis.

It knows no family, no tensors and no configuration file.
"""

from __future__ import annotations

import msgspec

from aserve.gpu.models.config.layer_types import Windows
from aserve.gpu.models.config.model import ModelConfig


class LayerNorms(msgspec.Struct, frozen=True):
    """The checkpoint's names of a layer's norms around its two sublayers; None: there is none."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


NORMS_BEFORE = LayerNorms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
NORMS_AFTER = LayerNorms(
    after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)
NORMS_AROUND = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


class QkNorm(msgspec.Struct, frozen=True):
    """Norms of queries and of keys: of each head, or of all heads of a token together."""

    is_joint: bool = False


class Biases(msgspec.Struct, frozen=True):
    qkv: bool = False
    attention_out: bool = False
    mlp: bool = False


class EmbeddingScale(msgspec.Struct, frozen=True):
    """`is_rounded`: to the model's dtype, before it multiplies."""

    factor: float = 1.0
    is_rounded: bool = False


class DecoderSpec(msgspec.Struct, frozen=True):
    config: ModelConfig
    windows: Windows
    biases: Biases = Biases()
    norms: LayerNorms = NORMS_BEFORE
    norm_offset: float = 0.0  # norms multiply by the stored weight plus this
    qk_norm: QkNorm | None = None
    has_joined_weights: bool = False  # the checkpoint has q, k and v in one, and gate and up
    has_partial_rotary: bool = False  # the config may leave a part of each head unturned
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    embedding_scale: EmbeddingScale = EmbeddingScale()
    residual_scale: float = 1.0  # of what each sublayer adds
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
