"""The models alone, without pages, against transformers: each family, each kind of positions."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.config.model import architecture_of, parse_config, read_fields
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.decoder_spec import NORMS_AROUND, DecoderSpec, EmbeddingScale
from aserve.gpu.models.registry import FAMILIES, DecoderFamily
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.source import HOST, LoadProgress
from tests.gpu import test_ngram_model
from tests.load_model import load_model
from tests.parity import (
    picture_models,
    test_diffusion_models,
    test_pooled_models,
    test_text_parts,
)
from tests.parity.conftest import ReferenceOf
from tests.parity.dense_attend import logits_of
from tests.parity.references import (
    BASE,
    KINDS,
    MAX_MODEL_LEN,
    PROMPT_LEN,
    VOCAB_SIZE,
    Reference,
    drop_identity_experts,
    new_model,
)
from tools.train_models.ngram_emb import (
    MAX_N,
    NUM_SPLITS,
    NUM_TABLES,
    VOCAB_RATIO,
    NgramEmbeddings,
)
from tools.train_tiny.network import Shape
from tools.train_tiny.tokenizer import EOS

pytestmark = pytest.mark.slow  # each reference takes a moment to make


def load(reference: Reference, *, dtype: str = "float32") -> CausalModel:
    return load_model(reference.directory, dtype=dtype, max_model_len=MAX_MODEL_LEN)


def assert_close(logits: torch.Tensor, reference: Reference) -> None:
    torch.testing.assert_close(logits, reference.logits, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind: str, reference_of: ReferenceOf) -> None:
    reference = reference_of(kind)
    tokens = reference.tokens
    logits = logits_of(load(reference), tokens)
    assert_close(logits, reference)
    assert torch.equal(logits[PROMPT_LEN - 1 :].argmax(-1), reference.greedy)


@pytest.mark.parametrize("kind", KINDS)
def test_one_lost_token_of_the_history_changes_the_logits(
    kind: str, reference_of: ReferenceOf
) -> None:
    """The references see: a test that compares with them turns red for one wrong page or slot."""
    reference = reference_of(kind)
    tokens = reference.tokens
    logits = logits_of(load(reference), tokens, lost=PROMPT_LEN - 10)
    differences = (logits - reference.logits).abs().amax(-1)
    assert differences[: PROMPT_LEN - 10].max() <= 1e-4
    assert differences[PROMPT_LEN:].max() > 1e-2
    assert not torch.equal(logits[PROMPT_LEN - 1 :].argmax(-1), reference.greedy)


# What a family says of itself, and what it would be without that.
SWAPPED = msgspec.structs.replace(
    NORMS_AROUND,
    after_attention=NORMS_AROUND.before_mlp,
    before_mlp=NORMS_AROUND.after_attention,
)
AXES: list[tuple[str, str, object]] = [
    ("mistral", "windows", (None,) * 3),
    ("qwen2-sliding", "windows", (24,) * 3),
    ("gemma", "norm_offset", 0.0),
    ("gemma", "embedding_scale", EmbeddingScale()),
    ("gemma2", "windows", (None, 24, None)),
    ("gemma2", "attention_scale", None),
    ("gemma2", "attention_softcap", None),
    ("gemma2", "logit_softcap", None),
    ("gemma2", "norms", SWAPPED),
    ("gemma2", "norm_offset", 0.0),
    ("gemma2", "embedding_scale", EmbeddingScale()),
    ("gemma3", "windows", (24, None, 24)),
    ("gemma3", "attention_scale", None),
    ("gemma3", "norm_offset", 0.0),
    ("gemma3", "embedding_scale", EmbeddingScale()),
    ("gemma3-linear", "logit_softcap", None),
    ("phi3", "windows", (None,) * 3),
    ("ministral3", "query_scale", None),
    ("smollm3", "ropes", ()),
    ("ernie4.5", "rotates_neighbours", False),
    ("glm", "rotates_neighbours", False),
    ("exaone4-sliding", "windows", (24,) * 4),
    ("granite", "attention_scale", None),
    ("granite", "embedding_scale", EmbeddingScale()),
    ("granite", "residual_scale", 1.0),
    ("granite", "logit_divisor", 1.0),
]


@pytest.mark.parametrize(("kind", "axis", "other"), AXES)
def test_the_references_see_each_axis(
    kind: str, axis: str, other: object, reference_of: ReferenceOf
) -> None:
    reference = reference_of(kind)
    fields = read_fields(reference.directory)
    family = FAMILIES[architecture_of(fields)]
    assert isinstance(family, DecoderFamily)
    spec = family.spec(parse_config(fields, defaults=family.defaults))
    model = decoder(msgspec.structs.replace(spec, **{axis: other}), reference)
    tokens = reference.tokens
    logits = logits_of(model, tokens)
    assert (logits - reference.logits).abs().max() > 1e-2


def decoder(spec: DecoderSpec, reference: Reference) -> Decoder:
    with Checkpoint(reference.directory) as checkpoint:
        progress = LoadProgress(0, dtype=torch.float32)
        reader = WeightReader(checkpoint, HOST, dtype=torch.float32, progress=progress)
        return Decoder(spec, reader, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.5), ("float16", 0.06)])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "granite", "olmo2"])
def test_half_types_stay_near(
    kind: str, dtype: str, tolerance: float, reference_of: ReferenceOf
) -> None:
    """As near as the reference itself stays in that type."""
    reference = reference_of(kind)
    tokens = reference.tokens
    model = load(reference, dtype=dtype)
    logits = logits_of(model, tokens)
    assert model.dtype == getattr(torch, dtype)
    assert (logits - reference.logits).abs().max() < tolerance


def test_mimo_is_qwen2_with_modules_that_draft(reference_of: ReferenceOf, tmp_path: Path) -> None:
    """transformers has no code of it; its own is Qwen2's. The model leaves its modules out."""
    reference = reference_of("qwen2")
    config = json.loads((reference.directory / "config.json").read_text())
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    text = json.dumps({**config, **mimo, "num_nextn_predict_layers": 1})
    (tmp_path / "config.json").write_text(text)
    weights = load_file(reference.directory / "model.safetensors")
    module = {"model.mtp_layers.0.input_proj.weight": torch.ones(48, 96)}
    save_file({**weights, **module}, tmp_path / "model.safetensors")
    model = load_model(tmp_path, max_model_len=MAX_MODEL_LEN)
    assert_close(logits_of(model, reference.tokens), reference)


def test_longcat_flash_lite_is_longcat_flash_behind_an_embedding(tmp_path: Path) -> None:
    """transformers has the layers, and the script that trains tests/models the embedding."""
    model = new_model("longcat-flash")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    drop_identity_experts(file)
    ngrams = NgramEmbeddings(Shape(vocab_size=VOCAB_SIZE, hidden_size=BASE["hidden_size"]))
    tables = {f"model.ngram_embeddings.{name}": w for name, w in ngrams.state_dict().items()}
    save_file({**load_file(file), **tables}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    lite = {
        "architectures": ["LongcatFlashNgramForCausalLM"],
        "emb_neighbor_num": MAX_N,
        "emb_split_num": NUM_SPLITS,
        "ngram_vocab_size_ratio": VOCAB_RATIO,
        "eos_token_id": EOS,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **lite}))
    ids = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(7))
    ids[[3, 9, 10]] = EOS
    with torch.inference_mode():
        words, pairs = model.model.embed_tokens(ids[None]), ngrams(ids[None])
        expected = model(inputs_embeds=(words + pairs) / (1 + NUM_TABLES)).logits[0]
        without = model(inputs_embeds=words).logits[0]
    got = logits_of(load_model(tmp_path, max_model_len=MAX_MODEL_LEN), ids, chunks=[5, 1, 30, 4])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0.0)
    assert (got - without).abs().max() > 0.1


def test_experts_in_one_tensor_are_those_in_tensors_of_their_own(
    reference_of: ReferenceOf, tmp_path: Path
) -> None:
    """As the module of transformers has them."""
    reference = reference_of("qwen3.5-moe")
    weights = load_file(reference.directory / "model.safetensors")
    joined: dict[str, torch.Tensor] = {}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"

        def stack(part: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([weights.pop(f"{prefix}.{e}.{part}.weight") for e in range(4)])

        joined[f"{prefix}.gate_up_proj"] = torch.cat((stack("gate_proj"), stack("up_proj")), dim=1)
        joined[f"{prefix}.down_proj"] = stack("down_proj")
    save_file({**weights, **joined}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((reference.directory / "config.json").read_text())
    model = load_model(tmp_path, max_model_len=MAX_MODEL_LEN)
    assert_close(logits_of(model, reference.tokens), reference)


# Families that transformers has no code of, or whose models have no kind of their own.
COMPARED_BY = {
    "LLaDA2MoeModelLM": test_diffusion_models.test_llada2_equals_plain_torch,
    "LlamaNgramForCausalLM": test_ngram_model.test_no_ngram_reaches_over_an_end_or_the_beginning,
    "LongcatFlashNgramForCausalLM": test_longcat_flash_lite_is_longcat_flash_behind_an_embedding,
    "MiMoForCausalLM": test_mimo_is_qwen2_with_modules_that_draft,
    "Qwen2ForRewardModel": test_pooled_models.test_a_reward_model_scores_the_last_token,
    "SDARForCausalLM": test_diffusion_models.test_sdar_equals_qwen3_with_a_mask_of_blocks,
    "SDARMoeForCausalLM": test_diffusion_models.test_sdar_equals_qwen3_with_a_mask_of_blocks,
}


def test_every_native_family_is_compared_with_its_reference() -> None:
    causal = {f"{family}ForCausalLM" for family, _ in KINDS.values()}
    pooled = {architecture for architecture, _, _ in test_pooled_models.KINDS.values()}
    seeing = {f"{kind}ForConditionalGeneration" for kind in picture_models.KINDS}
    parts = {f"{kind}ForConditionalGeneration" for kind in test_text_parts.KINDS}
    assert sorted(causal | pooled | seeing | parts | COMPARED_BY.keys()) == sorted(FAMILIES)
