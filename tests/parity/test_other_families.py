"""Models in transformers' own code with aserve's attention, against transformers with its own."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.models.base import CausalModel, HiddenCapture
from tests.load_model import load_model
from tests.parity.conftest import ReferenceOf
from tests.parity.dense_attend import DenseAttend, logits_of
from tests.parity.references import KINDS, MAX_MODEL_LEN, OTHER_KINDS, PROMPT_LEN, Reference

pytestmark = pytest.mark.slow  # each reference takes a moment to make

EVERY_KIND = [*KINDS, *OTHER_KINDS]
CHUNKS = [1, 30, 2, 37, *[1] * 63]


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


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [("cohere2", torch.float64, 1e-4), ("gpt-neox", torch.bfloat16, 0.5)],
)
def test_other_dtypes_stay_near(
    kind: str, dtype: torch.dtype, tolerance: float, reference_of: ReferenceOf
) -> None:
    reference = reference_of(kind)
    model = load(reference, dtype=str(dtype).removeprefix("torch."))
    logits = logits_of(model, reference.tokens, chunks=CHUNKS)
    assert logits.dtype == dtype
    assert (logits - reference.logits).abs().max() < tolerance


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
