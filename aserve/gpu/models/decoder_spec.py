"""The record of values in which the families of the shared decoder differ.

A family's file fills it in from the model's configuration; `decoder.py` builds the layers from it.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
from torch import Tensor

from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.layers.rope_scaling import QueryScale, Rope
from aserve.gpu.models.base import Attend
from aserve.gpu.models.config.layer_types import Windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.weights.source import WeightSource

T = TypeVar("T")


class LayerNorms(msgspec.Struct, frozen=True):
    """The checkpoint's names of the norms around a layer's two sublayers; None: no such norm."""

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
    """RMS norms of queries and keys: of each head alone, or jointly over all heads of a token."""

    is_joint: bool = False


class Biases(msgspec.Struct, frozen=True):
    qkv: bool = False
    attention_out: bool = False
    mlp: bool = False


class EmbeddingScale(msgspec.Struct, frozen=True):
    """The factor that embeddings are multiplied by. `is_rounded`: it is rounded to the model's
    dtype first."""

    factor: float = 1.0
    is_rounded: bool = False


class Mixer(Protocol):
    """The sublayer that mixes tokens: attention, MLA, linear attention, ..."""

    @property
    def layer(self) -> LayerSpec | None:
        """The layer's shape in the KV cache; None for a mixer that keeps nothing there."""

    def __call__(self, x: Tensor, cos_sin: Tensor, attend: Attend, /) -> Tensor:
        """x [tokens, hidden], cos_sin [tokens, rotary_dim] -> [tokens, hidden]."""


class MakeMixer(Protocol):
    def __call__(self, index: int, spec: DecoderSpec, weights: WeightSource, /) -> Mixer:
        """Builds the mixer of layer `index`."""


class Mlp(Protocol):
    """The sublayer that sees each token alone: a gated MLP, a mixture of experts, ..."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""


class MakeMlp(Protocol):
    def __call__(self, index: int, spec: DecoderSpec, weights: WeightSource, /) -> Mlp:
        """Builds the MLP of layer `index`."""


class DecoderSpec(msgspec.Struct, frozen=True):
    """`windows`, `mixers`, `mlps` and `ropes` have an entry per layer. An empty `mixers` means that
    every layer has grouped-query attention, an empty `mlps` that every layer has a gated MLP; empty
    `ropes` are those of the configuration."""

    config: ModelConfig
    windows: Windows
    mixers: tuple[MakeMixer, ...] = ()
    mlps: tuple[MakeMlp, ...] = ()
    biases: Biases = Biases()
    norms: LayerNorms = NORMS_BEFORE
    norm_offset: float = 0.0  # y = x / rms(x) * (norm_offset + w)
    qk_norm: QkNorm | None = None
    has_joined_qkv: bool = False  # the checkpoint stores qkv_proj
    has_joined_gate_up: bool = False  # the checkpoint stores gate_up_proj
    ropes: tuple[Rope, ...] = ()
    rope_axes: tuple[int, ...] = ()  # the position axis of each rotary pair; empty: one axis
    has_partial_rotary: bool = False  # the config may rotate only a part of each head
    rotates_neighbours: bool = False  # rope's pairs are the elements 2 i and 2 i + 1 of a head
    attention_scale: float | None = None  # of q k^T; None: head_dim ** -0.5
    attention_softcap: float | None = None
    query_scale: QueryScale | None = None  # by position
    has_sinks: bool = False  # a learnt score per head joins each softmax of attention
    embedding_scale: EmbeddingScale = EmbeddingScale()
    residual_scale: float = 1.0  # of a sublayer's output, before it is added to the residual
    logit_divisor: float = 1.0
    logit_softcap: float | None = None

    def mixer(self, index: int, *, default: MakeMixer) -> MakeMixer:
        return _of_layer(self.mixers, index, default)

    def mlp(self, index: int, *, default: MakeMlp) -> MakeMlp:
        return _of_layer(self.mlps, index, default)


def _of_layer(choices: tuple[T, ...], index: int, default: T) -> T:
    return choices[index] if choices else default
