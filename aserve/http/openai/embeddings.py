"""POST /v1/embeddings: returns one vector of length 1 for each text or list of token ids."""

from __future__ import annotations

import base64
from functools import partial

import msgspec
import numpy as np
from aiohttp import web

from aserve.errors import ErrorInfo, InvalidRequest
from aserve.http.delivery import send_json
from aserve.http.errors import RequestFailed
from aserve.http.long_json import JsonEach, pieces_of
from aserve.http.openai.call import Origin
from aserve.http.openai.checks import check_model
from aserve.http.openai.limits import MAX_SEQUENCES, check_length, check_range, check_truncation
from aserve.http.openai.schema import EmbeddingBody, prompts_of
from aserve.http.state import HttpContext, origin_of
from aserve.messages.base import ArrayF32, array_f32
from aserve.messages.output import OutputChunk
from aserve.messages.requests import EMBED, GenerateRequest


class Embedding(msgspec.Struct):
    """One vector: a list of floats, or the base64 of its little-endian float32 values."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(msgspec.Struct):
    data: JsonEach
    model: str
    usage: EmbeddingUsage
    object: str = "list"


async def embeddings(
    request: web.Request, context: HttpContext, body: EmbeddingBody
) -> web.StreamResponse:
    """Answers the call. A client that disconnects cancels this handler, and so its requests."""
    in_order = await embed(context, body, origin_of(request, context))
    model = body.model or context.model_names[0]
    answer = answer_of(body, in_order, model)
    return await send_json(request, pieces_of(answer), timeout_s=context.options.write_timeout)


async def embed(
    context: HttpContext, body: EmbeddingBody, origin: Origin, *, param: str = "input"
) -> list[OutputChunk]:
    """Returns the one chunk of each prompt, in their order. `param` is their field."""
    check_embeds(context)
    return await pool(context, prompted(body, context), origin, param=param)


async def pool(
    context: HttpContext, body: EmbeddingBody, origin: Origin, *, param: str = "input"
) -> list[OutputChunk]:
    """Does the same for every model that returns a vector, without the model's prompts. Models that
    generate keep the last tokens of a text that is truncated, and others the first ones."""
    if body.truncation_side is None and context.state.task != "generate":
        body = msgspec.structs.replace(body, truncation_side="right")
    requests = origin.completed(body.model, tuple(embedding_requests(body, origin)))
    refusal = context.state.refusal()
    if refusal is not None:
        raise refusal
    chunks: dict[str, OutputChunk] = {}
    request_stream = context.gateway.open(*requests)
    try:
        async for chunk in request_stream:
            if chunk.error is not None:
                raise RequestFailed(_with_our_param(chunk.error, param))
            chunks[chunk.request_id] = chunk
    finally:
        request_stream.cancel()
    return [chunks[each.request_id] for each in requests]


def check_embeds(context: HttpContext) -> None:
    if context.state.task == "classify":
        raise InvalidRequest(
            "This model classifies texts and has no embeddings: use POST /classify, /score or "
            "/pooling.",
            param="model",
            code="model_does_not_embed",
        )


def prompted(body: EmbeddingBody, context: HttpContext) -> EmbeddingBody:
    """Puts the prompt that the request names, or the model's default one, before each text."""
    prompt = context.state.pooling.prompt(body.prompt_name)
    if not prompt or body.input is None:
        return body
    if isinstance(body.input, str):
        return msgspec.structs.replace(body, input=prompt + body.input)
    given = [prompt + each if isinstance(each, str) else each for each in body.input]
    return msgspec.structs.replace(body, input=given)


def embedding_requests(body: EmbeddingBody, origin: Origin) -> list[GenerateRequest]:
    if body.model is not None:
        check_model(body.model, origin.model_names)
    for name in ("dimensions", "truncate_prompt_tokens", "priority", "timeout"):
        value = getattr(body, name)
        if value is not None:
            check_range(value, name)
    origin.caller.check_priority(body.priority)
    check_truncation(body.truncate_prompt_tokens)
    prompts = prompts_of(body.input, param="input")
    check_length(prompts, MAX_SEQUENCES, param="input")
    return [
        GenerateRequest(
            request_id=f"{origin.request_id}-{i}",
            prompt=prompt,
            sampling=EMBED,
            priority=body.priority or 0,
            timeout_s=body.timeout,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncates_end=body.truncation_side == "right",
            embeds=True,
            namespace=origin.caller.namespace_of(None),
            client=origin.caller.client,
        )
        for i, prompt in enumerate(prompts)
    ]


def answer_of(body: EmbeddingBody, chunks: list[OutputChunk], model: str) -> EmbeddingAnswer:
    num_tokens = sum(chunk.usage.prompt_tokens for chunk in chunks)
    vectors = [shorten(array_f32(chunk.embedding), body.dimensions) for chunk in chunks]
    data = JsonEach(lambda: map(partial(embedding_of, body), range(len(vectors)), vectors))
    return EmbeddingAnswer(data, model, EmbeddingUsage(num_tokens, num_tokens))


def embedding_of(body: EmbeddingBody, index: int, vector: ArrayF32) -> Embedding:
    if body.encoding_format == "base64":
        return Embedding(index, base64.b64encode(vector.astype("<f4").tobytes()).decode())
    return Embedding(index, vector.tolist())


def shorten(vector: ArrayF32, dimensions: int | None) -> ArrayF32:
    """Returns the first `dimensions` values, scaled to length 1 again."""
    if dimensions is None:
        return vector
    if dimensions > len(vector):
        raise InvalidRequest(
            f"Invalid 'dimensions': got {dimensions}, but this model's embeddings have only "
            f"{len(vector)}.",
            param="dimensions",
            code="integer_above_max_value",
        )
    first = vector[:dimensions]
    length = np.linalg.norm(first)
    return first / length if length else first


def _with_our_param(error: ErrorInfo, param: str) -> ErrorInfo:
    """Renames an error's field: the engine says `prompt`, the endpoint for example `input`."""
    return msgspec.structs.replace(error, param=param) if error.param == "prompt" else error
