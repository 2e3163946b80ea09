"""DeepSeek Sparse Attention (DSA): an indexer chooses the keys that each query attends to.

For a query at position t and a key at position s <= t, with x the hidden states, q_a the layer's
compressed queries and H index heads of a few dimensions:

    q^I_h   = rope(q_a W_q^T)_h             k^I = rope(layer_norm(x W_k^T))        w = x W_w^T
    I_{t,s} = sum_h w_{t,h} relu(q^I_{t,h} . k^I_s)

The query attends to the `top_k` keys of the largest I. Among equal scores the earlier key wins, so
that the choice does not depend on the step in which it is made. The index keys are cached beside
the latents. Positive factors of I change no choice, and are left out.

NOTE: in DeepSeek-V3.2 rope rotates the first elements of the index heads by halves (i, i + half),
while the rope of the attention itself rotates neighbours (2 i, 2 i + 1). In GLM-5 both rotate
neighbours, which are moved to i and i + half first.
Source: https://arxiv.org/abs/2512.02556, modeling_deepseek_v32.py in transformers
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.rope import RopeInputs, apply_rope
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.heads import neighbours_to_halves
from aserve.gpu.weights.source import WeightSource

NORM_EPS = 1e-6  # of the layer norm of index keys, in the reference code


class IndexShape(msgspec.Struct, frozen=True):
    """The sizes of an indexer, by their names in config.json."""

    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_rope_interleave: bool = False  # rope rotates neighbouring elements

    @classmethod
    def of(cls, fields: Fields, *, rope_dim: int) -> IndexShape:
        if fields.integer("index_head_dim") < rope_dim:
            fields.refuse("index_head_dim", expected=f"at least qk_rope_head_dim ({rope_dim})")
        return cls(
            index_n_heads=fields.integer("index_n_heads"),
            index_head_dim=fields.integer("index_head_dim"),
            index_topk=fields.integer("index_topk"),
            indexer_rope_interleave=fields.flag("indexer_rope_interleave"),
        )


@dataclass(frozen=True, slots=True)
class IndexInputs:
    """The inputs of the choice of keys for the tokens of one forward, after rope."""

    q: Tensor  # [tokens, index heads, index dim]
    weights: Tensor  # [tokens, index heads]
    keys: Tensor  # [tokens, index dim], to be stored

    def select(self, tokens: Tensor | slice) -> IndexInputs:
        """tokens int64 [n] or a slice -> the inputs of these tokens."""
        return IndexInputs(self.q[tokens], self.weights[tokens], self.keys[tokens])

    def scores(self, keys: Tensor) -> Tensor:
        """keys [keys, index dim], or [tokens, keys, index dim] if each token has keys of its own
        -> I, [tokens, keys], float32 at least."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        heads = (self.q.to(wide) @ keys.to(wide).mT).relu_()  # [tokens, index heads, keys]
        return (self.weights.to(wide)[:, None] @ heads).squeeze(1)


class Indexer:
    """The indexer of one layer."""

    __slots__ = ("_key", "_norm", "_q", "_weights", "shape")

    def __init__(
        self, prefix: str, weights: WeightSource, *, shape: IndexShape, sizes: tuple[int, int]
    ) -> None:
        """`sizes`: of the hidden states and of the compressed queries."""
        hidden_size, q_lora_rank = sizes
        num_heads, dim = shape.index_n_heads, shape.index_head_dim
        self.shape = shape
        self._q = weights.linear(
            {f"{prefix}.wq_b": num_heads * dim}, in_features=q_lora_rank, bias=False
        )
        self._key = weights.linear({f"{prefix}.wk": dim}, in_features=hidden_size, bias=False)
        names = (f"{prefix}.k_norm.weight", f"{prefix}.k_norm.bias")
        self._norm = tuple(weights.tensor(name, (dim,)) for name in names)
        self._weights = weights.linear(
            {f"{prefix}.weights_proj": num_heads}, in_features=hidden_size, bias=False
        )

    def __call__(self, x: Tensor, q_latent: Tensor, cos_sin: Tensor) -> IndexInputs:
        """x [tokens, hidden], q_latent [tokens, q_lora_rank], cos_sin [tokens, d_rope]."""
        shape, (weight, bias) = self.shape, self._norm
        q = self._q(q_latent).unflatten(-1, (shape.index_n_heads, -1))
        keys = functional.layer_norm(
            self._key(x).to(weight.dtype), weight.shape, weight, bias, NORM_EPS
        )
        heads = torch.cat((q, keys.to(q.dtype)[:, None]), dim=1)
        if shape.indexer_rope_interleave:
            heads = neighbours_to_halves(heads, cos_sin.shape[1])
        heads = apply_rope(heads, RopeInputs(cos_sin))
        return IndexInputs(heads[:, :-1], self._weights(x), heads[:, -1])


def best_keys(scores: Tensor, is_seen: Tensor, count: int) -> Tensor:
    """scores [queries, keys], is_seen bool [queries, keys] -> int64 [queries, min(count, keys)],
    the seen keys of the largest scores in ascending order. Where a query sees fewer keys, the rest
    is `keys`, which is no key.

    A score and the place of its key make one integer, so that no two are equal: the bits of a float
    are in the order of its values, once those of negative numbers are reversed.
    """
    num_keys = scores.shape[-1]
    bits = scores.float().add(0.0).view(torch.int32).to(torch.int64)  # -0 + 0 is 0
    ordered = torch.where(bits < 0, -(bits & 0x7FFF_FFFF), bits)
    places = torch.arange(num_keys, device=scores.device)
    joined = (ordered << 32) + (num_keys - 1 - places)
    lowest = torch.iinfo(torch.int64).min
    joined = joined.masked_fill(~is_seen, lowest)
    best = joined.topk(min(count, num_keys), dim=-1)
    found = best.indices.masked_fill(best.values == lowest, num_keys)
    return found.sort(dim=-1).values
