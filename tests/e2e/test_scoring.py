"""Scores of pairs, rankings and labels, against embeddings and log-probabilities of the same
server."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai import AsyncOpenAI

from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.e2e.served import served
from tests.parity.real_model import options

pytestmark = pytest.mark.slow

MODEL = "aserve-tiny"
QUERY = "Once upon a time there was a fox."
DOCUMENTS = ["The fox ran home.", "27 plus 15 is 42.", "Once upon a time there was a dog."]


async def post(client: AsyncOpenAI, path: str, **body: Any) -> Any:
    return await client.with_options(base_url=client.base_url.join("/")).post(
        path, body=body, cast_to=object
    )


async def cosines(client: AsyncOpenAI) -> list[float]:
    answer = await client.embeddings.create(model=MODEL, input=[QUERY, *DOCUMENTS])
    query, *others = (np.array(entry.embedding) for entry in answer.data)
    return [float(query @ other) for other in others]


@pytest.mark.parametrize("path", ["rerank", "v1/rerank", "v2/rerank"])
async def test_documents_are_ranked_by_the_cosine_of_embeddings(
    client: AsyncOpenAI, path: str
) -> None:
    expected = await cosines(client)
    order = sorted(range(3), key=lambda index: -expected[index])
    answer = await post(
        client, path, query=QUERY, documents=[DOCUMENTS[0], *map(as_object, DOCUMENTS[1:])]
    )
    assert [each["index"] for each in answer["results"]] == order
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-6)
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    assert answer["usage"]["total_tokens"] > 0
    best = await post(
        client, path, query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False
    )
    assert [sorted(each) for each in best["results"]] == [["index", "relevance_score"]]
    assert best["results"][0]["index"] == order[0]


def as_object(text: str) -> dict[str, str]:
    return {"text": text}


@pytest.mark.parametrize("ones", [QUERY, [QUERY] * 3])
async def test_pairs_have_the_cosine_of_their_embeddings(client: AsyncOpenAI, ones: Any) -> None:
    answer = await post(client, "v1/score", model=MODEL, text_1=ones, text_2=DOCUMENTS)
    scores = [each["score"] for each in answer["data"]]
    assert scores == pytest.approx(await cosines(client), abs=1e-6)


@pytest.mark.parametrize("item_first", [False, True])
async def test_labels_have_their_probabilities_after_each_prompt(
    client: AsyncOpenAI, item_first: bool
) -> None:
    items = [" a", " the"]
    prompts = [item + "Once upon" if item_first else "Once upon" + item for item in items]
    labels, expected = [5, 300, 77], []
    for prompt in prompts:
        tokens = await post(client, "tokenize", prompt=prompt)
        scored = [[*tokens["tokens"], label] for label in labels]
        fields = {"prompt": scored, "max_tokens": 1, "echo": True, "logprobs": 0}
        choices = (await post(client, "v1/completions", **fields))["choices"]
        expected.append([math.exp(each["logprobs"]["token_logprobs"][-2]) for each in choices])
    body: dict[str, Any] = {"query": "Once upon", "items": items, "label_token_ids": labels}
    body["item_first"] = item_first
    answer = await post(client, "v1/score", **body)
    assert answer["object"] == "scoring"
    assert np.array(answer["scores"]) == pytest.approx(np.array(expected), rel=1e-5)
    shares = (await post(client, "score", **body, apply_softmax=True))["scores"]
    assert np.sum(shares, axis=1) == pytest.approx([1, 1])
    assert shares[0][0] / shares[0][1] == pytest.approx(expected[0][0] / expected[0][1], rel=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("rerank", {"query": "x", "documents": []}, "documents"),
        ("rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n"),
        ("rerank", {"query": "x", "documents": ["x"], "instruct": "Find."}, "instruct"),
        ("score", {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, "text_1"),
        ("score", {"text_1": "x"}, "text_2"),
        ("score", {"query": "x", "items": ["x"], "label_token_ids": []}, "label_token_ids"),
        ("score", {"query": "x", "items": [[1]], "label_token_ids": [1]}, "items"),
        ("score", {"query": "x", "items": ["x"], "label_token_ids": [-1]}, "items"),
    ],
)
async def test_what_cannot_be_scored_is_refused(
    client: AsyncOpenAI, path: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await post(client, path, **body)
    assert refused.value.param == param


async def test_a_reranker_that_generates_scores_by_the_logits_of_yes_and_no() -> None:
    """The prompts are those of Qwen3-Reranker's card, and the logits those of transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    encode = load_tokenizer(MODEL_DIR).encode
    labels = [encode(label, with_special=False) for label in ("yes", "no")]
    default = "Given a web search query, retrieve relevant passages that answer the query"

    def expected(document: str, instruct: str = default) -> float:
        prompt = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            f"<|im_end|>\n<|im_start|>user\n<Instruct>: {instruct}\n<Query>: {QUERY}\n"
            f"<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        with torch.inference_mode():
            logits = model(torch.tensor([encode(prompt, with_special=False)])).logits[0, -1]
        return float(logits[[ids[0] for ids in labels]].softmax(0)[0])

    scores = [expected(document) for document in DOCUMENTS]
    assert len({round(value, 3) for value in scores}) == len(DOCUMENTS)
    resolved = options(port=0, dtype="float32", chat_template="qwen3-reranker")
    async with served(resolved) as session:

        async def ask(path: str, **body: Any) -> Any:
            async with session.post(path, json=body) as answer:
                return await answer.json()

        scored = await ask("/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        ranked = await ask("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)
        told = await ask("/rerank", query=QUERY, documents=DOCUMENTS[:1], instruct="Find a fox.")
        cut = await ask("/score", text_1=QUERY, text_2=DOCUMENTS, truncate_prompt_tokens=9)
    assert [each["score"] for each in scored["data"]] == pytest.approx(scores, rel=1e-4)
    order = np.argsort(scores)[::-1][:2].tolist()
    assert [each["index"] for each in ranked["results"]] == order
    assert ranked["results"][0]["relevance_score"] == pytest.approx(max(scores), rel=1e-4)
    assert ranked["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
    score = told["results"][0]["relevance_score"]
    assert score == pytest.approx(expected(DOCUMENTS[0], "Find a fox."), rel=1e-4)
    assert score != pytest.approx(scores[0], rel=1e-3)
    assert cut["error"]["param"] == "truncate_prompt_tokens"
