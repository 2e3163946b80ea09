"""The histories of the nodes of draft trees, for penalties and bans."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreePaths:
    """The tokens of n logits rows on their paths through draft trees. In the token pool, the nodes
    of all paths stand side by side, so these tokens replace those of the pool from `starts` on.
    """

    starts: Tensor  # int64 [n], positions of the roots
    tokens: Tensor  # int64 [n, depth + 1]; those behind the logits row's own node are arbitrary

    def overlay(self, history: Tensor, indices: Tensor) -> Tensor:
        """Returns `history`, int64 [m, len], with the tokens of the paths of the logits rows
        `indices`, int64 [m]. `history` has the pool's tokens."""
        tokens = self.tokens.index_select(0, indices)
        depths = torch.arange(tokens.shape[1], device=tokens.device)
        positions = self.starts.index_select(0, indices)[:, None] + depths
        padded = torch.nn.functional.pad(history, (0, tokens.shape[1]))
        return padded.scatter(1, positions, tokens)[:, : history.shape[1]]

    def at_positions(self, indices: Tensor, positions: Tensor, pooled: Tensor) -> Tensor:
        """Returns the tokens of the logits rows `indices` at `positions`, int64 [m] each. `pooled`,
        int64 [m], are those of the pool."""
        depths = positions - self.starts.index_select(0, indices)
        own = self.tokens[indices, depths.clamp(0, self.tokens.shape[1] - 1)]
        return torch.where(depths >= 0, own, pooled)

    def at(self, part: slice) -> TreePaths:
        return TreePaths(self.starts[part], self.tokens[part])
