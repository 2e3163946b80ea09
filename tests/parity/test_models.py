"""The models alone, without pages, against transformers: each family, each kind of positions."""

from __future__ import annotations

import msgspec
import pytest
import torch

from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.config.model import architecture_of, parse_config, read_fields
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.decoder_spec import NORMS_AROUND, DecoderSpec, EmbeddingScale
from aserve.gpu.models.registry import FAMILIES, DecoderFamily
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.source import HOST, LoadProgress
from tests.load_model import load_model
from tests.parity.conftest import ReferenceOf
from tests.parity.dense_attend import logits_of
from tests.parity.references import KINDS, MAX_MODEL_LEN, PROMPT_LEN, Reference

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
