"""What this server answers: every path with its handler, and the body that a client sends there.

Must not know ports, keys or how errors look: server.py puts the border around these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
from aiohttp import web

from aserve.http.body import read_body
from aserve.http.health import health_response, metrics_response
from aserve.http.openai import tokens
from aserve.http.openai.chat import ChatDialect, chat_call
from aserve.http.openai.completions import CompletionDialect, completion_call
from aserve.http.openai.embeddings import embeddings
from aserve.http.openai.models import model_list, one_model
from aserve.http.openai.respond import respond
from aserve.http.openai.responses import handlers as responses
from aserve.http.openai.responses.body import ResponseBody
from aserve.http.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from aserve.http.origin import origin_of
from aserve.http.state import HttpContext
from aserve.http.websocket import connect

T = TypeVar("T", bound=msgspec.Struct)
Answer: TypeAlias = Callable[[web.Request, HttpContext], Awaitable[web.StreamResponse]]
AnswerBody: TypeAlias = Callable[[web.Request, HttpContext, T], Awaitable[web.StreamResponse]]

PAGE = (Path(__file__).parent / "static" / "index.html").read_bytes()


@dataclass(frozen=True, slots=True)
class Route:
    """`body` is what is read there, None for nothing; tests make wrong ones of every kind."""

    method: str
    path: str
    answer: Answer
    body: type[msgspec.Struct] | None = None


def post(path: str, kind: type[T], answer: AnswerBody[T]) -> Route:
    async def read_and_answer(request: web.Request, context: HttpContext) -> web.StreamResponse:
        return await answer(request, context, await read_body(request, kind))

    return Route("POST", path, read_and_answer, kind)


def get(path: str, answer: Answer) -> Route:
    return Route("GET", path, answer)


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


async def models(_: web.Request, context: HttpContext) -> web.Response:
    return web.Response(body=model_list(context), content_type="application/json")


async def model(request: web.Request, context: HttpContext) -> web.Response:
    body = one_model(context, request.match_info["name"])
    return web.Response(body=body, content_type="application/json")


async def health(_: web.Request, context: HttpContext) -> web.Response:
    return health_response(context.state)


async def metrics(_: web.Request, context: HttpContext) -> web.Response:
    return metrics_response(context.registry)


async def index(_: web.Request, __: HttpContext) -> web.Response:
    return web.Response(body=PAGE, content_type="text/html", charset="utf-8")


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
    get("/v1/models", models),
    get("/v1/models/{name:.+}", model),  # a name may have slashes
    get("/health", health),
    get("/metrics", metrics),
    get("/", index),
)
