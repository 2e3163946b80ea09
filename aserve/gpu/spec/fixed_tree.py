"""The static draft tree of EAGLE-1 (Li et al., 2024): its shape, and its growth on the device.

A shape is a list of paths, as in vLLM's `speculative_token_tree`. A path names its node by the
ranks of the tokens that lead to it: (0,) is the best token after the root, and (0, 1) the second
best one after that. All rows and steps have the same tree, whatever the drafter's probabilities
are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.spec.base import Drafts
from aserve.gpu.spec.request import SpecOptions

STATIC = "static"  # the option's value for EAGLE-1's own tree
MAX_NODES = 63
MAX_RANK = 31

Path: TypeAlias = tuple[int, ...]
# `mc_sim_7b_63` of choices.py of SafeAILab/EAGLE.
EAGLE_1: tuple[Path, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one depth. Those that go on have children, and the drafter runs them."""

    parents: Tensor  # int64 [nodes], the place of each node's parent among the last that go on
    ranks: Tensor  # int64 [nodes]
    goes_on: Tensor  # int64 [m], indices of the nodes that go on
    # Of all nodes that go on, down to this level:
    levels: Tensor  # int64 [k], 0 for the first one
    mask: Tensor  # bool [k, k], which of them each of them sees


@dataclass(frozen=True, slots=True)
class FixedTree:
    """A `TreeShape`. Nodes are numbered from 1, level by level, and in a level by their parents.
    So the first nodes of a tree are a tree, too, and the first of those that go on are enough for
    it."""

    parents: Tensor  # int64 [nodes], numbers, 0 for the root
    levels: tuple[Level, ...]
    topk: int

    @property
    def depth(self) -> int:
        return len(self.levels)

    @property
    def num_drafts(self) -> int:
        return len(self.parents)

    def depth_within(self, num_drafts: int) -> int:
        num_nodes, depth = 0, 0
        while num_nodes < num_drafts and depth < self.depth:
            num_nodes += len(self.levels[depth].ranks)
            depth += 1
        return depth

    def plant(self, tokens: Tensor, scores: Tensor) -> FixedGrowth:
        return FixedGrowth(self, tokens)


class FixedGrowth:
    """A `Growth`."""

    __slots__ = ("_depth", "_drafts", "_tree", "tokens")

    def __init__(self, tree: FixedTree, tokens: Tensor) -> None:
        """tokens int64 [n, topk] after the root."""
        self._tree = tree
        self._depth = 0
        self._drafts = self.tokens = tokens[:, :0]
        self._add(tokens[:, None])

    @property
    def num_last(self) -> int:
        return len(self._level.goes_on)

    @property
    def levels(self) -> Tensor:
        return self._level.levels

    @property
    def mask(self) -> Tensor:
        return self._level.mask.expand(len(self.tokens), -1, -1)

    def grow(self, tokens: Tensor, scores: Tensor) -> Tensor:
        self._add(tokens)
        indices = self._level.parents.index_select(0, self._level.goes_on)
        return indices.expand(len(tokens), -1)

    def best(self, num_drafts: int) -> Drafts:
        parents = self._tree.parents[:num_drafts].expand(len(self.tokens), -1)
        return Drafts(self._drafts[:, :num_drafts], parents)

    @property
    def _level(self) -> Level:
        return self._tree.levels[self._depth - 1]

    def _add(self, tokens: Tensor) -> None:
        """Adds a level. tokens [n, nodes that went on, topk]."""
        self._depth += 1
        level = self._level
        new = tokens[:, level.parents, level.ranks]
        self._drafts = torch.cat((self._drafts, new), dim=1)
        self.tokens = torch.cat((self.tokens, new.index_select(1, level.goes_on)), dim=1)


def fixed_tree(options: SpecOptions, device: torch.device) -> FixedTree:
    """Returns the tree that the options name; raises ConfigError if it is none."""
    assert options.token_tree is not None
    text = options.token_tree
    tree = tree_of(EAGLE_1 if text == STATIC else _read_paths(text), device)
    sizes = {
        "num_steps": (options.num_steps, tree.depth),
        "topk": (options.topk, tree.topk),
        "num_draft_tokens": (options.num_draft_tokens, tree.num_drafts + 1),
    }
    for name, (given, own) in sizes.items():
        if given not in (None, own):
            raise ConfigError(
                f"--speculative-{name.replace('_', '-')} {given} differs from that of the tree of "
                f"--speculative-token-tree, {own}; leave it out",
                param=f"speculative_{name}",
            )
    return tree


def _read_paths(text: str) -> tuple[Path, ...]:
    try:
        paths = tuple(tuple(path) for path in ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError):
        _refuse(text, "it is not a list of paths such as [(0,), (1,), (0, 0)]")
    if not 0 < len(paths) <= MAX_NODES or len({*paths}) < len(paths):
        _refuse(text, f"it must have 1 to {MAX_NODES} paths, which differ")
    for path in paths:
        if not path or not all(type(rank) is int and 0 <= rank <= MAX_RANK for rank in path):
            _refuse(text, f"the path {path} is not of ranks from 0 to {MAX_RANK}")
        if path[:-1] and path[:-1] not in paths:
            _refuse(text, f"the path {path} has no parent: {path[:-1]} is missing")
    return paths


def _refuse(text: str, why: str) -> NoReturn:
    shown = text if len(text) < 100 else f"{text[:100]}..."
    raise ConfigError(f"--speculative-token-tree {shown}: {why}", param="speculative_token_tree")


def tree_of(paths: Sequence[Path], device: torch.device) -> FixedTree:
    ordered: list[Path] = [()]  # the root and the nodes, in their order
    going: list[list[Path]] = [[()]]  # those with children, by depth
    levels: list[Level] = []

    def ints(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    while children := [
        path for last in going[-1] for path in sorted(paths) if path and path[:-1] == last
    ]:
        ordered += children
        last, goes_on = going[-1], [path for path in children if _is_parent(path, paths)]
        going.append(goes_on)
        every = [path for nodes in going[1:] for path in nodes]
        sees = [[path[: len(other)] == other for other in every] for path in every]
        levels.append(
            Level(
                parents=ints(last.index(path[:-1]) for path in children),
                ranks=ints(path[-1] for path in children),
                goes_on=ints(map(children.index, goes_on)),
                levels=ints(len(path) - 1 for path in every),
                mask=torch.tensor(sees, dtype=torch.bool, device=device).view(2 * [len(every)]),
            )
        )
    parents = ints(ordered.index(path[:-1]) for path in ordered[1:])
    return FixedTree(parents, tuple(levels), 1 + max(map(max, paths)))


def _is_parent(path: Path, paths: Sequence[Path]) -> bool:
    return any(path == other[:-1] for other in paths)
