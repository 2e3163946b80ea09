"""Scores of pairs of texts, and documents ranked by a query: the score of a cross-encoder, that of
a reranker that generates, or for other models the cosine of the embeddings, as in vLLM. /rerank has
the fields of Jina and Cohere, and /score those of vLLM.
"""

from __future__ import annotations

import msgspec
import numpy as np
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.delivery import json_response
from aserve.http.openai.embeddings import EmbeddingUsage, embed, embeddings
from aserve.http.openai.limits import (
    MAX_SEQUENCES,
    RANGES,
    Range,
    check_length,
    check_range,
    check_truncation,
    check_within,
)
from aserve.http.openai.schema import EmbeddingBody, Side
from aserve.http.route import post
from aserve.http.scoring.classification import score_pairs, usage_of
from aserve.http.scoring.judgements import answer_judgements, encode_judgements
from aserve.http.scoring.labels import ScoreBody, score_labels
from aserve.http.state import HttpContext, origin_of
from aserve.messages.base import ArrayF32, array_f32


class RerankDocument(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct, kw_only=True):
    """`top_n` returns only the best documents. `max_tokens_per_doc` is Cohere's name of
    `truncate_prompt_tokens`, which keeps the last tokens of each text. `instruct` is what a
    reranker that generates is told.
    """

    model: str | None = None
    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    max_tokens_per_doc: int | None = None
    instruct: str | None = None
    priority: int | None = None
    user: str | None = None


class RerankResult(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankAnswer(msgspec.Struct):
    id: str
    model: str
    results: list[RerankResult]  # the best first
    usage: EmbeddingUsage


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


async def rerank(
    request: web.Request, context: HttpContext, body: RerankBody
) -> web.StreamResponse:
    _check_numbers(body)
    check_length(body.documents, MAX_SEQUENCES - 1, param="documents")
    if body.top_n is not None:
        check_within(body.top_n, Range(0, MAX_SEQUENCES), param="top_n")
    if body.max_tokens_per_doc is not None:
        check_within(
            body.max_tokens_per_doc, RANGES["truncate_prompt_tokens"], param="max_tokens_per_doc"
        )
    check_truncation(body.max_tokens_per_doc, param="max_tokens_per_doc")
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    if not texts:
        raise _empty("documents")
    truncated = body.truncate_prompt_tokens or body.max_tokens_per_doc
    given = EmbeddingBody(
        model=body.model,
        input=[body.query, *texts],
        truncate_prompt_tokens=truncated,
        truncation_side=body.truncation_side,
        priority=body.priority,
    )
    pairs = [(body.query, text) for text in texts]
    model = body.model or context.model_names[0]
    answer_id = f"rerank-{origin_of(request, context).request_id}"
    prompts = await encode_judgements(context, given, pairs, instruct=body.instruct)
    if prompts is not None:
        return await answer_judgements(
            request,
            context,
            given,
            prompts,
            param="documents",
            write=lambda scores, usage: msgspec.json.encode(
                RerankAnswer(answer_id, model, _ranked(scores, texts, body), usage)
            ),
        )
    if context.state.task == "classify":
        scores, usage = await score_pairs(request, context, given, pairs, param="documents")
    else:
        vectors, usage = await _embedded(request, context, given, param="documents")
        scores = vectors[1:] @ vectors[0]
    return json_response(RerankAnswer(answer_id, model, _ranked(scores, texts, body), usage))


def _ranked(scores: ArrayF32, texts: list[str], body: RerankBody) -> list[RerankResult]:
    shows = body.return_documents is not False
    return [
        RerankResult(index, float(scores[index]), RerankDocument(texts[index]) if shows else None)
        for index in map(int, np.argsort(-scores, kind="stable")[: body.top_n])
    ]


async def score(request: web.Request, context: HttpContext, body: ScoreBody) -> web.StreamResponse:
    """Scores pairs of texts, or with `label_token_ids` the next tokens of prompts, as SGLang."""
    _check_numbers(body)
    if body.label_token_ids is not None:
        return await score_labels(request, context, body)
    ones, others = _list_of(body.text_1, "text_1"), _list_of(body.text_2, "text_2")
    if len(ones) not in (1, len(others)):
        raise InvalidRequest(
            f"Invalid 'text_1': it has {len(ones)} texts, and 'text_2' has {len(others)}. Give one "
            "text, or as many as there are in 'text_2'.",
            param="text_1",
            code="invalid_value",
        )
    check_length(others, MAX_SEQUENCES // 2, param="text_2")
    given = EmbeddingBody(
        model=body.model,
        input=[*ones, *others],
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        priority=body.priority,
    )
    firsts = ones if len(ones) == len(others) else ones * len(others)
    pairs = list(zip(firsts, others, strict=True))
    origin = origin_of(request, context)
    model = body.model or context.model_names[0]

    def written(scores: ArrayF32, usage: EmbeddingUsage) -> ScoreAnswer:
        data = [Score(index, float(value)) for index, value in enumerate(scores)]
        return ScoreAnswer(f"score-{origin.request_id}", origin.created, model, data, usage)

    prompts = await encode_judgements(context, given, pairs, instruct=body.instruct)
    if prompts is not None:
        return await answer_judgements(
            request,
            context,
            given,
            prompts,
            param="text_2",
            write=lambda scores, usage: msgspec.json.encode(written(scores, usage)),
        )
    if context.state.task == "classify":
        scores, usage = await score_pairs(request, context, given, pairs, param="text_2")
    else:
        vectors, usage = await _embedded(request, context, given, param="text_2")
        scores = (vectors[: len(ones)] * vectors[len(ones) :]).sum(axis=1)
    return json_response(written(scores, usage))


async def _embedded(
    request: web.Request, context: HttpContext, given: EmbeddingBody, *, param: str
) -> tuple[ArrayF32, EmbeddingUsage]:
    """Returns the embeddings, [texts, size], each of length 1."""
    chunks = await embed(context, given, origin_of(request, context), param=param)
    vectors = np.stack([array_f32(chunk.embedding) for chunk in chunks])
    lens = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lens, np.finfo(np.float32).tiny), usage_of(chunks)


def _check_numbers(body: RerankBody | ScoreBody) -> None:
    for name in ("truncate_prompt_tokens", "priority"):
        value = getattr(body, name)
        if value is not None:
            check_range(value, name)
    check_truncation(body.truncate_prompt_tokens)


def _list_of(texts: str | list[str] | None, name: str) -> list[str]:
    if not texts:
        raise _empty(name)
    return [texts] if isinstance(texts, str) else texts


def _empty(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{name}'. Give at least one text.",
        param=name,
        code="missing_required_parameter",
    )


ROUTES = (
    post("/v1/embeddings", EmbeddingBody, embeddings),
    post("/rerank", RerankBody, rerank),
    post("/v1/rerank", RerankBody, rerank),
    post("/v2/rerank", RerankBody, rerank),
    post("/score", ScoreBody, score),
    post("/v1/score", ScoreBody, score),
)
