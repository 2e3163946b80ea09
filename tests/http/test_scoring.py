"""Scores, labels and vectors of the pooling endpoints: what is refused, and what stays behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from aserve.http import long_json
from aserve.http.scoring.classification import PoolingBody
from aserve.messages.base import array_i32
from aserve.messages.changes import EngineJob
from aserve.text.prompt import PromptEncoder
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask


@pytest.mark.parametrize("empty", [{"query": "", "items": [""]}, {"query": [], "items": [[]]}])
async def test_a_label_needs_a_prompt(echo: EchoEngine, empty: dict[str, Any]) -> None:
    """Nothing predicts the first token, and a softmax of no probabilities divides by 0."""
    labels = {"label_token_ids": [5, 6], "apply_softmax": True}
    answer = await ask(echo, "/v1/score", empty | labels)
    assert (answer.status, answer.error["param"]) == (400, "items"), answer.text


@pytest.mark.parametrize("param", ["truncate_prompt_tokens", "max_tokens_per_doc"])
async def test_documents_of_no_tokens_are_refused_as_prompts_of_none_are(
    echo: EchoEngine, param: str
) -> None:
    """0 was taken as no bound."""
    answer = await ask(echo, "/rerank", {"query": "a", "documents": ["b"], param: 0})
    assert (answer.status, answer.error["param"]) == (400, param), answer.text
    assert param in answer.error["message"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(3)),
        ({"truncate_prompt_tokens": -1}, slice(1, None)),
    ],
)
async def test_the_prompt_of_a_label_is_truncated_and_the_label_stays(
    echo: EchoEngine, fields: dict[str, Any], kept: slice
) -> None:
    """The bound was ignored."""
    ids = [10 + number % 90 for number in range(echo.encoder.limits.max_model_len)]
    body = {"query": ids[:100], "items": [ids[100:]], "label_token_ids": [5]}
    answer = await ask(echo, "/v1/score", body | fields)
    assert answer.status == 200, answer.text
    assert array_i32(echo.scheduler.admitted[-1].prompt_ids).tolist() == [*ids[kept], 5]


async def test_the_prompt_of_a_label_has_at_least_one_token(echo: EchoEngine) -> None:
    body = {"query": "a", "items": ["b"], "label_token_ids": [5], "truncate_prompt_tokens": 0}
    answer = await ask(echo, "/v1/score", body)
    assert (answer.status, answer.error["param"]) == (400, "truncate_prompt_tokens"), answer.text


async def test_an_adapter_that_goes_while_a_text_is_tokenized_is_not_replaced_by_the_base_model(
    echo: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(_: EngineJob) -> None:
        return None

    async def tokenize(work: Callable[[PromptEncoder], Any]) -> Any:
        echo.loras.unload("pirate")
        return work(echo.encoder)

    await echo.loras.open(load)
    await echo.loras.load("pirate", "there")
    body = {"query": "a", "items": ["b"], "label_token_ids": [5]}
    assert (await ask(echo, "/v1/score", body | {"model": "pirate"})).status == 200
    assert echo.scheduler.admitted[-1].lora_slot == 1
    monkeypatch.setattr(echo.tokenize_service, "run", tokenize)
    answer = await ask(echo, "/v1/score", body | {"model": "pirate"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_nothing_of_a_refused_request_stays(echo: EchoEngine) -> None:
    for _ in range(3):
        answer = await ask(echo, "/classify", {"input": ["a"]})
        assert answer.error["code"] == "model_does_not_classify"
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, PoolingBody)]


@pytest.mark.parametrize(("path", "member"), [("/pooling", "data"), ("/api/embed", "embeddings")])
async def test_many_vectors_are_sent_in_pieces(
    echo: EchoEngine, monkeypatch: pytest.MonkeyPatch, path: str, member: str
) -> None:
    """512 vectors of 4,096 values are 40 MB, which took 0.4 s of one iteration of the loop."""
    monkeypatch.setattr(long_json, "BLOCK_BYTES", 64)
    answer = await ask(echo, path, {"input": ["a", "b", "c"]})
    assert answer.headers.get("Transfer-Encoding") == "chunked"
    assert len(answer.json[member]) == 3
