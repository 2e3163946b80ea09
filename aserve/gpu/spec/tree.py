"""Draft trees in a step: the positions of their nodes, and which nodes each node sees.

The shape of a row's tree is chosen on the device, and travels beside the drafts in a relay field.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.sampling.tree_paths import TreePaths
from aserve.gpu.step.future_map import FutureMap, RelayField
from aserve.gpu.step.resolve import DeviceStep
from aserve.messages.step import DraftTree

PARENTS = "draft_parents"


@dataclass(frozen=True, slots=True)
class TreeOfStep:
    """The trees of a step's windows, and the forward's inputs that follow from them."""

    parents: Tensor  # int64 [samples, width - 1], as in DraftTree
    positions: Tensor  # int64 [tokens]
    mask: Tensor  # bool [tokens, longest query], as in ForwardBatch
    node_masks: Tensor  # bool [rows, width, width], which nodes each node sees

    def paths_of(self, step: DeviceStep) -> TreePaths | None:
        """Returns the tokens on the path to each logits row, if penalties or bans count them."""
        if not any(len(part.penalised) or part.bans for part in step.plan.logits.slices):
            return None
        batch, indices = step.batch, step.arrays.ints("logits_tokens")
        rows = batch.token_to_row.index_select(0, indices)
        width = self.node_masks.shape[1]
        nodes = step.arrays.ints("offsets").index_select(0, indices)
        starts = batch.cu_query_lens.index_select(0, rows)
        # An ancestor comes before its descendants, so the nodes that a node sees, in their order,
        # are its path. A sort puts them first.
        is_seen = self.node_masks[rows, nodes.clamp(max=width - 1)]
        order = torch.arange(width, device=rows.device).where(is_seen, width)
        path = order.sort(dim=1).values.clamp(max=width - 1)
        is_window = (step.arrays.ints("num_drafts") > 0).index_select(0, rows)
        # The path of a token that is in no tree is that token.
        index = torch.where(is_window[:, None], starts[:, None] + path, indices[:, None])
        position = batch.kv_lens.index_select(0, rows) + torch.where(is_window, 0, nodes)
        return TreePaths(position, batch.input_ids[index.clamp(max=batch.num_tokens - 1)])


class DraftTrees:
    __slots__ = ("depth", "fields")

    def __init__(self, tree: DraftTree, max_drafts: int) -> None:
        self.depth = tree.depth  # of a number of drafts
        self.fields = (RelayField(PARENTS, (max_drafts,), torch.int64),)

    def write(self, relay: FutureMap, rows: Tensor, parents: Tensor) -> None:
        relay.write(PARENTS, rows, parents)

    def of(self, step: DeviceStep, relay: FutureMap) -> TreeOfStep | None:
        """Returns None for a step without drafts."""
        if not step.plan.num_drafts.any():
            return None
        num_drafts = int(step.plan.num_drafts.max())
        arrays, batch = step.arrays, step.batch
        own = _parents(relay, batch.rows, num_drafts)  # of every row of the step
        is_real = (
            torch.arange(num_drafts + 1, device=own.device) <= arrays.ints("num_drafts")[:, None]
        )
        masks, depths = tree_masks(own, is_real)
        longest = int(step.plan.query_lens.max())
        offsets = arrays.ints("offsets")
        node = offsets.clamp(max=num_drafts)
        mask = torch.arange(longest, device=own.device) <= offsets[:, None]
        is_window = (arrays.ints("num_drafts") > 0).index_select(0, batch.token_to_row)
        seen = torch.nn.functional.pad(
            masks[batch.token_to_row, node], (0, longest - num_drafts - 1)
        )
        depth = torch.where(is_window, depths[batch.token_to_row, node], offsets)
        return TreeOfStep(
            parents=_parents(relay, arrays.ints("sample_rows"), num_drafts),
            positions=batch.kv_lens.index_select(0, batch.token_to_row) + depth,
            mask=torch.where(is_window[:, None], seen, mask),
            node_masks=masks,
        )


def _parents(relay: FutureMap, rows: Tensor, num_drafts: int) -> Tensor:
    """int64 [n, num_drafts] for rows int64 [n]."""
    return relay.read(PARENTS, rows)[:, :num_drafts]


def tree_masks(parents: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor]:
    """parents int64 [n, width - 1], is_real bool [n, width] -> which nodes each node sees, bool
    [n, width, width]: its ancestors and itself; and depths, int64 [n, width].

    A place outside of its tree sees only itself.
    """
    num_rows, width = is_real.shape
    mask = torch.eye(width, dtype=torch.bool, device=parents.device).repeat(num_rows, 1, 1)
    every = torch.arange(num_rows, device=parents.device)
    for node in range(1, width):
        parent = torch.where(is_real[:, node], parents[:, node - 1], node)
        mask[:, node] |= mask[every, parent]
    return mask, mask.sum(dim=2) - 1
