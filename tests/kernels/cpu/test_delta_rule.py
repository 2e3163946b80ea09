"""The recurrences of Gated DeltaNet and Mamba-2: any number of tokens at once gives what one at a
time gives, and the CPU's kernels give what torch gives.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aserve_kernels.cpu.delta_rule import advance_rows, compile_advance_rows, fits_blocks
from aserve_kernels.cpu.state_space import advance_spaces, compile_advance_spaces
from aserve_kernels.delta_rule import DeltaRows, DeltaStates, DeltaTokens, advance_rows_ref, runs_of
from tests.kernels.delta_case import assert_states_equal, draw_case, rows_of

PLACES = [1, 4]
LENS = [[1], [1, 1, 1], [5, 1, 130, 2], [3, 3, 1, 1], [64, 65]]


@pytest.mark.parametrize("is_space", [False, True])
@pytest.mark.parametrize("num_places", PLACES)
@pytest.mark.parametrize("lens", LENS)
def test_chunks_give_what_one_token_at_a_time_gives(
    lens: list[int], num_places: int, is_space: bool
) -> None:
    made = draw_case(lens, torch.float64, num_places=num_places, is_space=is_space)
    tokens, rows, states = made
    whole = made.copied()
    out = advance_rows_ref(tokens, rows, whole)
    for index, query_len in enumerate(lens):
        first = int(rows.cu_query_lens[index])
        for place in range(first, first + query_len):
            kv_len = rows.kv_lens[index : index + 1] + (place - first)
            parts = (tokens.channels, tokens.log_decay, tokens.rate)
            x, log_decay, rate = (part[place : place + 1] for part in parts)
            one = rows_of(rows.rows[index : index + 1], kv_len, torch.tensor([1]))
            token = replace(tokens, channels=x, log_decay=log_decay, rate=rate)
            own = advance_rows_ref(token, one, states)
            torch.testing.assert_close(out[place], own[0], atol=1e-9, rtol=1e-7)
    assert_states_equal(whole, states)


def test_a_state_space_follows_its_formula() -> None:
    """By the formula of one token and head: a row without KV, whose conv sees one input."""
    tokens, rows, states = draw_case([1], torch.float64, is_space=True)
    space, num_heads, key_dim, value_dim = tokens.space, *states.matrices.shape[2:]
    assert space is not None
    mixed = torch.nn.functional.silu(tokens.channels[0] * tokens.conv[:, -1] + space.bias)
    sizes = (num_heads * value_dim, 2 * key_dim, 2 * key_dim)
    x, b, c = mixed.split(sizes)
    for head in range(num_heads):
        own, group = x[head * value_dim :][:value_dim], slice(head // 3 * 8, head // 3 * 8 + 8)
        state = torch.outer(b[group], tokens.rate[0, head] * own)
        expected = c[group] @ state + space.skip[head] * own
        out = advance_rows_ref(tokens, rows, states)[0, head]
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("num_places", PLACES)
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lens", LENS)
def test_the_kernel_of_state_spaces_gives_what_torch_gives(
    lens: list[int], width: int, dtype: torch.dtype, num_workers: int, num_places: int
) -> None:
    compile_advance_spaces(dtype, num_workers)
    made = draw_case(lens, dtype, width=width, num_places=num_places, is_space=True)
    tokens, rows, states = made
    assert tokens.space is not None
    expected = made.copied()
    out = advance_spaces(tokens, tokens.space, rows, states, num_workers)
    torch.testing.assert_close(out, advance_rows_ref(tokens, rows, expected), atol=1e-4, rtol=1e-4)
    assert_states_equal(states, expected)


@pytest.mark.parametrize("num_places", PLACES)
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lens", LENS)
def test_the_kernel_gives_what_torch_gives(
    lens: list[int], width: int, dtype: torch.dtype, num_workers: int, num_places: int
) -> None:
    compile_advance_rows(dtype, num_workers)
    tokens, rows, states = made = draw_case(lens, dtype, width=width, num_places=num_places)
    expected = made.copied()
    out = advance_rows(tokens, rows, states, num_workers=num_workers)
    torch.testing.assert_close(out, advance_rows_ref(tokens, rows, expected), atol=1e-4, rtol=1e-4)
    assert_states_equal(states, expected)


@pytest.mark.parametrize("is_space", [False, True])
def test_a_forward_begins_behind_any_token_of_the_last_one(is_space: bool) -> None:
    """As after a verification that rejected some drafts: rows kept their states before these."""
    made = draw_case([4, 4], torch.float64, num_places=4, is_space=is_space)
    tokens, rows, states = made
    plain = made.copied()
    advance_rows_ref(tokens, rows, states)
    for num_kept in (3, 2, 1):
        kept = _last_tokens(tokens, rows, 0, num_kept)
        expected = DeltaStates(plain.matrices.clone(), plain.inputs.clone())
        advance_rows_ref(*kept, expected)
        rest = _last_tokens(tokens, rows, num_kept, 4)
        out = advance_rows_ref(*rest, expected)
        torch.testing.assert_close(out, advance_rows_ref(*rest, states), atol=1e-9, rtol=1e-7)


def _last_tokens(
    tokens: DeltaTokens, rows: DeltaRows, first: int, stop: int
) -> tuple[DeltaTokens, DeltaRows]:
    """Returns some of the four tokens of each row."""
    parts = (tokens.channels, tokens.log_decay, tokens.rate)
    x, log_decay, rate = (part.unflatten(0, (-1, 4))[:, first:stop].flatten(0, 1) for part in parts)
    lens = torch.full_like(rows.query_lens, stop - first)
    own = rows_of(rows.rows, rows.kv_lens + first, lens)
    return replace(tokens, channels=x, log_decay=log_decay, rate=rate), own


def test_states_of_other_shapes_and_dtypes_stay_with_torch() -> None:
    assert fits_blocks(draw_case([1], torch.float32).states)
    assert not fits_blocks(draw_case([1], torch.float64).states)
    assert not fits_blocks(draw_case([1], torch.float32, value_dim=12).states)


def test_runs_join_neighbours_with_equally_many_tokens() -> None:
    runs = runs_of(torch.tensor([1, 1, 1, 5, 5, 1], dtype=torch.int32).numpy())
    rows = [(run.rows.start, run.rows.stop) for run in runs]
    tokens = [(run.tokens.start, run.tokens.stop) for run in runs]
    assert rows == [(0, 3), (3, 5), (5, 6)]
    assert tokens == [(0, 3), (3, 13), (13, 14)]
