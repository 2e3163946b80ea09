"""POST /classify and /pooling, as vLLM has them, and the scores of pairs by a cross-encoder.

A model with a classification head returns one score for each of its labels. `use_activation` makes
probabilities of them, which is the default: a sigmoid of one score, a softmax of several, or what
the model's configuration names.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Literal

import msgspec
import numpy as np
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.delivery import json_response, send_json
from aserve.http.long_json import JsonEach, pieces_of
from aserve.http.openai.embeddings import EmbeddingUsage, embedding_requests, pool, prompted
from aserve.http.openai.json_values import encode_json
from aserve.http.openai.schema import EmbeddingBody, Side, TextsOrIds
from aserve.http.route import post
from aserve.http.state import HttpContext, origin_of
from aserve.messages.base import ArrayF32, array_f32
from aserve.messages.output import OutputChunk
from aserve.messages.requests import EMBED, GenerateRequest, TextPrompt
from aserve.text.prompt import PromptEncoder


class PoolingBody(msgspec.Struct, kw_only=True):
    """`activation` is an older name of `use_activation`."""

    model: str | None = None
    input: TextsOrIds | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    prompt_name: str | None = None
    user: str | None = None
    priority: int | None = None

    @property
    def is_activated(self) -> bool:
        return self.use_activation is not False and self.activation is not False

    def embedding(self) -> EmbeddingBody:
        return EmbeddingBody(
            model=self.model,
            input=self.input,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            prompt_name=self.prompt_name,
            priority=self.priority,
        )


class LabelProbabilities(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[LabelProbabilities]
    usage: EmbeddingUsage
    object: str = "list"


class PooledData(msgspec.Struct):
    index: int
    data: list[float] | str
    object: str = "pooling"


class PoolingAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    data: JsonEach
    usage: EmbeddingUsage
    object: str = "list"


async def classify(
    request: web.Request, context: HttpContext, body: PoolingBody
) -> web.StreamResponse:
    origin, given = origin_of(request, context), body.embedding()
    if context.state.task != "classify":
        embedding_requests(given, origin)  # what is wrong in the body comes first
        raise InvalidRequest(
            "This model has no labels, so it cannot classify. POST /v1/embeddings returns "
            "embeddings; a model that classifies has an architecture such as "
            "BertForSequenceClassification.",
            param="model",
            code="model_does_not_classify",
        )
    chunks = await pool(context, prompted(given, context), origin)
    data = [
        LabelProbabilities(
            index, context.state.pooling.label(int(scores.argmax())), *_listed(scores)
        )
        for index, scores in enumerate(_scores(context, chunks, is_activated=body.is_activated))
    ]
    model = body.model or context.model_names[0]
    answer = ClassifyAnswer(
        f"classify-{origin.request_id}", origin.created, model, data, usage_of(chunks)
    )
    return json_response(answer)


async def pooling(
    request: web.Request, context: HttpContext, body: PoolingBody
) -> web.StreamResponse:
    """Answers with the embeddings of a model without labels, or else with the scores of labels."""
    origin, given = origin_of(request, context), body.embedding()
    chunks = await pool(context, prompted(given, context), origin)
    if context.state.task == "classify":
        vectors = _scores(context, chunks, is_activated=body.is_activated)
    else:
        vectors = [array_f32(chunk.embedding) for chunk in chunks]
    is_packed = body.encoding_format == "base64"
    data = JsonEach(
        lambda: (
            PooledData(index, _as_base64(vector) if is_packed else vector.tolist())
            for index, vector in enumerate(vectors)
        )
    )
    model = body.model or context.model_names[0]
    answer = PoolingAnswer(
        f"pool-{origin.request_id}", origin.created, model, data, usage_of(chunks)
    )
    return await send_json(request, pieces_of(answer), timeout_s=context.options.write_timeout)


async def score_pairs(
    request: web.Request,
    context: HttpContext,
    given: EmbeddingBody,
    pairs: Sequence[tuple[str, str]],
    *,
    param: str,
) -> tuple[ArrayF32, EmbeddingUsage]:
    """Returns the cross-encoder's score of each pair, float32 [pairs]. `given` has the other fields
    of the request."""
    longest = context.state.max_model_len or 0
    asked = given.truncate_prompt_tokens
    max_len = longest if asked == -1 else asked
    ids = await context.tokenize_service.run(partial(_encode_pairs, context, pairs, max_len))
    body = msgspec.structs.replace(given, input=[*ids], truncate_prompt_tokens=None)
    chunks = await pool(context, body, origin_of(request, context), param=param)
    scores = np.stack(_scores(context, chunks, is_activated=True))
    if scores.shape[1] != 1:
        raise InvalidRequest(
            f"This model has {scores.shape[1]} labels, and a score is that of a model with one: "
            "use POST /classify.",
            param="model",
            code="invalid_value",
        )
    return scores[:, 0], usage_of(chunks)


def usage_of(chunks: Sequence[OutputChunk]) -> EmbeddingUsage:
    num_tokens = sum(chunk.usage.prompt_tokens for chunk in chunks)
    return EmbeddingUsage(num_tokens, num_tokens)


def _encode_pairs(
    context: HttpContext,
    pairs: Sequence[tuple[str, str]],
    max_len: int | None,
    encoder: PromptEncoder,
) -> list[list[int]]:
    """A pair without a bound may be too long for the context, with which its request is refused."""
    encode = context.state.pooling.encode_pair
    if encode is None:
        raise InvalidRequest("This model has no tokenizer of texts.", param="model")
    for text in chain.from_iterable(pairs):
        encode_json(text, param="text")
        encoder.check_size(
            GenerateRequest(
                "", TextPrompt(text), EMBED, embeds=True, truncate_prompt_tokens=max_len
            )
        )
    return [encode(first, second, max_len or sys.maxsize) for first, second in pairs]


def _scores(
    context: HttpContext, chunks: Sequence[OutputChunk], *, is_activated: bool
) -> list[ArrayF32]:
    scores = [array_f32(chunk.embedding) for chunk in chunks]
    return [context.state.pooling.activated(each) for each in scores] if is_activated else scores


def _listed(scores: ArrayF32) -> tuple[list[float], int]:
    return scores.tolist(), len(scores)


def _as_base64(vector: ArrayF32) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


ROUTES = (
    post("/classify", PoolingBody, classify),
    post("/v1/classify", PoolingBody, classify),
    post("/pooling", PoolingBody, pooling),
    post("/v1/pooling", PoolingBody, pooling),
)
