"""The ids before each token of a forward, for models with n-gram embeddings.

They are read from the token pool, which has the ids of a row's whole context by its page table: of
a cached prefix, of earlier chunks, of tokens that the host does not know yet, and of the drafts
that this forward verifies. So no row has state of its own for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.step.forward_batch import ForwardBatch


def id_windows(batch: ForwardBatch, pools: KvPools, size: int) -> Tensor:
    """Returns int64 [tokens, size]: in column j the id that stands j places before the token, or -1
    before the beginning. With a size of 1 it is the ids alone, [tokens]."""
    if size == 1:
        return batch.input_ids
    places = _places_before(batch, size - 1)
    rows = batch.token_rows[:, None].expand_as(places)
    slots = pools.slots(0, rows.flatten(), places.clamp(min=0).flatten())
    ids = pools.token_pool.index_select(0, slots).to(torch.int64).view(places.shape)
    return torch.cat((batch.input_ids[:, None], ids.masked_fill(places < 0, -1)), dim=1)


def _places_before(batch: ForwardBatch, count: int) -> Tensor:
    """Returns the cache positions of the tokens before each token, the nearest first, int64
    [tokens, count]; negative ones are before the beginning. In a draft tree these are the token's
    ancestors, and then the context of the tree."""
    back = torch.arange(count, device=batch.rows.device)
    own, mask = batch.cache_positions[:, None], batch.tree_mask
    if mask is None:
        return own - 1 - back
    first = batch.kv_lens.index_select(0, batch.token_to_row)[:, None]
    nodes = torch.arange(mask.shape[1], device=batch.rows.device)
    is_ancestor = mask & (nodes < own - first)
    depths = is_ancestor.sum(dim=1, keepdim=True)
    ancestors = torch.where(is_ancestor, nodes, -1).sort(dim=1, descending=True).values
    nearest = torch.nn.functional.pad(ancestors, (0, count))[:, :count]
    return torch.where(back < depths, first + nearest, first - 1 - (back - depths))
