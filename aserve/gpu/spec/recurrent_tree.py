"""Drafts a tree with the model of a recurrent chain: the dynamic one of EAGLE-2, or a static one.

The chain has the model's place after the extend, its relay field and the extend itself; only the
drafting between them differs. See tree_growth.py and fixed_tree.py for the trees, and recurrent.py
for the model.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.spec.base import DraftRows, Drafts
from aserve.gpu.spec.drafting import draft_scores
from aserve.gpu.spec.recurrent import HIDDEN, RecurrentChain
from aserve.gpu.step.forward_batch import ForwardOverrides
from aserve.messages.step import DraftTree


class Growth(Protocol):
    """The trees of n rows while they grow. Nodes that go on get children."""

    @property
    def tokens(self) -> Tensor:
        """Returns the tokens of the nodes that go on, int64 [n, k], level by level."""

    @property
    def levels(self) -> Tensor:
        """Their levels, int64 [k], 0 for the first one."""

    @property
    def mask(self) -> Tensor:
        """Which of them each of them sees, bool [n, k, k]."""

    @property
    def num_last(self) -> int:
        """The number of them on the last level."""

    def grow(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Adds a level. tokens int64 [n, num_last, topk] are the best children of the last nodes
        that go on, and `scores` their log-probabilities. Returns the place of the parent of each
        new node that goes on, among the last ones, int64 [n, the new num_last].
        """

    def best(self, num_drafts: int) -> Drafts: ...


class TreeShape(Protocol):
    @property
    def depth(self) -> int: ...

    @property
    def topk(self) -> int:
        """The most children of a node."""

    @property
    def num_drafts(self) -> int: ...

    def depth_within(self, num_drafts: int) -> int:
        """Returns the depth for a step that has KV slots for `num_drafts` drafts and the root."""

    def plant(self, tokens: Tensor, scores: Tensor) -> Growth:
        """tokens int64 [n, topk] after the root, and their log-probabilities."""


class RecurrentTree:
    """A `Drafter`."""

    __slots__ = (
        *("_chain", "_shape"),
        *("extend", "fields", "key_lookahead", "max_drafts", "num_forwards", "tree", "inputs"),
    )

    def __init__(self, chain: RecurrentChain, shape: TreeShape) -> None:
        self._chain = chain
        self._shape = shape
        self.max_drafts = shape.num_drafts
        self.tree: DraftTree | None = DraftTree(max_depth=shape.depth)
        self.num_forwards = shape.depth  # the extend included
        self.inputs = chain.inputs
        self.fields = chain.fields
        self.key_lookahead = chain.key_lookahead
        self.extend = chain.extend

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        """Each level runs all nodes so far in one forward, whose tree mask hides the nodes of other
        branches: KV that an earlier forward left behind cannot be masked."""
        hidden = runner.relay.read(HIDDEN, rows.rows)
        topk, num_rows = self._shape.topk, len(hidden)
        growth = self._shape.plant(*self._children(runner, rows, hidden, 1))
        # of the nodes so far that go on, [n, nodes, hidden]
        inputs = hidden[:, None].expand(-1, growth.num_last, -1)
        for depth in range(2, self._shape.depth_within(rows.num_drafts) + 1):
            levels, num_last = growth.levels, growth.num_last
            positions = rows.lens[:, None] + levels.minimum(rows.counts[:, None])
            overrides = ForwardOverrides(
                rope_positions=positions.flatten(), tree_mask=growth.mask.flatten(0, 1)
            )
            batch = runner.init_forward(rows.block_at(0, growth.tokens), overrides)
            outputs = runner.draft(batch, inputs.flatten(0, 1)).view(num_rows, -1, hidden.shape[1])
            last = outputs[:, -num_last:]
            tokens, scores = self._children(runner, rows, last.flatten(0, 1), depth)
            tokens, scores = (each.view(num_rows, num_last, topk) for each in (tokens, scores))
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
        best = scores.topk(self._shape.topk, dim=1).indices
        chosen = scores.log_softmax(dim=1).gather(1, best)
        return (best if token_ids is None else token_ids[best]), chosen
