"""The operators of sparse attention: attention of each query to latents in slots of its own choice,
and the scores by which they are chosen.

For a query q with the slots s_1 .. s_n, n its own number of them:

    out = sum_i softmax_i(scale * q . k_{s_i}) v_{s_i}      k latents, v their first elements
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.kv.pools import LayerKv
from aserve.gpu.kv.store import byte_view, from_kv_dtype
from aserve.gpu.models.indexer import IndexInputs
from aserve_kernels.paged_rows import PagedRows

MAX_ELEMENTS = 1 << 24  # of scores, and of gathered latents, at a time


@dataclass(frozen=True, slots=True)
class Chosen:
    """The keys that each query of a forward attends to. `slots` int64 [tokens, most keys], of which
    the first `lens`, int64 [tokens], are valid; the others are slot 0."""

    slots: Tensor
    lens: Tensor


class AttendSlots(Protocol):
    """Attention of queries to the latents in some slots."""

    def __call__(self, q: Tensor, kv: LayerKv, chosen: Chosen, layer: LayerSpec, /) -> Tensor:
        """q [tokens, heads, r + d_rope], absorbed -> sums of latents [tokens, heads, r]."""


class ScoreKeys(Protocol):
    """The scores of an indexer over paged index keys."""

    def __call__(self, index: IndexInputs, keys: Tensor, paged: PagedRows, /) -> Tensor:
        """keys [slots, index dim]; each row of `paged` is one token of `index` -> I of
        models/indexer.py, [tokens, paged.max_len], float32 at least. What is behind a token's
        length is undefined."""


def attend_slots(q: Tensor, kv: LayerKv, chosen: Chosen, layer: LayerSpec) -> Tensor:
    """The reference `AttendSlots`, in plain torch. Scores are float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((*q.shape[:2], layer.out_dim))
    indices = torch.arange(chosen.slots.shape[1], device=q.device)
    for tokens in tiles(len(q), chosen.slots.shape[1] * layer.head_dim):
        stored = byte_view(kv.keys)[chosen.slots[tokens], 0].view(kv.keys.dtype)
        keys = from_kv_dtype(stored, wide, kv.scales[0])  # [tile, most keys, r + d_rope]
        scores = torch.einsum("thd,tkd->thk", q[tokens].to(wide), keys) * layer.scale
        is_chosen = indices < chosen.lens[tokens, None]
        weights = scores.masked_fill(~is_chosen[:, None], -torch.inf).softmax(dim=-1)
        values = keys[..., : layer.out_dim].masked_fill(~is_chosen[..., None], 0)
        out[tokens] = torch.einsum("thk,tkr->thr", weights, values).to(q.dtype)
    return out


def score_keys(index: IndexInputs, keys: Tensor, paged: PagedRows) -> Tensor:
    """The reference `ScoreKeys`, in plain torch. Undefined scores are those of slot 0."""
    parts: list[Tensor] = []
    indices = torch.arange(paged.max_len, device=keys.device)
    for tokens in tiles(len(index.q), paged.max_len * keys.shape[1]):
        positions = indices * (indices < paged.lens[tokens, None])
        pages = paged.page_table[paged.rows[tokens, None], positions // paged.page_size]
        slots = pages * paged.page_size + positions % paged.page_size
        parts.append(index.select(tokens).scores(keys[slots]))
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class SparseOps:
    """The operators of sparse attention that a backend has."""

    attend_slots: AttendSlots = attend_slots
    score_keys: ScoreKeys = score_keys


def tiles(num_tokens: int, elements_per_token: int) -> Iterator[slice]:
    """Yields slices of the tokens, each of at most MAX_ELEMENTS elements or of one token."""
    size = max(1, MAX_ELEMENTS // max(1, elements_per_token))
    for first in range(0, num_tokens, size):
        yield slice(first, min(first + size, num_tokens))
