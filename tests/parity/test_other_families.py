"""Models in transformers' own code with aserve's attention, against transformers with its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.gpu.models.base import CausalModel, HiddenCapture
from aserve.gpu.models.transformers.weights import DUMMY_SEED
from tests.load_model import load_model
from tests.parity.conftest import ReferenceOf
from tests.parity.dense_attend import DenseAttend, logits_of
from tests.parity.references import KINDS, MAX_MODEL_LEN, OTHER_KINDS, PROMPT_LEN, Reference

pytestmark = pytest.mark.slow  # each reference takes a moment to make

# The code of transformers that has latent attention, sinks or recurrent layers cannot run with
# attention of aserve's.
NATIVE_ONLY = (
    *("deepseek", "glm5", "gpt-oss", "longcat", "qwen3.5", "qwen3-next", "lfm2"),
    *("bamba", "falcon-h1", "granite-hybrid", "nemotron-h"),
)
EVERY_KIND = [*(kind for kind in KINDS if not kind.startswith(NATIVE_ONLY)), *OTHER_KINDS]
CHUNKS = [1, 30, 2, 37, *[1] * 8, 47, *[1] * 8]


def load(reference: Reference, *, dtype: str = "float32") -> CausalModel:
    return load_model(
        reference.directory, dtype=dtype, max_model_len=MAX_MODEL_LEN, model_impl="transformers"
    )


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_logits_equal_those_of_transformers(kind: str, reference_of: ReferenceOf) -> None:
    reference = reference_of(kind)
    logits = logits_of(load(reference), reference.tokens, chunks=CHUNKS)
    torch.testing.assert_close(logits, reference.logits, atol=1e-4, rtol=0.0)
    assert torch.equal(logits[PROMPT_LEN - 1 :].argmax(-1), reference.greedy)


def test_captured_states_are_those_of_the_native_code(reference_of: ReferenceOf) -> None:
    """Once, for the one forward that asks."""
    reference = reference_of("qwen3")
    captures = []
    for model in (load(reference), load_model(reference.directory, max_model_len=MAX_MODEL_LEN)):
        capture = HiddenCapture(layer_ids=(0, 2), wants_before_norm=True)
        ids, positions = reference.prompt, torch.arange(PROMPT_LEN)
        model.forward(ids, positions, DenseAttend(), capture=capture)
        model.forward(ids, positions, DenseAttend())
        captures.append(capture)
    ours, native = captures
    assert len(ours.layers) == 2
    for state, expected in zip(ours.layers, native.layers, strict=True):
        torch.testing.assert_close(state, expected, atol=1e-5, rtol=0.0)
    assert ours.before_norm is not None
    assert native.before_norm is not None
    torch.testing.assert_close(ours.before_norm, native.before_norm, atol=1e-5, rtol=0.0)


FEW_CHUNKS = [30, 1, 39]
SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "sliding_window": 24,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "ffn_dim": 80,
    "word_embed_proj_dim": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FAMILIES = (
    *("Afmoe", "Apertus", "Arcee", "BitNet", "Cohere", "Cohere2", "Cwm", "Dots1", "Ernie4_5"),
    *("Ernie4_5_Moe", "Exaone4", "FlexOlmo", "Gemma", "Gemma2", "Gemma3", "Glm", "Glm4"),
    *("Glm4Moe", "GPTBigCode", "GPTNeoX", "Granite", "GraniteMoe", "GraniteMoeShared", "Helium"),
    *("HunYuanDenseV1", "HunYuanMoEV1", "JetMoe", "Llama", "MiniMaxM2", "Ministral", "Mistral"),
    *("Mixtral", "ModernBertDecoder", "NanoChat", "Olmo", "Olmo2", "Olmo3", "Olmoe", "OPT"),
    *("Persimmon", "Phi", "Phi3", "Phimoe", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SeedOss"),
    *("SmolLM3", "Starcoder2", "VaultGemma"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    """A longer list and a weaker look: random weights, one prompt, in chunks, past the window."""
    model_class, config = small_config(family)
    config.save_pretrained(tmp_path)
    ids = torch.randint(3, 150, (sum(FEW_CHUNKS),), generator=torch.Generator().manual_seed(1))
    ours = load_model(
        tmp_path, max_model_len=MAX_MODEL_LEN, load_format="dummy", model_impl="transformers"
    )
    logits = logits_of(ours, ids, chunks=FEW_CHUNKS)
    torch.testing.assert_close(logits, reference_logits(model_class, config, ids))


def small_config(family: str) -> tuple[Any, Any]:
    """Each kind of layer that the family has by default, in turns. What a family needs to be small
    is guessed from the names of its fields."""
    import transformers

    model_class: Any = getattr(transformers, f"{family}ForCausalLM")
    default = model_class.config_class()
    fields = {name: value for name, value in SMALL.items() if hasattr(default, name)}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if kinds:
        fields["layer_types"] = [kinds[i % len(kinds)] for i in range(SMALL["num_hidden_layers"])]
    config = model_class.config_class(**fields)
    config.architectures = [model_class.__name__]
    return model_class, config


def reference_logits(model_class: Any, config: Any, ids: Tensor) -> Tensor:
    """The same weights, since they are drawn in the same way, with transformers' own attention."""
    torch.manual_seed(DUMMY_SEED)
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: Tensor = model(ids[None], use_cache=False).logits[0]
    return logits
