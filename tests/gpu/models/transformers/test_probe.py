"""What a model does in a trial, and the reasons against models that paged attention cannot serve.

Real families of transformers with random weights; the last ones are made to misbehave.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aserve.errors import ConfigError
from aserve.gpu.models.transformers.attention import register
from aserve.gpu.models.transformers.probe import NotSupported, Probed, probe
from tests.gpu.models.transformers.tiny_configs import config_of, write_config
from tests.load_model import load_model

pytestmark = pytest.mark.slow  # importing transformers' models takes seconds

MAX_MODEL_LEN = 64
MIXED = ["full_attention", "sliding_attention"]


def model_of(family: str, **fields: Any) -> Any:
    import transformers

    register()
    torch.manual_seed(0)
    config = config_of(family, initializer_range=0.1, **fields)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def probed(family: str, **fields: Any) -> Probed:
    return probe(model_of(family, **fields), max_model_len=MAX_MODEL_LEN)


def reason_against(model: Any) -> str:
    with pytest.raises(NotSupported) as caught:
        probe(model, max_model_len=MAX_MODEL_LEN)
    return str(caught.value)


def test_windows_scales_and_caps_are_those_that_the_layers_use() -> None:
    scores = {"query_pre_attn_scalar": 25, "attn_logit_softcapping": 7.0}
    found = probed("Gemma2", sliding_window=5, layer_types=MIXED, head_dim=12, **scores)
    full, sliding = found.specs.values()
    assert (full.index, full.window, sliding.index, sliding.window) == (0, None, 1, 5)
    assert (full.num_heads, full.num_kv_heads, full.head_dim) == (4, 2, 12)
    assert (full.scale, full.softcap) == (0.2, 7.0)
    assert (found.hidden_size, found.vocab_size) == (32, 48)


@pytest.mark.parametrize(
    ("family", "architecture", "reason"),
    [
        ("Mamba", "MambaForCausalLM", "it has recurrent layers"),
        ("Jamba", "JambaForCausalLM", "it has recurrent layers"),
        ("T5", "T5ForConditionalGeneration", "it is an encoder with a decoder"),
        ("StableLm", "StableLmForCausalLM", "cannot exchange its attention function"),
        ("Llama", "LlamaForTokenClassification", "it is no causal model of transformers"),
        ("DiffLlama", "DiffLlamaForCausalLM", "it calls attention 2 times in one DiffLlama"),
        ("Bert", "BertLMHeadModel", "it masks neither causally nor by a sliding"),
        ("Nemotron", "NemotronForCausalLM", "keyword arguments of the model don't reach"),
        ("Doge", "DogeForCausalLM", "it failed in a trial: 'UnmadeMask' object has no"),
    ],
)
def test_what_cannot_run_is_refused_by_name_with_the_reason(
    family: str, architecture: str, reason: str, tmp_path: Path
) -> None:
    directory = write_config(tmp_path, family, architecture)
    with pytest.raises(ConfigError) as caught:
        load_model(directory, load_format="dummy")
    assert caught.value.message.startswith(f"architecture {architecture} is not supported: ")
    assert reason in caught.value.message


@pytest.mark.parametrize("family", ["ModernBertDecoder", "OPT"])
def test_hidden_states_are_found_whatever_their_part_is_called(family: str) -> None:
    """One family calls its head the decoder, one has them two levels down."""
    sizes = {"ffn_dim": 40, "word_embed_proj_dim": 32} if family == "OPT" else {}
    assert (found := probed(family, **sizes)).hidden_size == 32
    assert len(found.blocks) == 2


def test_values_of_another_size_than_keys_are_refused() -> None:
    sizes = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 8}
    model = model_of(
        "DeepseekV3", **sizes, q_lora_rank=8, head_dim=4, first_k_dense_replace=2, n_group=1
    )
    assert "shapes that don't fit: (4, 8), (4, 8), (4, 6)" in reason_against(model)


def test_a_convolution_over_tokens_is_seen() -> None:
    model = model_of("Lfm2", layer_types=["full_attention", "conv"], block_dim=32)
    assert "mixes tokens outside of attention" in reason_against(model)


@pytest.mark.parametrize(("window", "expected"), [(63, 63), (64, None), (100, None)])
def test_a_window_as_long_as_the_context_is_none(window: int, expected: int | None) -> None:
    specs = probed("Mistral", sliding_window=window).specs
    assert [spec.window for spec in specs.values()] == [expected, expected]


def test_a_layer_that_doesn_t_attend_is_seen() -> None:
    class Deaf(nn.Module):
        def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
            return hidden_states

    model = model_of("Llama")
    model.model.layers[1] = Deaf()
    assert "doesn't attend once in each of its layers" in reason_against(model)


def test_positions_from_the_order_of_tokens_are_seen() -> None:
    model = model_of("Llama")
    rotary = model.model.rotary_emb.forward

    def by_order(x: Tensor, position_ids: Tensor) -> Any:
        return rotary(x, torch.arange(position_ids.shape[1])[None])

    model.model.rotary_emb.forward = by_order
    assert "takes their positions from their order" in reason_against(model)


def test_a_head_that_looks_beyond_the_hidden_states_is_seen() -> None:
    model = model_of("Llama")

    def by_order(_head: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
        return logits + noise.pop()

    noise = [torch.randn(48), torch.zeros(48)]
    model.lm_head.register_forward_hook(by_order)
    assert "makes its logits from more than" in reason_against(model)
