"""RoPE frequencies against those of transformers, and what they may depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aserve.gpu.layers.rope_scaling import attention_factor, inverse_frequencies
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import FULL
from aserve.gpu.models.config.rope import parse_rope

pytestmark = pytest.mark.slow  # the first import of transformers takes its time

HEAD_DIM = 16
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


@pytest.mark.parametrize("max_model_len", [100, 256, 257, 4096, 4097, 9000])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["rope_type"])
def test_frequencies_equal_the_references(kind: dict[str, Any], max_model_len: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITIONS, rope_parameters=dict(kind)
    )
    formula = ROPE_INIT_FUNCTIONS[kind["rope_type"]]
    expected, expected_factor = formula(config, seq_len=max_model_len)
    rope = parse_rope(
        Fields({"rope_parameters": kind}, source="config"),
        FULL,
        rotary_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
    )
    for dtype in (torch.float32, torch.float64):
        found = inverse_frequencies(rope, HEAD_DIM, max_model_len=max_model_len, dtype=dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=0.0, rtol=2e-6)
    assert attention_factor(rope) == pytest.approx(expected_factor)
