"""The kernel of latents in Triton's interpreter, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import pytest
import torch
from torch import Tensor

from aserve_kernels.latent_decode import TokenTrees, latent_decode, latent_decode_ref
from aserve_kernels.paged_rows import PagedRows, Scoring, attend_ref
from aserve_kernels.paged_tiles import Chip, KvSplits
from tests.kernels.paged_case import TOLERANCES, Case, Inputs, make_inputs

ROWS = ((1, 1), (1, 31), (1, 200), (1, 129), (1, 3))
ONE_SPLIT = KvSplits(Chip(num_sms=1))


class Op(Protocol):
    def __call__(
        self, q: Tensor, latents: Tensor, paged: PagedRows, scoring: Scoring, *,
        out: Tensor, splits: KvSplits,
    ) -> None: ...  # fmt: skip


def run(op: Op, given: Inputs, case: Case, value_dim: int) -> Tensor:
    out = torch.full((*given.q.shape[:2], value_dim), torch.nan, dtype=given.q.dtype)
    op(given.q, given.keys, given.paged, case.scoring, out=out, splits=case.splits)
    return out


@pytest.mark.parametrize(
    ("case", "value_dim"),
    [
        (Case(ROWS, (5, 1), 40), 32),
        (Case(ROWS, (1, 1), 24, page_size=1), 16),
        (Case(ROWS, (40, 1), 40, splits=ONE_SPLIT), 20),
        (Case(ROWS[:3], (16, 1), 576, dtype=torch.bfloat16), 512),
        (Case(ROWS, (5, 1), 40, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn), 32),
        (Case(ROWS, (5, 1), 40, scoring=Scoring(2.0, softcap=3.0)), 32),
        (Case((), (5, 1), 40), 32),
    ],
)
def test_latents_of_every_shape_equal_the_reference(case: Case, value_dim: int) -> None:
    if case.kv_dtype is not None:
        case = replace(case, scoring=Scoring(0.3, key_scale=0.5, value_scale=0.5))
    given = make_inputs(case)
    wide = replace(given, q=given.q.float())
    got = run(latent_decode, given, case, value_dim).float()
    expected = run(latent_decode_ref, wide, case, value_dim)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_with_a_fixed_split_a_token_gets_the_same_bits_beside_any_others() -> None:
    case = Case(ROWS, (5, 1), 40, splits=KvSplits(fixed_split=64))
    given = make_inputs(case)
    together = run(latent_decode, given, case, 32)
    for row in range(len(ROWS)):
        alone = given.alone(row, slice(row, row + 1))
        assert torch.equal(run(latent_decode, alone, case, 32)[0], together[row])


@pytest.mark.parametrize(
    ("rows", "softcap", "page_size"), [([(7, 130), (3, 3)], None, 1), ([(45, 65)], 3.0, 16)]
)
def test_a_node_of_a_draft_tree_sees_its_ancestors_only(
    rows: list[tuple[int, int]], softcap: float | None, page_size: int
) -> None:
    """Some tiles have no key that a node sees. The reference is the trees' of other kernels."""
    scoring = Scoring(0.3, softcap=softcap)
    case = Case(
        tuple(rows), (5, 1), 40, page_size=page_size, has_trees=True, scoring=scoring,
        splits=KvSplits(min_split=32),
    )  # fmt: skip
    given = make_inputs(case)
    tree, query_lens = given.paged.tree, given.paged.cu_query_lens.diff()
    assert tree is not None
    owners = torch.arange(len(rows)).repeat_interleave(query_lens)
    prefix_lens = (given.paged.lens - query_lens)[owners]
    numbers = torch.arange(len(owners))
    lens = prefix_lens + numbers - given.paged.cu_query_lens[owners] + 1
    by_token = replace(
        given.paged, rows=given.paged.rows[owners], lens=lens, tree=None,
        cu_query_lens=torch.arange(len(owners) + 1),
    )  # fmt: skip
    expected = torch.empty(len(owners), 5, 32)
    values = given.keys[..., :32]
    attend_ref(given.q, given.keys, values, given.paged, scoring, out=expected, takes=bool)
    trees = TokenTrees(tree.seen, prefix_lens)
    for op in (latent_decode, latent_decode_ref):
        out = torch.full_like(expected, torch.nan)
        op(given.q, given.keys, by_token, scoring, out=out, splits=case.splits, trees=trees)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
