"""POST /v1/embeddings through the official client; a vector is (3, 4, 12) / 13, or minus that."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from aserve.http.openai.embeddings import shorten
from tests.fakes.echo_engine import MAX_MODEL_LEN, EchoEngine
from tests.http.asking import ask

VECTOR = [value / 13 for value in (3, 4, 12)]
OPPOSITE = [-value for value in VECTOR]


@pytest.mark.parametrize("encoding", ["float", "base64", openai.NOT_GIVEN])
async def test_both_encodings_give_the_client_the_same_vector(
    echo: EchoEngine, encoding: Any
) -> None:
    answer = await echo.client.embeddings.create(
        model="echo", input="text", encoding_format=encoding
    )
    (entry,) = answer.data
    embedding: Any = entry.embedding
    if isinstance(embedding, str):
        embedding = np.frombuffer(base64.b64decode(embedding), "<f4").tolist()
    assert embedding == pytest.approx(VECTOR)
    assert (entry.index, entry.object, answer.object) == (0, "embedding", "list")


@pytest.mark.parametrize(
    ("given", "vectors", "num_tokens"),
    [
        ([5, 6, 7], [VECTOR], 3),
        ([[1, 2], [3], [1]], [OPPOSITE, VECTOR, OPPOSITE], 4),
        (["H", "I"], [VECTOR, VECTOR], 2),
    ],
)
async def test_every_kind_of_input_is_answered_in_its_order(
    echo: EchoEngine, given: Any, vectors: list[list[float]], num_tokens: int
) -> None:
    answer = await echo.client.embeddings.create(model="parrot", input=given)
    assert [entry.index for entry in answer.data] == list(range(len(vectors)))
    for entry, vector in zip(answer.data, vectors, strict=True):
        assert entry.embedding == pytest.approx(vector)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    assert answer.model == "parrot"


@pytest.mark.parametrize(("kept", "num_tokens"), [(2, 2), (-1, MAX_MODEL_LEN)])
async def test_a_truncated_input_keeps_its_last_tokens(
    echo: EchoEngine, kept: int, num_tokens: int
) -> None:
    answer = await echo.client.embeddings.create(
        model="echo", input=[1, *[5] * MAX_MODEL_LEN], extra_body={"truncate_prompt_tokens": kept}
    )
    assert answer.data[0].embedding == pytest.approx(VECTOR)
    assert answer.usage.prompt_tokens == num_tokens


async def test_fewer_dimensions_have_length_one_again(echo: EchoEngine) -> None:
    answer = await echo.client.embeddings.create(model="echo", input="text", dimensions=2)
    assert answer.data[0].embedding == pytest.approx([0.6, 0.8])


def test_a_vector_of_zeros_stays_one() -> None:
    assert shorten(np.zeros(3, np.float32), 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "empty_array"),
        ({"input": ""}, "input", "empty_prompt"),
        ({"input": ["a", 1]}, "input", "invalid_type"),
        ({"input": [[1], []]}, "input", "empty_prompt"),
        ({"input": [0] * (MAX_MODEL_LEN + 1)}, "input", "context_length_exceeded"),
        ({"input": [10**6]}, "input", "token_id_out_of_range"),
        ({"input": ["a"] * 513}, "input", "array_above_max_length"),
        ({"input": "a", "dimensions": 0}, "dimensions", "integer_below_min_value"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": "a", "dimensions": 4}, "dimensions", "integer_above_max_value"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_type"),
        ({"input": "a", "model": "other"}, "model", "model_not_found"),
    ],
)
async def test_invalid_embedding_requests_are_refused_with_the_field(
    echo: EchoEngine, body: dict[str, Any], param: str, code: str
) -> None:
    answer = await ask(echo, "/v1/embeddings", body)
    assert answer.status == (404 if param == "model" else 400)
    assert (answer.error["param"], answer.error["code"]) == (param, code)
    assert echo.gateway.num_open == 0
