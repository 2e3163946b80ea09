"""What each family makes of configurations as they are published, in the older dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.layers.rope_scaling import DefaultRope, LinearRope, Llama3Rope, LongRope
from aserve.gpu.models.base import HiddenCapture
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import parse_config
from aserve.gpu.models.decoder_spec import NORMS_AFTER, NORMS_AROUND, NORMS_BEFORE, DecoderSpec
from aserve.gpu.models.registry import FAMILIES, DecoderFamily
from tests.gpu.weights.checkpoints import llama_weights, write_checkpoint
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
}


def spec_of(architecture: str, **published: object) -> DecoderSpec:
    name = f"{architecture}ForCausalLM"
    values = {**SIZES, "architectures": [name], "num_hidden_layers": 12, **published}
    family = FAMILIES[name]
    assert isinstance(family, DecoderFamily)
    return family.spec(parse_config(Fields(values, source="config"), defaults=family.defaults))


def test_llama_3_has_no_windows_and_stretched_positions() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    spec = spec_of("Llama", rope_theta=500_000.0, rope_scaling=llama3, rms_norm_eps=1e-5)
    assert spec.windows == (None,) * 12
    assert spec.config.rope == Llama3Rope(500_000.0, 8.0, 8192, 1.0, 4.0)
    assert spec.norms == NORMS_BEFORE


def test_mistral_slides_unless_its_window_is_null() -> None:
    assert spec_of("Mistral", sliding_window=1024).windows == (1024,) * 12
    assert spec_of("Mistral", sliding_window=None).windows == (None,) * 12
    assert spec_of("Mistral").windows == (4096,) * 12


@pytest.mark.parametrize("architecture", ["Qwen2", "Qwen3"])
def test_qwen_slides_only_where_it_is_switched_on(architecture: str) -> None:
    published = {"sliding_window": 32_768, "max_window_layers": 8}
    off = spec_of(architecture, **published, use_sliding_window=False)
    on = spec_of(architecture, **published, use_sliding_window=True)
    assert off.windows == (None,) * 12
    assert on.windows == (None,) * 8 + (32_768,) * 4
    assert (on.biases.qkv, on.biases.attention_out) == (architecture == "Qwen2", False)
    assert (on.qk_norm is None) == (architecture == "Qwen2")


def test_gemma_2_caps_scales_and_alternates_without_being_told_to() -> None:
    spec = spec_of("Gemma2", query_pre_attn_scalar=224)
    assert spec.windows == (4096, None) * 6
    assert (spec.attention_softcap, spec.logit_softcap) == (50.0, 30.0)
    assert spec.attention_scale == 224**-0.5
    assert (spec.norms, spec.norm_offset) == (NORMS_AROUND, 1.0)
    assert (spec.config.tie_word_embeddings, spec.config.head_dim) == (True, 256)
    assert spec.config.activation == "gelu_pytorch_tanh"
    uncapped = spec_of("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_softcap, uncapped.logit_softcap) == (None, None)


def test_gemma_3_turns_its_sliding_layers_at_their_own_rate() -> None:
    linear = {"factor": 8.0, "rope_type": "linear"}
    spec = spec_of("Gemma3", sliding_window=512, rope_scaling=linear)
    assert spec.windows == ((512,) * 5 + (None,)) * 2
    assert spec.config.rope == LinearRope(1e6, 8.0)
    assert spec.config.sliding_rope == DefaultRope(1e4)
    assert spec.qk_norm is not None
    assert (spec.attention_softcap, spec.logit_softcap) == (None, None)


def test_gemma_3_with_caps_on_scores_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping is 50\.0; expected null"):
        spec_of("Gemma3", attn_logit_softcapping=50.0)


def test_phi_3_turns_a_part_of_each_head() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 9, "long_factor": [2.0] * 9}
    spec = spec_of("Phi3", partial_rotary_factor=0.75, rope_scaling=scaling, sliding_window=None)
    assert (spec.config.head_dim, spec.config.rotary_dim) == (24, 18)
    assert isinstance(spec.config.rope, LongRope)
    assert spec.config.rope.original_len == 4096
    assert spec.config.rope.attention_factor == pytest.approx(1.190238)
    assert spec.windows == (None,) * 12
    assert spec.has_joined_weights


def test_granite_has_multipliers_of_its_own() -> None:
    scales = {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0}
    spec = spec_of("Granite", **scales, logits_scaling=16.0, residual_multiplier=0.22)
    assert (spec.attention_scale, spec.embedding_scale.factor) == (0.0078125, 12.0)
    assert (spec.residual_scale, spec.logit_divisor) == (0.22, 16.0)


def test_olmo_2_norms_after_its_sublayers_and_all_heads_together() -> None:
    spec = spec_of("Olmo2")
    assert spec.norms == NORMS_AFTER
    assert spec.qk_norm is not None
    assert spec.qk_norm.is_joint


def test_a_family_that_turns_whole_heads_refuses_parts(tmp_path: Path) -> None:
    parts = {"head_dim": 8, "partial_rotary_factor": 0.5}
    directory = write_checkpoint(tmp_path, llama_weights(), **parts)
    with pytest.raises(ConfigError, match="rotates 4 of 8 elements of a head; Llama"):
        load_model(directory)


def test_gemma_rounds_the_scale_of_its_embeddings_as_the_reference_does(tmp_path: Path) -> None:
    """The square root of 8 is 2.828125 in bfloat16. Sublayers that add nothing leave it visible."""
    weights = llama_weights()
    del weights["lm_head.weight"]
    for index in range(2):
        prefix = f"model.layers.{index}"
        weights[f"{prefix}.self_attn.o_proj.weight"].zero_()
        weights[f"{prefix}.mlp.down_proj.weight"].zero_()
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.zeros(8)
    directory = write_checkpoint(
        tmp_path, weights, architectures=["Gemma2ForCausalLM"], head_dim=4, tie_word_embeddings=True
    )
    model = load_model(directory, dtype="bfloat16")
    capture = HiddenCapture(wants_before_norm=True)
    model.forward(torch.arange(16), torch.arange(16), DenseAttend(), capture=capture)
    rows = weights["model.embed_tokens.weight"][:16].to(torch.bfloat16)
    assert capture.before_norm is not None
    assert torch.equal(capture.before_norm, rows * torch.tensor(8**0.5, dtype=torch.bfloat16))
    assert not torch.equal(capture.before_norm, rows * 8**0.5)
