"""RoPE on one axis and on several, and its frequencies, against those of transformers."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from aserve.gpu.layers.rope import RopeInputs, Rotary, apply_rope
from aserve.gpu.layers.rope_scaling import DefaultRope, Rope, attention_factor, inverse_frequencies
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import FULL
from aserve.gpu.models.config.rope import parse_rope

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


def test_half_types_have_the_table_of_float32_rounded_once() -> None:
    exact = rotary(dtype=torch.float32).table
    assert torch.equal(rotary(dtype=torch.bfloat16).table, exact.to(torch.bfloat16))


def test_a_table_made_in_slices_is_the_one_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rotary().table
    monkeypatch.setattr("aserve.gpu.layers.rope.SLICE", 100)
    assert torch.equal(rotary().table, whole)


def test_a_position_beyond_max_model_len_is_an_error() -> None:
    with pytest.raises(IndexError):
        rotary(max_model_len=16).at(torch.tensor([16]))


def axes_rotary() -> Rotary:
    """Of four pairs, the first uses the first axis, two the second, and one the third."""
    return Rotary(
        PLAIN, HEAD_DIM, max_model_len=512, dtype=torch.float64, device=CPU, pair_axes=(0, 1, 1, 2)
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


ROTARY_DIM = 16
MAX_POSITIONS = 4096
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256}
SHORT = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]}
LONG = {"long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 12.0, 14.0, 16.0]}

KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e6},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5},
    YARN,
    {**YARN, "rope_theta": 1e6, "truncate": False},
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
    {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8},
    {**YARN, "factor": 1.0},
    {"rope_type": "yarn", "factor": 2.0},
    {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 512},
    {**LLAMA3, "factor": 32.0, "high_freq_factor": 16.0, "rope_theta": 5e5},
    {"rope_type": "longrope", **SHORT, **LONG, "original_max_position_embeddings": 256},
    {"rope_type": "longrope", **SHORT, **LONG, "factor": 8.0, "attention_factor": 1.2},
]


@pytest.mark.slow  # the first import of transformers takes its time
@pytest.mark.parametrize("max_model_len", [100, 256, 257, 4096, 4097, 9000])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["rope_type"])
def test_frequencies_equal_the_references(kind: dict[str, Any], max_model_len: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        head_dim=ROTARY_DIM, max_position_embeddings=MAX_POSITIONS, rope_parameters=dict(kind)
    )
    formula = ROPE_INIT_FUNCTIONS[kind["rope_type"]]
    expected, expected_factor = formula(config, seq_len=max_model_len)
    rope = parse_rope(
        Fields({"rope_parameters": kind}, source="config"),
        FULL,
        rotary_dim=ROTARY_DIM,
        max_position_embeddings=MAX_POSITIONS,
    )
    for dtype in (torch.float32, torch.float64):
        found = inverse_frequencies(rope, ROTARY_DIM, max_model_len=max_model_len, dtype=dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=0.0, rtol=2e-6)
    assert attention_factor(rope) == pytest.approx(expected_factor)
