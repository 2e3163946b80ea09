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
    "1 2 3 4 5 6",
)
NUM_TOKENS = 24
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "prompt_logprobs": 0}
# How much less likely than the best a chosen token may be, in logprob: its logits were rounded.
GAPS = {"float32": 0.01, "bfloat16": 0.35, "float16": 0.05}
IN_CHUNKS = {"max_num_batched_tokens": 5, "page_size": 1}
CASES: list[Any] = [
    ("cpu", "auto", "bfloat16", IN_CHUNKS),
    pytest.param("cuda", "auto", "float32", IN_CHUNKS, marks=pytest.mark.gpu),
]
CASES += [
    pytest.param("cuda", backend, dtype, {}, marks=pytest.mark.gpu)
    for backend in ("auto", "triton", "torch-ref")
    for dtype in GAPS
]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "backend", "dtype", "options"), CASES)
def test_greedy_tokens_are_those_of_float32_on_the_cpu(
    device: str, backend: str, dtype: str, options: dict[str, Any]
) -> None:
    machine = {"device": device, "attention_backend": backend, "dtype": dtype, **options}
    with Engine(model=str(MODEL_DIR), max_num_seqs=4, num_pages=500, **machine) as engine:
        found = engine.generate_sync(PROMPTS, **GREEDY)
    assert_best_by_the_cpu(found, gap=GAPS[dtype])


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
