"""Drafts the dynamic tree of EAGLE-2 with the model of a recurrent chain.

The chain has the model's place after the extend, its relay field and the extend itself; only the
drafting between them differs. See tree_growth.py for the tree, recurrent.py for the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.spec.base import DraftRows, Drafts
from aserve.gpu.spec.drafting import draft_scores
from aserve.gpu.spec.recurrent import HIDDEN, RecurrentChain
from aserve.gpu.spec.tree_growth import TreeGrowth, TreeSize
from aserve.gpu.step.forward_batch import ForwardOverrides
from aserve.messages.step import DraftTree


class RecurrentTree:
    """A `Drafter`."""

    __slots__ = (
        *("_chain", "_size"),
        *("extend", "fields", "key_lookahead", "max_drafts", "num_forwards", "tree", "wants"),
    )

    def __init__(self, chain: RecurrentChain, size: TreeSize) -> None:
        self._chain = chain
        self._size = size
        self.max_drafts = size.num_drafts
        self.tree: DraftTree | None = DraftTree(max_depth=size.depth)
        self.num_forwards = size.depth  # the extend included
        self.wants = chain.wants
        self.fields = chain.fields
        self.key_lookahead = chain.key_lookahead
        self.extend = chain.extend

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        """Each level runs all nodes so far in one forward, whose tree mask hides the nodes of other
        branches: KV that an earlier forward left behind cannot be masked."""
        hidden = runner.relay.read(HIDDEN, rows.rows)
        topk, num_rows = self._size.topk, len(hidden)
        growth = TreeGrowth(*self._children(runner, rows, hidden, 1))
        inputs = hidden[:, None].expand(-1, topk, -1)  # of the nodes so far, [n, nodes, hidden]
        for depth in range(2, self._size.depth_within(rows.num_drafts) + 1):
            tokens = growth.tokens  # [n, nodes], `topk` of each depth
            level = torch.arange(tokens.shape[1], device=tokens.device) // topk
            overrides = ForwardOverrides(
                rope_positions=(rows.lens[:, None] + level.minimum(rows.counts[:, None])).flatten(),
                tree_mask=growth.mask.flatten(0, 1),
            )
            batch = runner.init_forward(rows.block_at(0, tokens), overrides)
            outputs = runner.draft(batch, inputs.flatten(0, 1)).view(num_rows, -1, hidden.shape[1])
            last = outputs[:, -topk:]
            tokens, scores = self._children(runner, rows, last.flatten(0, 1), depth)
            tokens, scores = (each.view(num_rows, topk, topk) for each in (tokens, scores))
            parents = growth.grow(tokens, scores)
            index = parents[:, :, None].expand(-1, -1, hidden.shape[1])
            inputs = torch.cat((inputs, last.gather(1, index)), dim=1)
        return growth.best(rows.num_drafts)

    def _children(
        self, runner: StepRunner, rows: DraftRows, hidden: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """hidden [nodes, hidden] -> the best `topk` tokens after each node, int64 [nodes, topk],
        and their log-probabilities.

        The probabilities are those of the logits plus the noise with which the target will draw
        there. A row without temperature has no noise.
        """
        token_ids = self._chain.token_ids
        logits = self._chain.model.logits(hidden)
        scores = draft_scores(runner, logits, rows, depth, token_ids=token_ids)
        best = scores.topk(self._size.topk, dim=1).indices
        chosen = scores.log_softmax(dim=1).gather(1, best)
        return (best if token_ids is None else token_ids[best]), chosen
