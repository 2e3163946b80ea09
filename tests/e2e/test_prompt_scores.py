"""Scores and embeddings of prompts: the official client, as evaluation tools use it, and a real
model.
"""

from __future__ import annotations

import math

import openai
import pytest

from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR

pytestmark = pytest.mark.slow

MODEL = "aserve-tiny"
CONTEXT = "Once upon a time, there was a"


async def test_a_continuation_is_judged_by_its_scores(client: openai.AsyncOpenAI) -> None:
    """Two candidates in one call, as ids; asked again, the cache changes nothing."""
    tokenizer = load_tokenizer(MODEL_DIR)
    context = tokenizer.encode(CONTEXT, with_special=False)
    prompts = [
        context + tokenizer.encode(word, with_special=False) for word in (" little girl", " xq zzz")
    ]
    sums: list[list[float]] = []
    for _ in range(2):
        answer = await client.completions.create(
            model=MODEL, prompt=prompts, echo=True, logprobs=1, max_tokens=0
        )
        scores = [choice.logprobs for choice in answer.choices]
        sums.append([])
        for ids, score in zip(prompts, scores, strict=True):
            assert score is not None
            values = score.token_logprobs or []
            assert len(values) == len(ids) == len(score.tokens or [])
            sums[-1].append(sum(values[len(context) :]))
    assert sums[0] == sums[1]
    assert sums[0][0] > sums[0][1]


async def test_embeddings_have_length_one_and_know_their_own_prompt(
    client: openai.AsyncOpenAI,
) -> None:
    texts = [CONTEXT, "Sam has 3 apples.", CONTEXT]
    answer = await client.embeddings.create(model=MODEL, input=texts)
    first, other, again = (entry.embedding for entry in answer.data)
    assert first == pytest.approx(again, abs=1e-6)
    assert first != pytest.approx(other, abs=1e-2)
    short = await client.embeddings.create(model=MODEL, input=CONTEXT, dimensions=8)
    assert len(short.data[0].embedding) == 8
    for vector in (first, other, short.data[0].embedding):
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
