"""Multi-head latent attention (MLA): the keys and values of all heads share one latent vector.

For each token, with x its hidden state, r the latent's size and H query heads:

    [c ; k_pe]      = x W_kv_a^T          c = norm(c) has r elements, k_pe = rope(k_pe) is one head
    q_h             = [q_nope ; rope(q_pe)]_h,    q = norm(x W_q_a^T) W_q_b^T    or    q = x W_q^T
    [k_nope ; v]_h  = W_kv_b,h c          with W_kv_b,h = [W_uk ; W_uv]_h
    y               = concat_h(softmax(scale * q_h [k_nope,h ; k_pe]^T) v_h) W_o^T

The KV cache holds the latent [c ; k_pe] alone, for all heads. Attention comes in two forms, which
are equal but for rounding:

    expanded   k_nope and v are computed from the latents, as above
    absorbed   q_nope k_nope^T = (q_nope W_uk) c^T and sum_t a_t v_t = (sum_t a_t c_t) W_uv^T, so
               the latents are the keys of one KV head, and their first r elements its values

The absorbed form reads least and suits decode; the expanded form computes least where many queries
share the latents. A `LatentAttend` chooses between them for each row. Any other attention function
gets the absorbed form.

Rope rotates neighbouring elements (2 i, 2 i + 1) in these checkpoints. Here they are first moved to
i and i + half, where `apply_rope` expects a pair; scores do not depend on the elements' order.
A layer with an `Indexer` (DSA) attends to the keys that this chooses, through a `SparseAttend`.
YaRN's factor m multiplies queries and keys, so the scale is (d_nope + d_rope)^-0.5 * m^2. LongCat
multiplies queries and the normed latent c by factors of their own; the first becomes part of the
scale, and the second of the norm's weight.
Source: https://arxiv.org/abs/2405.04434, modeling_deepseek_v3.py in transformers
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.norm import Norm
from aserve.gpu.layers.rope import RopeInputs, apply_rope
from aserve.gpu.models.base import Attend
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.heads import neighbours_to_halves
from aserve.gpu.models.indexer import Indexer, IndexInputs, IndexShape
from aserve.gpu.weights.source import WeightSource, kv_scales

NORM_EPS = 1e-6  # of the norms of latents, in the reference code, whatever rms_norm_eps says


class LatentShape(msgspec.Struct, frozen=True):
    """The sizes of latent attention, by their names in config.json."""

    kv_lora_rank: int  # r
    q_lora_rank: int | None  # None: queries have one projection, without a norm between two
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    is_interleaved: bool = True  # rope rotates neighbouring elements
    has_joined_up: bool = True  # W_kv_b is one tensor; else W_uk^T and W_uv are two, by heads
    mscale: float = 1.0  # YaRN's factor of queries and keys
    query_factor: float = 1.0
    latent_factor: float = 1.0

    @classmethod
    def of(cls, fields: Fields) -> LatentShape:
        if fields.integer("qk_rope_head_dim") % 2:
            fields.refuse("qk_rope_head_dim", expected="an even number: rope rotates pairs")
        return cls(
            kv_lora_rank=fields.integer("kv_lora_rank"),
            q_lora_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
            qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
            qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
            v_head_dim=fields.integer("v_head_dim"),
            is_interleaved=fields.flag("rope_interleave", default=True),
            has_joined_up=fields.flag("has_joined_up", default=True),
            mscale=_mscale(fields),
        )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        return float(self.qk_head_dim**-0.5 * self.mscale**2 * self.query_factor)


@dataclass(frozen=True, slots=True)
class UpProjection:
    """W_kv_b of one layer, by heads: W_uk and W_uv."""

    key: Tensor  # [heads, d_nope, r]
    value: Tensor  # [heads, d_v, r]

    def absorb(self, q: Tensor) -> Tensor:
        """q [tokens, heads, d_nope + d_rope] -> [tokens, heads, r + d_rope], to be multiplied by
        latents."""
        q_nope, q_pe = q.tensor_split((self.key.shape[1],), dim=-1)
        return torch.cat((torch.einsum("thd,hdr->thr", q_nope, self.key), q_pe), dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """attended [tokens, heads, r], sums of latents -> [tokens, heads, d_v]."""
        return torch.einsum("thr,hvr->thv", attended, self.value)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """latents [tokens, r + d_rope] -> keys [tokens, heads, d_nope + d_rope] and values
        [tokens, heads, d_v]."""
        num_heads, num_nope, rank = self.key.shape
        c, k_pe = latents.tensor_split((rank,), dim=-1)
        keys = c @ self.key.flatten(0, 1).T
        keys = keys.unflatten(-1, (num_heads, num_nope))
        values = (c @ self.value.flatten(0, 1).T).unflatten(-1, (num_heads, -1))
        return torch.cat((keys, k_pe[:, None].expand(-1, num_heads, -1)), dim=-1), values


@dataclass(frozen=True, slots=True)
class LatentInputs:
    """The inputs of latent attention for the tokens of one forward, after rope."""

    q: Tensor  # [tokens, heads, d_nope + d_rope]
    latents: Tensor  # [tokens, 1, r + d_rope]
    up: UpProjection

    def absorbed(self) -> AttentionInputs:
        return AttentionInputs(torch.cat((self.up.absorb(self.q), self.latents), dim=1))

    def select(self, tokens: Tensor) -> LatentInputs:
        """tokens int64 [n] -> the inputs of these tokens."""
        q, latents = (part.index_select(0, tokens) for part in (self.q, self.latents))
        return LatentInputs(q, latents, self.up)


@runtime_checkable
class LatentAttend(Protocol):
    """An `Attend` that chooses between the forms of latent attention by itself."""

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor: ...

    def attend_latents(self, layer: LayerSpec, inputs: LatentInputs, /) -> Tensor:
        """Stores the latents, and attends -> [tokens, heads, d_v]."""


@runtime_checkable
class SparseAttend(Protocol):
    """An `Attend` for layers with an indexer."""

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor: ...

    def attend_sparse(
        self, layer: LayerSpec, inputs: LatentInputs, index: IndexInputs, /
    ) -> Tensor:
        """Stores latents and index keys, and attends to the chosen keys -> [tokens, heads, d_v]."""


def attend_absorbed(attend: Attend, layer: LayerSpec, inputs: LatentInputs) -> Tensor:
    """-> [tokens, heads, d_v]"""
    return inputs.up.values(attend(layer, inputs.absorbed()))


def attend_latents(attend: Attend, layer: LayerSpec, inputs: LatentInputs) -> Tensor:
    """Attends to all keys in the form that `attend` chooses -> [tokens, heads, d_v]."""
    if isinstance(attend, LatentAttend):
        return attend.attend_latents(layer, inputs)
    return attend_absorbed(attend, layer, inputs)


class LatentAttention:
    """The `Mixer` of latent attention."""

    __slots__ = (
        "_down",
        "_indexer",
        "_is_interleaved",
        "_kv_norm",
        "_queries",
        "_up",
        "layer",
        "out",
    )

    def __init__(
        self,
        index: int,
        spec: DecoderSpec,
        weights: WeightSource,
        /,
        *,
        shape: LatentShape,
        index_shape: IndexShape | None = None,
    ) -> None:
        config, prefix = spec.config, f"model.layers.{index}.self_attn"
        num_heads, bias = config.num_heads, config.attention_bias
        self.layer = LayerSpec(
            index=index,
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=shape.latent_dim,
            scale=shape.scale,
            window=spec.windows[index],
            kv_scales=kv_scales(weights, index),
            value_dim=shape.kv_lora_rank,
            expanded_dim=shape.qk_nope_head_dim + shape.v_head_dim,
            index_dim=0 if index_shape is None else index_shape.index_head_dim,
            index_top_k=0 if index_shape is None else index_shape.index_topk,
        )
        self._is_interleaved = shape.is_interleaved
        self._queries = _queries(prefix, spec, weights, shape=shape)
        self._down = weights.linear(
            {f"{prefix}.kv_a_proj_with_mqa": shape.latent_dim},
            in_features=config.hidden_size,
            bias=bias,
        )
        self._kv_norm = _norm(
            weights, f"{prefix}.kv_a_layernorm", shape.kv_lora_rank, factor=shape.latent_factor
        )
        self._up = _up_projection(prefix, weights, shape=shape, num_heads=num_heads)
        self.out = weights.linear(
            {f"{prefix}.o_proj": config.hidden_size},
            in_features=num_heads * shape.v_head_dim,
            bias=bias,
        )
        self._indexer: Indexer | None = None
        if index_shape is not None:
            assert shape.q_lora_rank is not None
            sizes = (config.hidden_size, shape.q_lora_rank)
            self._indexer = Indexer(f"{prefix}.indexer", weights, shape=index_shape, sizes=sizes)

    def __call__(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """x [tokens, hidden], cos_sin [tokens, d_rope] -> [tokens, hidden]."""
        layer = self.layer
        q_latent = self._queries.down(x)
        q = self._queries.up(q_latent).view(x.shape[0], layer.num_heads, -1)
        rank, num_rope = layer.out_dim, layer.head_dim - layer.out_dim
        c, k_pe = self._down(x).split((rank, num_rope), dim=-1)
        q_nope, q_pe = q.split((q.shape[-1] - num_rope, num_rope), dim=-1)
        heads = torch.cat((q_pe, k_pe[:, None]), dim=1)
        if self._is_interleaved:
            heads = neighbours_to_halves(heads, num_rope)
        rotated = apply_rope(heads, RopeInputs(cos_sin))
        c = self._kv_norm(c.contiguous())
        inputs = LatentInputs(
            q=torch.cat((q_nope, rotated[:, :-1]), dim=-1),
            latents=torch.cat((c[:, None], rotated[:, -1:]), dim=-1),
            up=self._up,
        )
        if self._indexer is None:
            return self.out(attend_latents(attend, layer, inputs).flatten(1))
        if not isinstance(attend, SparseAttend):
            raise BugError(f"layer {layer.index} is sparse, and its attention chooses no keys")
        index = self._indexer(x, q_latent, cos_sin)
        return self.out(attend.attend_sparse(layer, inputs, index).flatten(1))


@dataclass(frozen=True, slots=True)
class _Queries:
    """q = up(down(x)); the index heads read what is between."""

    down: Callable[[Tensor], Tensor]
    up: LinearOp


def _queries(
    prefix: str, spec: DecoderSpec, weights: WeightSource, *, shape: LatentShape
) -> _Queries:
    """[tokens, hidden] -> [tokens, heads * (d_nope + d_rope)]"""
    config, rank = spec.config, shape.q_lora_rank
    size = config.num_heads * shape.qk_head_dim
    if rank is None:
        parts = {f"{prefix}.q_proj": size}
        return _Queries(_same, weights.linear(parts, in_features=config.hidden_size, bias=False))
    down = weights.linear(
        {f"{prefix}.q_a_proj": rank}, in_features=config.hidden_size, bias=config.attention_bias
    )
    norm = _norm(weights, f"{prefix}.q_a_layernorm", rank)
    up = weights.linear({f"{prefix}.q_b_proj": size}, in_features=rank, bias=False)
    return _Queries(_Compress(down, norm), up)


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class _Compress:
    down: LinearOp
    norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(self.down(x))


def _norm(weights: WeightSource, name: str, size: int, *, factor: float = 1.0) -> Norm:
    weight = weights.tensor(f"{name}.weight", (size,))
    return weights.elementwise.norm(weight if factor == 1.0 else weight * factor, eps=NORM_EPS)


def _up_projection(
    prefix: str, weights: WeightSource, *, shape: LatentShape, num_heads: int
) -> UpProjection:
    sizes, rank = (shape.qk_nope_head_dim, shape.v_head_dim), shape.kv_lora_rank
    if not shape.has_joined_up:
        key = weights.tensor(f"{prefix}.k_b_proj.weight", (num_heads, rank, sizes[0]))
        value = weights.tensor(f"{prefix}.v_b_proj.weight", (num_heads, sizes[1], rank))
        return UpProjection(key.mT.contiguous(), value.contiguous())
    joined = weights.tensor(f"{prefix}.kv_b_proj.weight", (num_heads * sum(sizes), rank))
    key, value = joined.view(num_heads, sum(sizes), -1).split(sizes, dim=1)
    return UpProjection(key.contiguous(), value.contiguous())


def _mscale(fields: Fields) -> float:
    """Returns 0.1 * mscale_all_dim * ln(factor) + 1 for a stretched context, or else 1."""
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = fields.section(name)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default" or not rope.has("mscale_all_dim"):
        return 1.0
    factor = rope.number("factor")
    return 1.0 if factor <= 1 else 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0
