"""What a rotation must keep and must show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aserve.gpu.layers.rope import RopeInputs, Rotary, apply_rope
from aserve.gpu.layers.rope_scaling import DefaultRope, YarnRope

CPU = torch.device("cpu")
HEAD_DIM = 8


def rotary(*, dtype: torch.dtype = torch.float64, max_model_len: int = 512) -> Rotary:
    return Rotary(
        DefaultRope(100.0), HEAD_DIM, max_model_len=max_model_len, dtype=dtype, device=CPU
    )


def heads(num_tokens: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_tokens, 3, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype)


def rotated_heads(x: Tensor, table: Rotary, positions: Tensor) -> Tensor:
    return apply_rope(x, RopeInputs(table.at(positions)))


def test_each_pair_of_halves_turns_by_position_times_frequency() -> None:
    positions = torch.tensor([0, 3, 511])
    x = heads(3)
    rotated = rotated_heads(x, rotary(), positions)
    frequencies = 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    cos_sin = torch.polar(
        torch.ones(3, 4, dtype=torch.float64), torch.outer(positions, frequencies)
    )
    expected = torch.complex(x[..., :4], x[..., 4:]) * cos_sin.unsqueeze(1)
    torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), -1))


def test_what_lies_behind_the_rotary_part_of_a_head_stays() -> None:
    table, positions = rotary(), torch.tensor([0, 3, 511])
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(3, 2, HEAD_DIM + 4, generator=generator, dtype=torch.float64)
    rotated = rotated_heads(x, table, positions)
    assert torch.equal(rotated[..., HEAD_DIM:], x[..., HEAD_DIM:])
    torch.testing.assert_close(
        rotated[..., :HEAD_DIM], rotated_heads(x[..., :HEAD_DIM], table, positions)
    )


def test_scores_depend_on_the_distance_alone() -> None:
    table = rotary()
    q, k = heads(2)[:1], heads(2)[1:]
    scores = [
        (
            rotated_heads(q, table, torch.tensor([start + 9]))
            * rotated_heads(k, table, torch.tensor([start]))
        ).sum(-1)
        for start in (0, 1, 200, 502)
    ]
    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0])


def test_an_input_is_not_changed_and_may_have_any_strides() -> None:
    joined = heads(4)
    before = joined.clone()
    part = joined[:, 1:]
    rotated = rotated_heads(part, rotary(), torch.arange(4))
    assert torch.equal(joined, before)
    assert torch.equal(rotated, rotated_heads(part.contiguous(), rotary(), torch.arange(4)))


def test_half_types_have_the_table_of_float32_rounded_once() -> None:
    exact = rotary(dtype=torch.float32).table
    assert torch.equal(rotary(dtype=torch.bfloat16).table, exact.to(torch.bfloat16))


def test_float64_is_exact_far_out() -> None:
    angles = torch.arange(512, dtype=torch.float64).unsqueeze(1) * (
        100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    )
    torch.testing.assert_close(rotary().table[:, :4], angles.cos(), atol=1e-12, rtol=0.0)


def test_the_temperature_of_a_stretched_context_scales_the_heads() -> None:
    rope = YarnRope(100.0, 1.0, 64, attention_factor=1.5)
    scaled = Rotary(rope, HEAD_DIM, max_model_len=8, dtype=torch.float64, device=CPU)
    plain = rotary(max_model_len=8)
    positions = torch.arange(8)
    torch.testing.assert_close(
        rotated_heads(heads(8), scaled, positions),
        1.5 * rotated_heads(heads(8), plain, positions),
        atol=1e-9,
        rtol=0.0,
    )


def test_a_position_beyond_max_model_len_is_an_error() -> None:
    with pytest.raises(IndexError):
        rotary(max_model_len=16).at(torch.tensor([16]))
