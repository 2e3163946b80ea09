"""Ollama's endpoints about models, and its embeddings: /api/tags, show, ps, version and embed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from aserve.http.control.info import read_version
from aserve.http.delivery import json_response, send_json
from aserve.http.long_json import JsonEach, pieces_of
from aserve.http.ollama.body import LATEST, check_keep_alive, plain_name
from aserve.http.ollama.chat import NANOSECONDS, ollama_error
from aserve.http.openai.checks import check_model
from aserve.http.openai.embeddings import embed, shorten
from aserve.http.openai.schema import EmbeddingBody
from aserve.http.route import Route, post
from aserve.http.state import HttpContext, origin_of
from aserve.messages.base import array_f32

NO_DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


class ShowBody(msgspec.Struct, kw_only=True):
    """`name` is the older form of `model`. The default is the server's first model."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class EmbedBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


async def tags(_: web.Request, context: HttpContext) -> web.Response:
    return json_response({"models": [*_models(context)]})


async def ps(_: web.Request, context: HttpContext) -> web.Response:
    """Lists the loaded model, which does not expire."""
    loaded = {"expires_at": "2318-01-01T00:00:00Z", "size_vram": 0}
    return json_response({"models": [model | loaded for model in _models(context)]})


async def show(_: web.Request, context: HttpContext, body: ShowBody) -> web.Response:
    name = plain_name(body.model or body.name)
    if name is not None:
        check_model(name, context.served_names)
    state = context.state
    capabilities = ["completion"]
    if state.parsers.tools is not None:
        capabilities.append("tools")
    if state.parsers.reasoning is not None:
        capabilities.append("thinking")
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": NO_DETAILS,
            "model_info": {
                "general.architecture": "aserve",
                "aserve.context_length": state.max_model_len,
            },
            "capabilities": capabilities,
            "modified_at": _created(context),
        }
    )


async def embeddings(
    request: web.Request, context: HttpContext, body: EmbedBody
) -> web.StreamResponse:
    start_s = time.monotonic()
    check_keep_alive(body.keep_alive)
    embedding = EmbeddingBody(
        model=plain_name(body.model),
        input=[*body.input] if isinstance(body.input, list) else body.input,
        dimensions=body.dimensions,
        truncate_prompt_tokens=None if body.truncate is False else -1,
        truncation_side="right",
    )
    chunks = await embed(context, embedding, origin_of(request, context))
    vectors = [shorten(array_f32(chunk.embedding), body.dimensions) for chunk in chunks]
    answer = {
        "model": embedding.model or context.model_names[0],
        "embeddings": JsonEach(lambda: (vector.tolist() for vector in vectors)),
        "total_duration": int((time.monotonic() - start_s) * NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": sum(chunk.usage.prompt_tokens for chunk in chunks),
    }
    return await send_json(request, pieces_of(answer), timeout_s=context.options.write_timeout)


def _models(context: HttpContext) -> Iterator[dict[str, Any]]:
    for name in context.served_names:
        tagged = name if ":" in name else name + LATEST
        yield {
            "name": tagged,
            "model": tagged,
            "modified_at": _created(context),
            "size": 0,
            "digest": "",
            "details": NO_DETAILS,
        }


def _created(context: HttpContext) -> str:
    return datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z")


ROUTES = (
    Route("GET", "/api/tags", tags, errors=ollama_error),
    Route("GET", "/api/ps", ps, errors=ollama_error),
    Route("GET", "/api/version", read_version, errors=ollama_error),
    post("/api/show", ShowBody, show, errors=ollama_error),
    post("/api/embed", EmbedBody, embeddings, errors=ollama_error),
)
