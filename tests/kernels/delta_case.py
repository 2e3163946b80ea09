"""Rows, tokens and states of Gated DeltaNet's and Mamba-2's recurrences, for tests of their
kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aserve_kernels.delta_rule import DeltaRows, DeltaStates, DeltaTokens, StateSpace

MAX_ROWS = 8


class DeltaCase(NamedTuple):
    tokens: DeltaTokens
    rows: DeltaRows
    states: DeltaStates

    def copied(self) -> DeltaStates:
        return DeltaStates(self.states.matrices.clone(), self.states.inputs.clone())


def draw_case(
    lens: Sequence[int],
    dtype: torch.dtype,
    *,
    width: int = 4,
    value_dim: int = 64,
    num_places: int = 1,
    is_space: bool = False,
) -> DeltaCase:
    """Every other row goes on, and the others begin, with NaN of a former owner."""
    torch.manual_seed(len(lens))
    num_keys, num_heads, key_dim = 2, 6, 8
    num_channels, num_tokens = 2 * num_keys * key_dim + num_heads * value_dim, sum(lens)
    wide = torch.promote_types(dtype, torch.float32)
    tokens = DeltaTokens(
        torch.randn(num_tokens, num_channels).to(dtype),
        torch.randn(num_channels, width).to(dtype),
        -3 * torch.rand(num_tokens, num_heads, dtype=wide),
        torch.rand(num_tokens, num_heads).to(dtype),
        _space(num_channels, num_heads, wide) if is_space else None,
    )
    states = DeltaStates(
        torch.randn(MAX_ROWS + 1, num_places, num_heads, key_dim, value_dim, dtype=wide),
        torch.randn(MAX_ROWS + 1, num_places + width - 1, num_channels).to(dtype),
    )
    kv_lens = torch.arange(len(lens)) % 2 * 9
    rows = rows_of(1 + torch.randperm(MAX_ROWS)[: len(lens)], kv_lens, torch.tensor(lens))
    for table in (states.matrices, states.inputs):
        table[rows.rows[kv_lens == 0]] = torch.nan
    return DeltaCase(tokens, rows, states)


def _space(num_channels: int, num_heads: int, dtype: torch.dtype) -> StateSpace:
    return StateSpace(torch.randn(num_channels, dtype=dtype), torch.randn(num_heads, dtype=dtype))


def rows_of(rows: Tensor, kv_lens: Tensor, query_lens: Tensor) -> DeltaRows:
    ends = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0))
    places = torch.arange(len(rows)).repeat_interleave(query_lens)
    return DeltaRows(rows, kv_lens, query_lens, ends, places, query_lens.int().numpy())


def assert_states_equal(got: DeltaStates, expected: DeltaStates) -> None:
    """And other rows and places are as they were, NaN included."""
    close = functools.partial(torch.testing.assert_close, equal_nan=True)
    close(got.matrices, expected.matrices, atol=1e-5, rtol=1e-4)
    close(got.inputs, expected.inputs, atol=0.0, rtol=0.0)
