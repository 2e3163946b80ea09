"""RoPE against its formula, on one axis and on several."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from aserve.gpu.layers.rope import RopeInputs, Rotary, apply_rope
from aserve.gpu.layers.rope_scaling import DefaultRope, Rope, YarnRope

CPU = torch.device("cpu")
HEAD_DIM = 8
PLAIN = DefaultRope(100.0)


def rotary(
    rope: Rope = PLAIN, *, dtype: torch.dtype = torch.float64, max_model_len: int = 512
) -> Rotary:
    return Rotary(rope, HEAD_DIM, max_model_len=max_model_len, dtype=dtype, device=CPU)


def heads(num_tokens: int, head_dim: int = HEAD_DIM) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_tokens, 3, head_dim, generator=generator, dtype=torch.float64)


def rotated_heads(x: Tensor, table: Rotary, positions: Tensor) -> Tensor:
    return apply_rope(x, RopeInputs(table.at(positions)))


def test_each_pair_of_halves_turns_by_position_times_frequency() -> None:
    positions = torch.tensor([0, 3, 511])
    x = heads(3)
    rotated = rotated_heads(x, rotary(), positions)
    frequencies = 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    angles = torch.outer(positions, frequencies)
    cos_sin = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(x[..., :4], x[..., 4:]) * cos_sin.unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-12)


def test_what_lies_behind_the_rotary_part_of_a_head_stays() -> None:
    table, positions = rotary(), torch.tensor([0, 3, 511])
    x = heads(3, HEAD_DIM + 4)
    rotated = rotated_heads(x, table, positions)
    assert torch.equal(rotated[..., HEAD_DIM:], x[..., HEAD_DIM:])
    torch.testing.assert_close(
        rotated[..., :HEAD_DIM], rotated_heads(x[..., :HEAD_DIM], table, positions)
    )


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


def test_the_temperature_of_a_stretched_context_scales_the_heads() -> None:
    scaled = rotary(YarnRope(100.0, 1.0, 64, attention_factor=1.5))
    got, plain = (rotated_heads(heads(8), each, torch.arange(8)) for each in (scaled, rotary()))
    torch.testing.assert_close(got, 1.5 * plain, atol=1e-9, rtol=0.0)


def test_a_position_beyond_max_model_len_is_an_error() -> None:
    with pytest.raises(IndexError):
        rotary(max_model_len=16).at(torch.tensor([16]))


def axes_rotary() -> Rotary:
    """Of four pairs, the first uses the first axis, two the second, and one the third."""
    return Rotary(
        PLAIN, HEAD_DIM, max_model_len=512, dtype=torch.float64, device=CPU, sections=(1, 2, 1)
    )


def test_equal_positions_on_all_axes_turn_as_one_axis_does() -> None:
    positions = torch.tensor([0, 3, 511])
    on_one_axis = rotated_heads(heads(3), rotary(), positions)
    for given in (positions, positions.expand(3, -1)):
        assert torch.equal(rotated_heads(heads(3), axes_rotary(), given), on_one_axis)


def test_sections_are_those_of_qwen2_vl() -> None:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 2, 1]}
    sizes = {"hidden_size": HEAD_DIM, "num_attention_heads": 1, "rope_parameters": rope}
    config = cast(Qwen2VLConfig, Qwen2VLConfig(text_config=sizes).text_config)
    positions = torch.tensor([[0, 7, 300], [5, 7, 2], [511, 7, 40]])
    cos, sin = Qwen2VLRotaryEmbedding(config)(heads(3), positions[:, None])
    half = HEAD_DIM // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    torch.testing.assert_close(axes_rotary().at(positions), expected, atol=1e-4, rtol=0.0)
