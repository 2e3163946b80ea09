"""config.json in both dialects, and everything that it may get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aserve.errors import ConfigError
from aserve.gpu.layers.rope_scaling import (
    DefaultRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    YarnRope,
)
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import ModelConfig, parse_config, read_fields

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
        ({"num_attention_heads": 5}, "num_attention_heads is 5; expected a divisor of hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor of 4"),
        ({"head_dim": 7}, "head_dim is 7; expected an even number"),
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
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; expected at most 1.0"),
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


def test_all_layers_have_the_same_positions_unless_the_file_says_otherwise() -> None:
    config = parse(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert config.rope == config.sliding_rope == LinearRope(5e5, 2.0)


def test_a_part_of_a_head_may_turn() -> None:
    assert parse(head_dim=16, partial_rotary_factor=0.75).rotary_dim == 12
    assert parse(head_dim=16).rotary_dim == 16


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


def test_yarn_works_out_its_temperature() -> None:
    rope = parse(rope_scaling={"type": "yarn", "factor": 4.0}).rope
    assert isinstance(rope, YarnRope)
    assert rope.attention_factor == pytest.approx(1.138629436)
    weights = {"mscale": 2.0, "mscale_all_dim": 1.0}
    weighted = parse(rope_scaling={"type": "yarn", "factor": 4.0, **weights}).rope
    assert isinstance(weighted, YarnRope)
    assert weighted.attention_factor == pytest.approx(1.277258872 / 1.138629436)


def test_a_directory_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no config"):
        read_fields(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_a_spoiled_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_fields(tmp_path)
