"""The CPU's kernel for latents: latents of every width, over more keys than a tile has."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve_kernels.cpu import latent_attention as op
from aserve_kernels.cpu.host_rows import QueryRows
from aserve_kernels.cpu.paged_attention import paged_attention_ref
from aserve_kernels.paged_rows import Scoring
from tests.kernels.cpu.rows_case import TOLERANCES, Case, make

ROWS = ((1, 1), (3, 64), (1, 65), (40, 150))


def attended(case: Case, value_dim: int, scoring: Scoring, *, num_workers: int = 1) -> Tensor:
    out = torch.full((*case.q.shape[:2], value_dim), torch.nan, dtype=case.q.dtype)
    op.latent_attention(
        case.q, case.keys, case.keys[..., :value_dim], case.rows, scoring,
        out=out, num_workers=num_workers,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "value_dim"), [(1, 8, 1), (3, 40, 32), (16, 24, 24), (40, 576, 512)]
)
def test_latents_of_every_width_equal_the_reference(
    num_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype, num_workers: int
) -> None:
    op.compile_latent_attention(dtype, num_workers)
    case = make(ROWS, heads=(num_heads, 1), head_dim=head_dim, dtype=dtype)
    scoring = Scoring(0.3 / head_dim**0.5, 90)
    got = attended(case, value_dim, scoring, num_workers=num_workers)
    q, keys = case.q.float(), case.keys.float()
    expected = Case(q, keys, keys, case.rows).attended(paged_attention_ref, scoring)
    step = TOLERANCES[dtype]
    torch.testing.assert_close(got.float(), expected[..., :value_dim], rtol=step, atol=step)


@pytest.mark.parametrize("window", [None, 30])
def test_a_query_gets_the_same_bits_in_whatever_step_it_is(window: int | None) -> None:
    """In a whole prefill, in chunks, and in decode steps."""
    case = make(((200, 200),), heads=(3, 1), head_dim=40, dtype=torch.float32)
    op.compile_latent_attention(torch.float32, 1)
    whole = attended(case, 32, Scoring(0.3, window))
    for start, end in itertools.pairwise([0, 1, 7, 64, 150, 199, 200]):
        own = QueryRows(*(np.array([value]) for value in (0, end, start, end - start)))
        part = dataclasses.replace(case, rows=dataclasses.replace(case.rows, queries=own))
        got = attended(part, 32, Scoring(0.3, window))[start:end]
        assert torch.equal(got, whole[start:end])
