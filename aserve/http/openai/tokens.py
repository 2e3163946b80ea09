"""POST /tokenize and /detokenize, with vLLM's field names.

/tokenize returns the ids that the engine would get for the same prompt.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.openai.chat_plan import prompt_of_body
from aserve.http.openai.checks import check_model
from aserve.http.openai.limits import check_length
from aserve.http.openai.schema import DetokenizeBody, TokenizeBody
from aserve.http.route import post
from aserve.http.state import HttpContext
from aserve.messages.requests import Prompt, TextPrompt
from aserve.text.prompt import PromptEncoder

MAX_TOKENS = 1 << 20  # token ids in one call of /detokenize


class TokensAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TextAnswer(msgspec.Struct):
    prompt: str


async def tokenize(_: web.Request, context: HttpContext, body: TokenizeBody) -> web.Response:
    _check(context, body.model)
    return _answer(
        await context.tokenize_service.run_on(
            _prompt_of(body), lambda encoder, prompt: tokens_of(body, prompt, encoder)
        )
    )


async def detokenize(_: web.Request, context: HttpContext, body: DetokenizeBody) -> web.Response:
    _check(context, body.model)
    return _answer(await context.tokenize_service.run(lambda encoder: text_of(body, encoder)))


def _check(context: HttpContext, model: str | None) -> None:
    if model is not None:
        check_model(model, context.served_names)
    refusal = context.state.refusal()
    if refusal is not None:
        raise refusal


def _answer(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def tokens_of(body: TokenizeBody, prompt: Prompt, encoder: PromptEncoder) -> bytes:
    """Encodes a prompt. `token_strs` are the tokens as the vocabulary spells them."""
    ids = encoder.encode(prompt)
    strs = [*map(encoder.tokenizer.token, ids)] if body.return_token_strs else None
    return msgspec.json.encode(TokensAnswer(len(ids), encoder.limits.max_model_len, ids, strs))


def text_of(body: DetokenizeBody, encoder: PromptEncoder) -> bytes:
    check_length(body.tokens, MAX_TOKENS, param="tokens")
    encoder.check_ids(body.tokens, param="tokens")
    text = encoder.tokenizer.decode(body.tokens, skip_special=False)
    return msgspec.json.encode(TextAnswer(text))


def _prompt_of(body: TokenizeBody) -> Prompt:
    if body.prompt is None:
        return prompt_of_body(body)
    if body.messages is not None:
        raise InvalidRequest(
            "Invalid 'messages': give either 'prompt' or 'messages', not both.",
            param="messages",
            code="invalid_value",
        )
    return TextPrompt(body.prompt, body.add_special_tokens is not False)


ROUTES = (
    post("/tokenize", TokenizeBody, tokenize),
    post("/v1/tokenize", TokenizeBody, tokenize),
    post("/detokenize", DetokenizeBody, detokenize),
    post("/v1/detokenize", DetokenizeBody, detokenize),
)
