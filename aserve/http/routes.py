"""The routes of the HTTP server, and the handlers of completions and chat."""

from __future__ import annotations

from aiohttp import web

from aserve.http import abort, fork, openapi, page, probes, running
from aserve.http.anthropic import messages as anthropic
from aserve.http.batches import handlers as batches
from aserve.http.control import info, loads, parsing, registry, render, settings
from aserve.http.generate import llama_cpp, sglang, tgi
from aserve.http.lora import handlers as lora
from aserve.http.ollama import chat as ollama
from aserve.http.ollama import models as ollama_models
from aserve.http.openai import models, tokens
from aserve.http.openai.chat import chat_dialect
from aserve.http.openai.completions import CompletionDialect, completion_call
from aserve.http.openai.respond import respond
from aserve.http.openai.schema import ChatBody, CompletionBody
from aserve.http.receipts import receipt_facts, with_receipt
from aserve.http.responses import compact, websocket
from aserve.http.responses import conversation_handlers as conversations
from aserve.http.responses import handlers as responses
from aserve.http.route import post
from aserve.http.scoring import classification
from aserve.http.scoring import similarity as scoring
from aserve.http.state import HttpContext, origin_of
from aserve.http.streams import handlers as streams


async def completions(
    request: web.Request, context: HttpContext, body: CompletionBody
) -> web.StreamResponse:
    facts = await receipt_facts(body, context)
    dialect = CompletionDialect(completion_call(body, origin_of(request, context)))
    return await respond(request, context, with_receipt(dialect, facts, context))


async def chat_completions(
    request: web.Request, context: HttpContext, body: ChatBody
) -> web.StreamResponse:
    facts = await receipt_facts(body, context)
    dialect = chat_dialect(body, origin_of(request, context))
    return await respond(request, context, with_receipt(dialect, facts, context))


ROUTES = (
    post("/v1/completions", CompletionBody, streams.resumable("cmpl-", completions)),
    post("/v1/chat/completions", ChatBody, streams.resumable("chatcmpl-", chat_completions)),
    *streams.ROUTES,
    *scoring.ROUTES,
    *classification.ROUTES,
    *tokens.ROUTES,
    *responses.ROUTES,
    *compact.ROUTES,
    *conversations.ROUTES,
    *websocket.ROUTES,
    *models.ROUTES,
    *info.ROUTES,
    *loads.ROUTES,
    *registry.ROUTES,
    *settings.ROUTES,
    *render.ROUTES,
    *parsing.ROUTES,
    *probes.ROUTES,
    *sglang.ROUTES,
    *tgi.ROUTES,
    *llama_cpp.ROUTES,
    *abort.ROUTES,
    *running.ROUTES,
    *fork.ROUTES,
    *lora.ROUTES,
    *anthropic.ROUTES,
    *ollama.ROUTES,
    *ollama_models.ROUTES,
    *openapi.ROUTES,
    *batches.ROUTES,
    *page.ROUTES,
)
