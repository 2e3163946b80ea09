"""The Triton kernels of Gated DeltaNet's and Mamba-2's recurrences give what torch gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aserve_kernels.delta_rule import advance_rows_ref
from aserve_kernels.delta_step import advance_rows
from tests.kernels.delta_case import assert_states_equal, draw_case


@pytest.mark.parametrize("is_space", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "value_dim"), [(2, 64), (4, 64), (4, 20)])
@pytest.mark.parametrize(
    ("lens", "num_places"), [([1], 1), ([1, 1, 1, 1, 1], 1), ([1, 1], 4), ([4, 1, 3, 2], 4)]
)
def test_few_tokens_of_each_row_advance_its_state(
    lens: list[int], num_places: int, width: int, value_dim: int, dtype: torch.dtype, is_space: bool
) -> None:
    """The channels are a part of a joined projection."""
    sizes = {"width": width, "value_dim": value_dim, "num_places": num_places}
    drawn = draw_case(lens, dtype, **sizes, is_space=is_space)
    given, rows, states = drawn
    joined = torch.cat((given.channels, torch.full_like(given.channels, torch.nan)), dim=1)
    channels = joined[:, : given.channels.shape[1]]
    tokens = replace(given, channels=channels)
    expected = drawn.copied()
    out = advance_rows(tokens, rows, states)
    torch.testing.assert_close(out, advance_rows_ref(given, rows, expected), atol=1e-5, rtol=1e-4)
    assert_states_equal(states, expected)


def test_rows_with_more_tokens_than_places_go_to_torch() -> None:
    tokens, rows, states = drawn = draw_case([1, 3], torch.float32, num_places=2)
    expected = drawn.copied()
    out = advance_rows(tokens, rows, states)
    assert torch.equal(out, advance_rows_ref(tokens, rows, expected))
    assert_states_equal(states, expected)
