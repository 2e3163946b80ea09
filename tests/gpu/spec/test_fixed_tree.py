"""Static draft trees, as values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.spec.fixed_tree import EAGLE_1, FixedTree, Path, fixed_tree, tree_of
from aserve.gpu.spec.request import SpecOptions
from aserve.gpu.spec.tree import tree_masks

CPU = torch.device("cpu")
SMALL = "[(1,), (0, 0, 2), (0,), (1, 0), (0, 0)]"  # in any order


def of(text: str, **sizes: Any) -> FixedTree:
    return fixed_tree(SpecOptions("EAGLE", token_tree=text, **sizes), CPU)


def test_nodes_are_numbered_level_by_level() -> None:
    tree = of(SMALL)
    assert tree.parents.tolist() == [0, 0, 1, 2, 3]
    assert (tree.depth, tree.num_drafts, tree.topk) == (3, 5, 3)
    assert [tree.depth_within(num) for num in range(6)] == [0, 1, 1, 2, 2, 3]


def test_the_tree_of_eagle_1() -> None:
    tree = of("static", num_steps=5, topk=4, num_draft_tokens=26)
    assert (tree.num_drafts, tree.depth) == (25, 5)
    masks, depths = tree_masks(tree.parents[None], torch.ones(1, 26, dtype=torch.bool))
    assert depths[0].bincount().tolist() == [1, 4, 8, 8, 3, 2]
    assert masks[0].sum() == 1 + sum(1 + len(path) for path in EAGLE_1)


def children(paths: list[Path], topk: int) -> Tensor:
    """The best tokens after each node: each names its path in decimal digits."""
    numbers = [int("1" + "".join(map(str, path))) for path in paths]
    return torch.tensor(numbers)[None, :, None] * 10 + torch.arange(topk)


@pytest.mark.parametrize(
    "paths", [EAGLE_1, ((0,), (0, 0), (0, 0, 0)), ((2,), (2, 1), (0,)), ((0,), (5,)), ((0,),)]
)
def test_every_draft_is_the_token_that_its_path_names(paths: tuple[Path, ...]) -> None:
    tree = tree_of(paths, CPU)
    scores = torch.zeros(0)
    going: list[Path] = [()]
    growth = tree.plant(children(going, tree.topk)[:, 0], scores)
    for depth in range(1, tree.depth):
        before = going
        going = [p for last in before for p in sorted(paths) if p and p[:-1] == last]
        going = [path for path in going if any(path == other[:-1] for other in paths)]
        assert growth.num_last == len(going)
        assert (growth.levels == depth - 1).sum() == len(going)
        growth.grow(children(going, tree.topk), scores)
    drafts = growth.best(tree.num_drafts)
    assert drafts.parents is not None
    named = [(), *(tuple(map(int, str(token)[1:])) for token in drafts.tokens[0].tolist())]
    assert sorted(named[1:]) == sorted(paths)
    assert [named[parent] for parent in drafts.parents[0]] == [path[:-1] for path in named[1:]]
    few = growth.best(1)
    assert few.tokens.tolist() == drafts.tokens[:, :1].tolist()


def test_a_node_that_goes_on_sees_its_ancestors() -> None:
    tree = tree_of(((0,), (1,), (0, 0), (1, 0), (1, 0, 0), (0, 0, 0), (1, 0, 0, 0)), CPU)
    assert tree.levels[2].mask.int().tolist() == [
        *([1, 0, 0, 0, 0], [0, 1, 0, 0, 0]),  # (0,) and (1,)
        *([1, 0, 1, 0, 0], [0, 1, 0, 1, 0]),  # (0, 0) and (1, 0)
        [0, 1, 0, 1, 1],  # (1, 0, 0)
    ]


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        ("[(0,), (0", {}, "not a list of paths"),
        ("7", {}, "not a list of paths"),
        ("[]", {}, "1 to 63 paths"),
        ("[(0,), (0,)]", {}, "1 to 63 paths"),
        (str([(0,) * n for n in range(1, 65)]), {}, "1 to 63 paths"),
        ("[(0,), (32,)]", {}, "(32,) is not of ranks"),
        ("[()]", {}, "() is not of ranks"),
        ("['0']", {}, "('0',) is not of ranks"),
        ("[(0,), (1, 0)]", {}, "(1, 0) has no parent"),
        (SMALL, {"topk": 2}, "--speculative-topk 2 differs"),
        (SMALL, {"num_steps": 5}, "--speculative-num-steps 5 differs"),
        (SMALL, {"num_draft_tokens": 5}, "--speculative-num-draft-tokens 5 differs"),
    ],
)
def test_what_is_no_tree_is_refused(text: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        of(text, **sizes)
