"""The growth of dynamic draft trees, as values."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.spec.base import Drafts
from aserve.gpu.spec.request import SpecOptions
from aserve.gpu.spec.tree import tree_masks
from aserve.gpu.spec.tree_growth import TreeGrowth, TreeSize, tree_size

A, C, A1, A2, C1, C2 = 10, 12, 20, 21, 22, 23


def grown(seed: int, *, num_rows: int, topk: int, depth: int, are_sure: bool = False) -> TreeGrowth:
    """Children with random probabilities; with `are_sure`, all are 1, so that all scores are
    equal. Tokens are numbered in the order in which nodes are made."""
    generator = torch.Generator().manual_seed(seed)

    def level(num_nodes: int, first: int) -> tuple[Tensor, Tensor]:
        shape = (num_rows, num_nodes, topk)
        tokens = torch.arange(first, first + num_nodes * topk).view(1, num_nodes, topk)
        logprobs = torch.rand(shape, generator=generator, dtype=torch.float64).log()
        return tokens.expand(shape), torch.zeros_like(logprobs) if are_sure else logprobs

    tokens, scores = level(1, 1)
    growth = TreeGrowth(tokens[:, 0], scores[:, 0])
    for number in range(depth - 1):
        growth.grow(*level(topk, 1 + topk + number * topk * topk))
    return growth


def test_the_worked_example_of_eagle_2() -> None:
    growth = TreeGrowth(torch.tensor([[A, C]]), torch.tensor([[0.6, 0.3]]).log())
    tokens = torch.tensor([[[A1, A2], [C1, C2]]])
    places = growth.grow(tokens, torch.tensor([[[0.5, 0.4], [0.9, 0.05]]]).log())
    assert places.tolist() == [[0, 1]]  # a1 (0.30) follows a, and c1 (0.27) follows c
    assert growth.tokens.tolist() == [[A, C, A1, C1]]
    assert growth.mask.int().tolist() == [[[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]]
    drafts = growth.best(4)
    assert drafts.parents is not None
    assert drafts.tokens.tolist() == [[A, C, A1, C1]]
    assert drafts.parents.tolist() == [[0, 0, 1, 2]]
    masks, depths = tree_masks(drafts.parents, torch.ones(1, 5, dtype=torch.bool))
    assert depths.tolist() == [[0, 1, 1, 2, 2]]
    assert ["".join(map(str, row)) for row in masks[0].int().tolist()] == [
        *("10000", "11000", "10100", "11010", "10101")
    ]


@pytest.mark.parametrize("are_sure", [False, True], ids=["random", "ties-at-1"])
@pytest.mark.parametrize(("topk", "depth", "num_drafts"), [(2, 5, 9), (3, 3, 20), (4, 1, 3)])
def test_drafts_form_a_tree_whose_parents_come_first(
    topk: int, depth: int, num_drafts: int, are_sure: bool
) -> None:
    growth = grown(5, num_rows=6, topk=topk, depth=depth, are_sure=are_sure)
    drafts = growth.best(num_drafts)
    for tokens, parents in zip(drafts.tokens.tolist(), _parents(drafts), strict=True):
        assert len({*tokens}) == num_drafts
        assert all(parent < number for number, parent in enumerate(parents, 1))
        nodes = [0, *tokens]
        # Nodes are numbered as they are made, so the first level has the numbers up to topk.
        follows_root = [nodes[parent] == 0 for parent in parents]
        assert follows_root == [token <= topk for token in tokens]


def test_one_branch_is_a_chain() -> None:
    drafts = grown(7, num_rows=2, topk=1, depth=4).best(4)
    assert drafts.tokens.tolist() == [[1, 2, 3, 4]] * 2
    assert _parents(drafts) == [[0, 1, 2, 3]] * 2


def test_fewer_drafts_are_the_better_part_of_the_same_tree() -> None:
    growth = grown(3, num_rows=4, topk=3, depth=3)
    few, many = growth.best(5).tokens, growth.best(11).tokens
    assert all({*a} < {*b} for a, b in zip(few.tolist(), many.tolist(), strict=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"topk": 3}, TreeSize(4, 3, 15)),
        ({"topk": 2, "num_steps": 1}, TreeSize(1, 2, 2)),
        ({"topk": 8, "num_steps": 6}, TreeSize(6, 8, 39)),
        ({"topk": 2, "num_steps": 3, "num_draft_tokens": 4}, TreeSize(3, 2, 3)),
        ({"topk": 2, "num_steps": 2, "num_draft_tokens": 8}, "has 7 nodes"),
        ({"topk": 4, "num_steps": 4, "num_draft_tokens": 11}, "takes KV slots for 12 tokens"),
        ({"topk": 16, "num_steps": 6}, "takes KV slots for 80 tokens"),
    ],
)
def test_the_size_of_a_tree_fits_its_kv_slots(
    options: dict[str, int], expected: TreeSize | str
) -> None:
    made = SpecOptions("EAGLE", **options)  # type: ignore[arg-type]  # fields of one type
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            tree_size(made)
        return
    assert tree_size(made) == expected
    for num_drafts in range(1, expected.num_drafts + 1):
        depth, topk = expected.depth_within(num_drafts), expected.topk
        assert topk * (depth - 1) <= num_drafts + 1
        assert topk + (depth - 1) * topk * topk >= num_drafts


def _parents(drafts: Drafts) -> list[list[int]]:
    assert drafts.parents is not None
    return [[int(parent) for parent in row] for row in drafts.parents]
