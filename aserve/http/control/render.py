"""Shows the prompt that a chat becomes, as text and as token ids, without generating anything."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.openai.chat import chat_dialect
from aserve.http.openai.chat_plan import prompt_of_body
from aserve.http.openai.checks import check_model
from aserve.http.openai.schema import ChatBody, TokenizeBody
from aserve.http.route import post
from aserve.http.state import HttpContext, origin_of
from aserve.messages.requests import ChatPrompt, Prompt
from aserve.text.prompt import PromptEncoder


class Rendered(msgspec.Struct):
    prompt: str
    token_ids: list[int]
    count: int
    max_model_len: int


class TemplateAnswer(msgspec.Struct):
    prompt: str


async def render(_: web.Request, context: HttpContext, body: TokenizeBody) -> web.Response:
    """Renders the messages of a chat."""
    return await _run(context, _prompt_of(body, context), rendered)


async def render_chat(request: web.Request, context: HttpContext, body: ChatBody) -> web.Response:
    """Checks a whole body of /v1/chat/completions and renders its prompt."""
    prompt = chat_dialect(body, origin_of(request, context)).call.requests[0].prompt
    return await _run(context, prompt, rendered)


async def apply_template(_: web.Request, context: HttpContext, body: TokenizeBody) -> web.Response:
    """Answers llama.cpp's endpoint, which returns the text alone."""
    prompt = _prompt_of(body, context)
    return await _run(context, prompt, template_applied)


async def _run(
    context: HttpContext, prompt: Prompt, work: Callable[[PromptEncoder, Prompt], bytes]
) -> web.Response:
    refusal = context.state.refusal()
    if refusal is not None:
        raise refusal
    answer = await context.tokenize_service.run_on(prompt, work)
    return web.Response(body=answer, content_type="application/json")


def _prompt_of(body: TokenizeBody, context: HttpContext) -> ChatPrompt:
    if body.model is not None:
        check_model(body.model, context.served_names)
    if body.prompt is not None:
        raise InvalidRequest(
            "Unsupported parameter: 'prompt'. A text is its own prompt; give 'messages'.",
            param="prompt",
            code="unsupported_parameter",
        )
    return prompt_of_body(body)


def template_applied(encoder: PromptEncoder, prompt: Prompt) -> bytes:
    assert isinstance(prompt, ChatPrompt)
    return msgspec.json.encode(TemplateAnswer(encoder.render(prompt)))


def rendered(encoder: PromptEncoder, prompt: Prompt) -> bytes:
    assert isinstance(prompt, ChatPrompt)
    ids = encoder.encode(prompt)
    return msgspec.json.encode(
        Rendered(encoder.render(prompt), ids, len(ids), encoder.limits.max_model_len)
    )


ROUTES = (
    post("/render", TokenizeBody, render),
    post("/v1/chat/completions/render", ChatBody, render_chat),
    post("/apply-template", TokenizeBody, apply_template),
)
