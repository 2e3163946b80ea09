"""The routes of the HTTP server, and the handlers of /health, /metrics and the start page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from aserve.http.body import read_body
from aserve.http.openai import models, tokens
from aserve.http.openai.chat import ChatDialect, chat_call
from aserve.http.openai.completions import CompletionDialect, completion_call
from aserve.http.openai.embeddings import embeddings
from aserve.http.openai.respond import respond
from aserve.http.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from aserve.http.responses import handlers as responses
from aserve.http.responses.body import ResponseBody
from aserve.http.responses.websocket import connect
from aserve.http.state import HttpContext, ServerState, origin_of

STUCK_S = 10.0  # a running engine sends a message every second
T = TypeVar("T", bound=msgspec.Struct)
Handler: TypeAlias = Callable[[web.Request, HttpContext], Awaitable[web.StreamResponse]]
BodyHandler: TypeAlias = Callable[[web.Request, HttpContext, T], Awaitable[web.StreamResponse]]

START_PAGE = (Path(__file__).parent / "static" / "index.html").read_bytes()


@dataclass(frozen=True, slots=True)
class Route:
    """A method and path with its handler. `body` is the record of the request body, for tests."""

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None


def post(path: str, kind: type[T], handler: BodyHandler[T]) -> Route:
    async def read_and_handle(request: web.Request, context: HttpContext) -> web.StreamResponse:
        return await handler(request, context, await read_body(request, kind))

    return Route("POST", path, read_and_handle, kind)


def get(path: str, handler: Handler) -> Route:
    return Route("GET", path, handler)


async def completions(
    request: web.Request, context: HttpContext, body: CompletionBody
) -> web.StreamResponse:
    call = completion_call(body, origin_of(request, context))
    return await respond(request, context, CompletionDialect(call))


async def chat_completions(
    request: web.Request, context: HttpContext, body: ChatBody
) -> web.StreamResponse:
    call = chat_call(body, origin_of(request, context))
    return await respond(request, context, ChatDialect(call))


async def health(_: web.Request, context: HttpContext) -> web.Response:
    return health_response(context.state)


class HealthBody(msgspec.Struct, omit_defaults=True):
    status: str
    reason: str = ""


def health_response(state: ServerState) -> web.Response:
    body = health_of(state)
    return web.Response(
        body=msgspec.json.encode(body),
        status=200 if body.status == "ready" else 503,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def health_of(state: ServerState) -> HealthBody:
    """Reports an engine that sends nothing as stuck. Its requests wait, because it may go on."""
    if state.phase != "ready":
        return HealthBody(state.phase, state.reason)
    age_s = state.engine_age_s()
    if age_s > STUCK_S:
        return HealthBody("stuck", f"the engine has sent nothing for {age_s:.0f} seconds")
    return HealthBody("ready")


async def metrics(_: web.Request, context: HttpContext) -> web.Response:
    return metrics_response(context.registry)


def metrics_response(registry: CollectorRegistry) -> web.Response:
    return web.Response(
        body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )


async def index(_: web.Request, __: HttpContext) -> web.Response:
    return web.Response(body=START_PAGE, content_type="text/html", charset="utf-8")


ROUTES = (
    post("/v1/completions", CompletionBody, completions),
    post("/v1/chat/completions", ChatBody, chat_completions),
    post("/v1/embeddings", EmbeddingBody, embeddings),
    post("/tokenize", TokenizeBody, tokens.tokenize),
    post("/v1/tokenize", TokenizeBody, tokens.tokenize),
    post("/detokenize", DetokenizeBody, tokens.detokenize),
    post("/v1/detokenize", DetokenizeBody, tokens.detokenize),
    post("/v1/responses", ResponseBody, responses.create),
    get("/v1/responses", connect),
    get("/v1/responses/{id}", responses.read),
    Route("DELETE", "/v1/responses/{id}", responses.delete),
    Route("POST", "/v1/responses/{id}/cancel", responses.cancel),
    get("/v1/responses/{id}/input_items", responses.input_items),
    get("/v1/models", models.list_models),
    get("/v1/models/{name:.+}", models.read_model),  # a name may have slashes
    get("/health", health),
    get("/metrics", metrics),
    get("/", index),
)
