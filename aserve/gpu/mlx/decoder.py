"""The shared decoder on MLX arrays, made from the parts of a `Decoder` that was built on the host.

The loader gives each linear layer to MLX as soon as it has read it (`give_to_mlx`), so memory never
holds the model twice. Norms, embeddings and tables of rotary positions are converted at the end.
The formulas are those of models/decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import mlx.core as mx
import torch
from mlx.nn.layers import activations

from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.layers.joint_norm import JointNorm
from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.layers.mlp import GatedMlp
from aserve.gpu.layers.norm import AddNorm, HeadNorms, Norm, RmsNorm, SumAndNorm
from aserve.gpu.mlx.arrays import DTYPES, from_torch, widen
from aserve.gpu.models.decoder import Attention, Block, Decoder

Function: TypeAlias = Callable[[mx.array], mx.array]

ACTIVATIONS: Mapping[str, Function] = {
    "silu": activations.silu,
    "gelu": activations.gelu,
    "gelu_pytorch_tanh": activations.gelu_approx,
}


class MlxAttend(Protocol):
    """Attention of one layer over paged KV. It stores the keys and values of the step's tokens."""

    def __call__(
        self, layer: LayerSpec, queries: mx.array, keys: mx.array, values: mx.array, /
    ) -> mx.array:
        """queries [tokens, heads, head_dim], after rope; keys and values [tokens, kv_heads,
        head_dim] -> [tokens, heads, head_dim]"""


class MlxModel(Protocol):
    """A `CausalModel` on MLX arrays, as far as the executor uses it."""

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    max_model_len: int
    dtype: mx.Dtype

    def forward(self, input_ids: mx.array, positions: mx.array, attend: MlxAttend) -> mx.array:
        """int32 [tokens] each -> hidden states after the norm [tokens, hidden]"""

    def logits(self, hidden: mx.array) -> mx.array:
        """[n, hidden] -> [n, vocab]"""


class MlxLinear:
    """y = x W^T + b"""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: mx.array, bias: mx.array | None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        if self.bias is None:
            return x @ self.weight.T
        return mx.addmm(self.bias, x, self.weight.T)


def give_to_mlx(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """A `Prepare`. The decoder that is built with its results only carries them."""
    bias = None if linear.bias is None else from_torch(linear.bias.to(dtype))
    return cast(LinearOp, MlxLinear(from_torch(linear.weight.to(dtype)), bias))


class MlxDecoder:
    """An `MlxModel`."""

    def __init__(self, decoder: Decoder) -> None:
        """`decoder` was built with `give_to_mlx`. It is not kept."""
        spec = decoder.spec
        self.layers = decoder.layers
        self.vocab_size = decoder.vocab_size
        self.hidden_size = decoder.hidden_size
        self.max_model_len = decoder.max_model_len
        self.dtype = DTYPES[decoder.dtype]
        self._spec = spec
        self._head = cast(MlxLinear, decoder.head)
        is_tied = spec.config.tie_word_embeddings
        self._embeddings = self._head.weight if is_tied else from_torch(decoder.embeddings)
        self._embedding_factor = decoder.embedding_factor
        self._first_norm = _norm(decoder.first_norm)
        self._tables = [from_torch(rotary.table) for rotary in decoder.rotaries]
        self._blocks = [_block(block, decoder) for block in decoder.blocks]

    def forward(self, input_ids: mx.array, positions: mx.array, attend: MlxAttend) -> mx.array:
        cos_sin = [table[positions] for table in self._tables]
        hidden = self._embeddings[input_ids]
        if self._embedding_factor != 1.0:
            hidden = hidden * self._embedding_factor
        normed = self._first_norm(hidden)
        for block in self._blocks:
            hidden, normed = block(hidden, normed, cos_sin[block.rotary], attend)
        return normed

    def logits(self, hidden: mx.array) -> mx.array:
        logits = self._head(hidden)
        if self._spec.logit_divisor != 1.0:
            logits = widen(logits) / self._spec.logit_divisor
        if (cap := self._spec.logit_softcap) is not None:
            logits = mx.tanh(widen(logits) / cap) * cap
        return logits


@dataclass(frozen=True, slots=True)
class _Attention:
    layer: LayerSpec
    qkv: MlxLinear
    out: MlxLinear
    norm_heads: Function  # [tokens, all heads, head_dim] -> the same

    def __call__(self, x: mx.array, cos_sin: mx.array, attend: MlxAttend) -> mx.array:
        layer = self.layer
        num_heads = layer.num_heads + layer.num_stored_heads
        heads = self.norm_heads(self.qkv(x).reshape(x.shape[0], num_heads, layer.head_dim))
        queries_and_keys, values = mx.split(heads, [layer.num_heads + layer.num_kv_heads], axis=1)
        rotated = _rotated(queries_and_keys, cos_sin)
        queries, keys = mx.split(rotated, [layer.num_heads], axis=1)
        return self.out(attend(layer, queries, keys, values).reshape(x.shape[0], -1))


@dataclass(frozen=True, slots=True)
class _Block:
    rotary: int
    attention: _Attention
    after_attention: Function
    before_mlp: _AddNorm
    mlp: Function
    after_mlp: Function
    before_next: _AddNorm

    def __call__(
        self, hidden: mx.array, normed: mx.array, cos_sin: mx.array, attend: MlxAttend
    ) -> tuple[mx.array, mx.array]:
        mixed = self.after_attention(self.attention(normed, cos_sin, attend))
        hidden, normed = self.before_mlp(hidden, mixed)
        return self.before_next(hidden, self.after_mlp(self.mlp(normed)))


@dataclass(frozen=True, slots=True)
class _AddNorm:
    norm: Function
    scale: float

    def __call__(self, hidden: mx.array, added: mx.array) -> tuple[mx.array, mx.array]:
        total = hidden + (added if self.scale == 1.0 else added * self.scale)
        return total, self.norm(total)


@dataclass(frozen=True, slots=True)
class _RmsNorm:
    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        wide = x.astype(self.weight.dtype)
        return mx.fast.rms_norm(wide, self.weight, self.eps).astype(x.dtype)


def _block(block: Block, decoder: Decoder) -> _Block:
    mixer, mlp = block.mixer, block.mlp
    assert isinstance(mixer, Attention)
    assert isinstance(mlp, GatedMlp)
    activation = ACTIVATIONS[decoder.spec.config.activation]
    gate_up, down = cast(MlxLinear, mlp.gate_up), cast(MlxLinear, mlp.down)

    def gated(x: mx.array) -> mx.array:
        gate, up = mx.split(gate_up(x), 2, axis=-1)
        return down(activation(gate) * up)

    return _Block(
        rotary=block.rotary,
        attention=_attention(mixer),
        after_attention=_norm(block.after_attention),
        before_mlp=_add_norm(block.before_mlp),
        mlp=gated,
        after_mlp=_norm(block.after_mlp),
        before_next=_add_norm(block.before_next),
    )


def _attention(mixer: Attention) -> _Attention:
    norm_heads: Function = _unchanged
    if mixer.head_norms is not None:
        norm_heads = _head_norms(mixer.head_norms)
    elif isinstance(joint := mixer.joint_norm, JointNorm):
        norm_heads = _joint_norms(_norm(joint.q_norm), _norm(joint.k_norm), joint.sizes)
    qkv, out = cast(MlxLinear, mixer.qkv), cast(MlxLinear, mixer.out)
    return _Attention(mixer.layer, qkv, out, norm_heads)


def _joint_norms(q_norm: Function, k_norm: Function, sizes: Sequence[int]) -> Function:
    """One norm over all query heads of a token together, and one over all its key heads."""

    def norm_heads(heads: mx.array) -> mx.array:
        parts = mx.split(heads, [sizes[0], sizes[0] + sizes[1]], axis=1)
        q, k, v = (part.flatten(1) for part in parts)
        return mx.concatenate([q_norm(q), k_norm(k), v], axis=1).reshape(heads.shape)

    return norm_heads


def _head_norms(norms: HeadNorms) -> Function:
    """The norm of query and key heads; the values behind them stay as they are."""
    weight, eps = from_torch(norms.weight), norms.eps

    def norm_heads(heads: mx.array) -> mx.array:
        normed, values = mx.split(heads, [len(weight)], axis=1)
        wide = mx.fast.rms_norm(normed.astype(weight.dtype), None, eps) * weight
        return mx.concatenate([wide.astype(heads.dtype), values], axis=1)

    return norm_heads


def _norm(norm: Norm) -> Function:
    """A norm is an `RmsNorm`, or the identity."""
    return _RmsNorm(from_torch(norm.weight), norm.eps) if isinstance(norm, RmsNorm) else _unchanged


def _add_norm(norm: SumAndNorm) -> _AddNorm:
    assert isinstance(norm, AddNorm)
    return _AddNorm(_norm(norm.norm), norm.scale)


def _unchanged(x: mx.array) -> mx.array:
    return x


def _rotated(heads: mx.array, cos_sin: mx.array) -> mx.array:
    """Rotary positions, as layers/rope.py has them. heads [tokens, heads, head_dim], cos_sin
    [tokens, rotary_dim].

    WHY: mx.fast.rope computes the angles anew. From the table of the other devices they have the
    same bits, and attention factors and long contexts need no case of their own.
    """
    half = cos_sin.shape[1] // 2
    cos, sin = mx.split(cos_sin[:, None], 2, axis=-1)
    first, second, rest = mx.split(heads, [half, 2 * half], axis=-1)
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
