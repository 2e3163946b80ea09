"""A trained model on CUDA, with every attention backend that can run it: what it says is what
float32 on the CPU would say, within the rounding of its number format.
"""

from __future__ import annotations

from typing import Any

import pytest

from aserve.engine import Answer, Engine
from aserve.tiny import MODEL_DIR

PROMPTS = (
    "Once upon a time there was a",
    "The little dog ran to the",
    "def add(a, b):\n    return",
    "One day, Tom and Anna went",
    "1 2 3 4 5 6",
    "She was very happy because",
)
NUM_TOKENS = 24
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "prompt_logprobs": 0}
# How much less likely than the best a chosen token may be, in logprob: its logits were rounded.
GAPS = {"float32": 0.01, "bfloat16": 0.35, "float16": 0.05}
PLACES = [("cpu", "torch-ref", "float32"), ("cpu", "paged-sdpa", "bfloat16")]
ON_CUDA = [
    pytest.param("cuda", backend, dtype, marks=pytest.mark.gpu)
    for backend in ("auto", "triton", "torch-ref")
    for dtype in GAPS
]


def answers(device: str, backend: str, dtype: str, **options: Any) -> list[Answer]:
    options = {"device": device, "attention_backend": backend, "dtype": dtype, **options}
    with Engine(model=str(MODEL_DIR), max_num_seqs=4, num_pages=500, **options) as engine:
        return engine.generate_sync(PROMPTS, **GREEDY)


def assert_best_by_the_cpu(found: list[Answer], *, gap: float) -> None:
    """Each token is among the best of a recomputation of its whole text."""
    with Engine(model=str(MODEL_DIR), device="cpu", dtype="float32") as engine:
        for answer in found:
            (choice,) = answer.choices
            assert len(choice.token_ids) == NUM_TOKENS
            ids = [*(token.token_id for token in choice.prompt), *choice.token_ids]
            (whole,) = engine.generate_sync([ids], max_tokens=0, prompt_logprobs=1)
            for token in whole.choices[0].prompt[-NUM_TOKENS:]:
                assert token.logprob is not None
                assert token.top[0].logprob - token.logprob <= gap, (answer.text, token)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "backend", "dtype"), [*PLACES, *ON_CUDA])
def test_greedy_tokens_are_those_of_float32_on_the_cpu(
    device: str, backend: str, dtype: str
) -> None:
    assert_best_by_the_cpu(answers(device, backend, dtype), gap=GAPS[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_prompts_in_chunks_beside_decodes_say_the_same(device: str) -> None:
    found = answers(device, "auto", "float32", max_num_batched_tokens=5, page_size=1)
    assert_best_by_the_cpu(found, gap=GAPS["float32"])
