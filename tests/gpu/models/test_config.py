"""config.json in both dialects, what each family makes of it, and everything that may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.layers.rope_scaling import DefaultRope, LinearRope, Llama3Rope, LongRope
from aserve.gpu.models.base import HiddenCapture
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import (
    FULL,
    SLIDING,
    Windows,
    one_window,
    periodic_windows,
    switched_windows,
)
from aserve.gpu.models.config.model import ModelConfig, parse_config, read_fields
from aserve.gpu.models.decoder_spec import NORMS_AROUND, DecoderSpec
from aserve.gpu.models.registry import FAMILIES, DecoderFamily
from tests.gpu.weights.checkpoints import llama_weights, write_checkpoint
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


LONGROPE = {"type": "longrope", "short_factor": [1] * 4, "long_factor": [2] * 4}


def parse(**changes: object) -> ModelConfig:
    return parse_file({**PLAIN, **changes})


def parse_file(values: dict[str, Any], **defaults: object) -> ModelConfig:
    return parse_config(Fields(values, source="config.json"), defaults=defaults)


def test_both_dialects_say_the_same() -> None:
    old = {**LLAMA3, "rope_type": "llama3"}
    older = parse(rope_theta=5e5, rope_scaling=old, torch_dtype="bfloat16")
    oldest = parse(
        rope_theta=5e5, rope_scaling={**LLAMA3, "type": "llama3"}, torch_dtype="bfloat16"
    )
    newer = parse(rope_parameters={**old, "rope_theta": 5e5}, dtype="bfloat16")
    assert older == oldest == newer
    assert newer.rope == Llama3Rope(5e5, 8.0, 16, 1.0, 4.0)
    assert newer.dtype == "bfloat16"


def test_a_nested_text_config_is_read_over_what_stands_beside_it() -> None:
    text = {key: value for key, value in PLAIN.items() if key != "architectures"}
    nested = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 9999,
        "tie_word_embeddings": True,
        "text_config": {**text, "tie_word_embeddings": None},
    }
    assert parse_file(nested) == parse(tie_word_embeddings=True)


def test_what_is_absent_has_the_families_defaults() -> None:
    config = parse(num_key_value_heads=None)
    assert config.num_kv_heads == 4
    assert config.head_dim == 8
    assert config.rope == DefaultRope(10_000.0)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False,) * 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "hidden_size is missing; expected an integer of at least 1"),
        ({"hidden_size": "32"}, "hidden_size is '32'; expected an integer"),
        ({"hidden_size": True}, "hidden_size is True; expected an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected an integer of at least 1"),
        ({"vocab_size": 10**30}, "expected an integer of at most 2147483647"),
        ({"rope_theta": 10**400}, "0...; expected a positive number"),
        ({"architectures": 5}, "architectures is 5; expected a list of strings"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5; expected a divisor of hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor of 4"),
        ({"head_dim": 7}, "head_dim is 7; expected an even number"),
        (
            {"head_dim": 2**30, "num_attention_heads": 2, "num_key_value_heads": 2},
            "num_attention_heads is 2; expected fewer heads of 1073741824 elements",
        ),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a positive number"),
        ({"attention_bias": "no"}, "attention_bias is 'no'; expected true or false"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2'; expected silu or gelu or"),
        ({"hidden_activation": "tanh"}, "hidden_activation is 'tanh'; expected silu or gelu or"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; expected"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'; expected float32 or"),
        ({"architectures": []}, "architectures is []; expected a list of one name"),
        ({"architectures": None}, "architectures is missing"),
        ({"text_config": 3}, "text_config is 3; expected an object"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        (
            {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
            "expected none, mxfp4, fp8 (E4M3), awq",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "dense"}},
            "in the formats pack-quantized of 4 bits or float-quantized",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size is [128]; expected two positive integers",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; expected at most 1.0"),
        ({"rotary_dim": 10}, "rotary_dim is 10; expected at most 8, the elements of a head"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor rotates 3 of 8 elements of"),
        (
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "full_attention: partial_rotary_factor is 0.5; expected 1.0",
        ),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling: type is 'mrope'; expected default"),
        ({"rope_theta": 1}, "config.json: rope_theta is 1; expected more than 1"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "rope_parameters: rope_theta is 0.5; expected"),
        (
            {"rope_local_base_freq": 0.5},
            "config.json: rope_local_base_freq is 0.5; expected more than 1",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "short_factor": [1]}},
            "rope_scaling: short_factor is [1]; expected none: factors for each frequency are",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": -1}}, "rope_scaling: factor is -1"),
        (
            {"rope_scaling": {**LLAMA3, "type": "llama3", "high_freq_factor": 1}},
            "high_freq_factor is 1; expected more than low_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, 2]}},
            "short_factor is [1, 2]; expected a list of 4 positive numbers",
        ),
        (
            {"rope_scaling": LONGROPE | {"factor": 2}, "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1; expected an integer of at least 2",
        ),
        *(
            (
                {"rope_scaling": {**LLAMA3, "type": kind, "factor": 1e306}},
                "rope_scaling: factor is 1e+306; expected at most 2147483647",
            )
            for kind in ("linear", "dynamic", "yarn", "llama3")
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_value(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert str(caught.value).startswith("config.json: ")
    assert complaint in str(caught.value)


def test_a_familys_defaults_count_where_a_name_is_absent_not_where_it_is_null() -> None:
    defaults = {"tie_word_embeddings": True, "head_dim": 16, "hidden_activation": "gelu"}
    config = parse_file({**PLAIN, "head_dim": None}, **defaults)
    assert (config.tie_word_embeddings, config.head_dim, config.activation) == (True, 8, "gelu")
    assert not parse_file({**PLAIN, "tie_word_embeddings": False}, **defaults).tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": None, "head_dim": None, "dtype": None, "attention_bias": None}, {}),
        ({"hidden_act": "gelu", "hidden_activation": "silu"}, {"hidden_act": "silu"}),
        ({"hidden_activation": "gelu"}, {"hidden_act": "gelu"}),
        (
            {"head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.75}},
            {"head_dim": 16, "partial_rotary_factor": 0.75},
        ),
        ({"head_dim": 16, "rotary_dim": 12}, {"head_dim": 16, "partial_rotary_factor": 0.75}),
        ({"rope_scaling": {**LONGROPE, "type": "su"}}, {"rope_scaling": LONGROPE}),
    ],
)
def test_what_may_be_said_in_two_ways_means_the_same(
    changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Null counts as absent."""
    assert parse(**changes) == parse(**expected)


def test_kinds_of_layers_have_their_own_positions_in_both_dialects() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    older = parse(rope_theta=1e6, rope_local_base_freq=5e4, rope_scaling=linear)
    newer = parse(
        rope_parameters={
            "full_attention": {**linear, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        }
    )
    assert older.rope == newer.rope == LinearRope(1e6, 8.0)
    assert older.sliding_rope == newer.sliding_rope == DefaultRope(5e4)


def test_an_original_length_beside_the_rotary_section_counts() -> None:
    config = parse(rope_scaling=LONGROPE, original_max_position_embeddings=16)
    assert isinstance(config.rope, LongRope)
    assert config.rope.original_len == 16


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 64),
        ({"type": "linear", "factor": 2.5}, 160),
        ({"type": "dynamic", "factor": 4}, 256),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 32}, 128),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 8}, 64),
        ({"type": "llama3", **LLAMA3}, 128),
    ],
)
def test_a_context_reaches_as_far_as_the_positions_do(
    scaling: dict[str, Any] | None, longest: int
) -> None:
    config = parse(rope_scaling=scaling)
    assert config.context_len(None) == 64
    assert config.context_len(longest) == longest
    with pytest.raises(ConfigError, match=f"positions for 1 to {longest} tokens"):
        config.context_len(longest + 1)


def test_a_directory_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no config"):
        read_fields(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_a_spoiled_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_fields(tmp_path)


ON = {"use_sliding_window": True}
SWITCHED = {**ON, "sliding_window": 8}
NONE_FULL = {**SWITCHED, "max_window_layers": 0}


def every(period: int) -> Callable[[Fields], Windows]:
    """Each last layer of a period has no window."""
    return lambda given: periodic_windows(given, period)


def fields(**values: object) -> Fields:
    return Fields({"num_hidden_layers": 4, **values}, source="config.json")


@pytest.mark.parametrize(
    ("read", "values", "windows"),
    [
        (one_window, {"sliding_window": 8}, (8,) * 4),
        (one_window, {"sliding_window": None}, (None,) * 4),
        # The layer types count, or else a number of layers without a window.
        (switched_windows, {**SWITCHED, "max_window_layers": 3}, (None, None, None, 8)),
        (switched_windows, {**SWITCHED, "max_window_layers": 9}, (None,) * 4),
        (switched_windows, {**NONE_FULL, "layer_types": [SLIDING, FULL] * 2}, (8, None, 8, None)),
        (switched_windows, {"sliding_window": 8, "layer_types": [SLIDING] * 4}, (None,) * 4),
        (every(2), {"sliding_window": 8}, (8, None, 8, None)),
        (every(3), {"sliding_window": 8}, (8, 8, None, 8)),
        (
            every(2),
            {"sliding_window": 8, "layer_types": [FULL] * 3 + [SLIDING]},
            (None,) * 3 + (8,),
        ),
    ],
)
def test_windows_are_those_of_the_configuration(
    read: Callable[[Fields], Windows], values: dict[str, Any], windows: Windows
) -> None:
    assert read(fields(**values)) == windows


@pytest.mark.parametrize(
    ("read", "values", "complaint"),
    [
        (one_window, {"sliding_window": 0}, "sliding_window is 0; expected an integer"),
        (switched_windows, SWITCHED, "max_window_layers is missing"),
        (switched_windows, {**ON, "max_window_layers": 0}, "sliding_window is missing"),
        (switched_windows, {**NONE_FULL, "layer_types": [FULL]}, "expected a list of 4 strings"),
        (
            switched_windows,
            {**NONE_FULL, "layer_types": ["mamba"] * 4},
            "expected full_attention or sliding_attention for each layer",
        ),
    ],
)
def test_a_wrong_field_is_named(
    read: Callable[[Fields], Windows], values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(fields(**values))
    assert complaint in str(caught.value)


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


def test_mistral_slides_unless_its_window_is_null() -> None:
    assert spec_of("Mistral", sliding_window=1024).windows == (1024,) * 12
    assert spec_of("Mistral", sliding_window=None).windows == (None,) * 12
    assert spec_of("Mistral").windows == (4096,) * 12


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
    assert spec.has_joined_qkv
    assert spec.has_joined_gate_up


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
