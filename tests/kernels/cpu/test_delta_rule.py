"""The recurrence of Gated DeltaNet: any number of tokens at once gives what one at a time gives,
and the CPU's kernel gives what torch gives.
"""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.cpu.delta_rule import advance_rows, compile_advance_rows, fits_blocks
from aserve_kernels.delta_rule import DeltaRows, DeltaStates, DeltaTokens, advance_rows_ref, runs_of
from tests.kernels.delta_case import assert_states_equal, draw_case, rows_of

PLACES = [1, 4]
LENS = [[1], [1, 1, 1], [5, 1, 130, 2], [3, 3, 1, 1], [64, 65]]


@pytest.mark.parametrize("num_places", PLACES)
@pytest.mark.parametrize("lens", LENS)
def test_chunks_give_what_one_token_at_a_time_gives(lens: list[int], num_places: int) -> None:
    tokens, rows, states = made = draw_case(lens, torch.float64, num_places=num_places)
    whole = made.copied()
    out = advance_rows_ref(tokens, rows, whole)
    for index, query_len in enumerate(lens):
        first = int(rows.cu_query_lens[index])
        for place in range(first, first + query_len):
            kv_len = rows.kv_lens[index : index + 1] + (place - first)
            parts = (tokens.channels, tokens.log_decay, tokens.rate)
            x, log_decay, rate = (part[place : place + 1] for part in parts)
            one = rows_of(rows.rows[index : index + 1], kv_len, torch.tensor([1]))
            own = advance_rows_ref(DeltaTokens(x, tokens.conv, log_decay, rate), one, states)
            torch.testing.assert_close(out[place], own[0], atol=1e-9, rtol=1e-7)
    assert_states_equal(whole, states)


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


def test_a_forward_begins_behind_any_token_of_the_last_one() -> None:
    """As after a verification that rejected some drafts: rows kept their states before these."""
    tokens, rows, states = made = draw_case([4, 4], torch.float64, num_places=4)
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
    return DeltaTokens(x, tokens.conv, log_decay, rate), own


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
