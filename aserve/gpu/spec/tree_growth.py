"""The dynamic draft tree of EAGLE-2 (Li et al., 2024): its size, and its growth on the device.

The score of a node is the sum of the log-probabilities on its path. A tree of depth D with `topk`
branches grows level by level:

    level 1       the topk best tokens after the root
    level d       the topk best nodes of level d - 1 get topk children each
    in the end    of all topk + (D - 1) * topk^2 nodes, the best W - 1 are drafts

A child's score is at most its parent's, and among equal scores the node that was made first wins.
So the parent of a draft is a draft, too, and comes before it. At temperature 0 the probabilities
are the drafter's. Above it they are those of logits / T + noise, whose largest element is the token
that the target draws if both agree (see drafting.py). So a tree depends on seed and position, and
on nothing else that is random.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from aserve.errors import ConfigError
from aserve.gpu.spec.base import Drafts
from aserve.gpu.spec.request import SpecOptions

DEFAULT_STEPS = 4
DEFAULT_TREE_TOKENS = 16
MAX_TREE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TreeSize:
    depth: int
    topk: int
    num_drafts: int

    def depth_within(self, num_drafts: int) -> int:
        """Returns the depth for a step that has KV slots for `num_drafts` drafts and the root. Each
        level but the last needs `topk` slots."""
        return min(self.depth, 1 + (num_drafts + 1) // self.topk)

    def plant(self, tokens: Tensor, scores: Tensor) -> TreeGrowth:
        return TreeGrowth(tokens, scores)


def tree_size(options: SpecOptions) -> TreeSize:
    """Returns the size of the tree that the options ask for."""
    topk = options.topk or 1
    depth = options.num_steps or DEFAULT_STEPS
    num_nodes = topk + (depth - 1) * topk * topk
    num_slots = topk * (depth - 1)
    wanted = min(max(DEFAULT_TREE_TOKENS, num_slots), num_nodes + 1, MAX_TREE_TOKENS)
    num_tokens = options.num_draft_tokens or wanted
    if num_tokens > num_nodes + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens {num_tokens}: a tree of {depth} steps with {topk} "
            f"branches has {num_nodes + 1} nodes, the root included; take at most so many",
            param="speculative_num_draft_tokens",
        )
    if num_tokens < num_slots:
        raise ConfigError(
            f"--speculative-num-draft-tokens {num_tokens}: to grow {depth} steps with {topk} "
            f"branches takes KV slots for {num_slots} tokens; raise it, or lower "
            "--speculative-num-steps or --speculative-topk",
            param="speculative_num_draft_tokens",
        )
    return TreeSize(depth, topk, num_tokens - 1)


class TreeGrowth:
    """A `Growth`: the trees of n rows while they grow.

    All nodes are candidates for drafts, numbered from 1 in the order in which they are made; the
    `topk` best nodes of each level go on, and their children are the next level.
    """

    __slots__ = ("_frontier", "_parents", "_scores", "_tokens", "mask", "tokens")

    def __init__(self, tokens: Tensor, scores: Tensor) -> None:
        """tokens int64 [n, topk] after the root, and their scores."""
        num_rows, topk = tokens.shape
        self._tokens, self._scores = tokens, scores  # of all nodes, [n, nodes]
        self._parents = torch.zeros_like(tokens)  # numbers; 0 is the root
        order = torch.arange(topk, device=tokens.device)
        self._frontier = order.expand(num_rows, -1) + 1  # numbers of the last nodes that go on
        self.tokens = tokens  # of the nodes that go on, int64 [n, topk * levels]
        # bool [n, topk * levels, topk * levels]: which of them each of them sees
        self.mask = torch.eye(topk, dtype=torch.bool, device=tokens.device).repeat(num_rows, 1, 1)

    @property
    def num_last(self) -> int:
        return self._frontier.shape[1]

    @property
    def levels(self) -> Tensor:
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return nodes // self.num_last

    def grow(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Adds a level. tokens int64 [n, topk, topk] are the children of the last nodes that go on,
        and `scores` their log-probabilities. Returns the place of the parent of each new node that
        goes on, among the last ones, int64 [n, topk].
        """
        topk = tokens.shape[1]
        num_before = self._tokens.shape[1]
        totals = self._scores.gather(1, self._frontier - 1)[:, :, None] + scores
        self._tokens = torch.cat((self._tokens, tokens.flatten(1)), dim=1)
        self._scores = torch.cat((self._scores, totals.flatten(1)), dim=1)
        parents = self._frontier.repeat_interleave(topk, dim=1)
        self._parents = torch.cat((self._parents, parents), dim=1)
        best = _best(totals.flatten(1), topk)
        self._frontier = best + num_before + 1
        self.tokens = torch.cat((self.tokens, tokens.flatten(1).gather(1, best)), dim=1)
        indices = best // topk
        self._widen(indices)
        return indices

    def best(self, num_drafts: int) -> Drafts:
        """Returns the best nodes in the order in which they were made."""
        chosen = _best(self._scores, num_drafts).sort(dim=1).values  # [n, num_drafts]
        # The number of a draft among the drafts is its place in `chosen`.
        parents = self._parents.gather(1, chosen)
        numbers = torch.searchsorted(chosen + 1, parents) + 1
        return Drafts(self._tokens.gather(1, chosen), torch.where(parents > 0, numbers, 0))

    def _widen(self, indices: Tensor) -> None:
        """A new node sees its parent and what that sees, and itself."""
        topk = indices.shape[1]
        width = self.mask.shape[1] + topk
        index = indices[:, :, None].expand(-1, -1, self.mask.shape[1])
        seen = self.mask[:, -topk:].gather(1, index)
        self.mask = functional.pad(torch.cat((self.mask, seen), dim=1), (0, topk))
        self.mask |= torch.eye(width, dtype=torch.bool, device=indices.device)


def _best(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest scores, int64 [n, count]; the first among equal ones."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
