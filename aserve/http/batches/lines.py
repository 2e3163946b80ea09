"""Answers one line of a batch as its endpoint would answer it, by the same code, at the lowest
priority.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import msgspec

from aserve.batches.lines import LineAnswer
from aserve.batches.records import BatchLine
from aserve.errors import AserveError, InvalidRequest
from aserve.http.abort import ABORTED
from aserve.http.body import parse_body
from aserve.http.errors import RequestFailed, error_body, info_of
from aserve.http.json_bounds import check_json_bounds
from aserve.http.long_json import pieces_of
from aserve.http.openai.answers import ChoiceT, Dialect
from aserve.http.openai.call import Origin
from aserve.http.openai.chat import chat_dialect
from aserve.http.openai.choices import whole_answer
from aserve.http.openai.completions import CompletionDialect, completion_call
from aserve.http.openai.embeddings import answer_of, embed
from aserve.http.openai.limits import Caller
from aserve.http.openai.schema import ChatBody, CompletionBody, EmbeddingBody
from aserve.http.receipts import receipt_facts, with_receipt
from aserve.http.state import HttpContext, origin_for
from aserve.http.unknown_fields import ignored_fields
from aserve.messages.base import MAX_INT32

RETRY_S = 5.0  # after an answer that says the engine is full, or not there
AGAIN = frozenset({429, 503})  # statuses after which a line is tried again
LOWEST_PRIORITY = MAX_INT32

BodyT = TypeVar("BodyT", ChatBody, CompletionBody)
LineT = TypeVar("LineT", ChatBody, CompletionBody, EmbeddingBody)
Answer: TypeAlias = Callable[[HttpContext, Origin, bytes], Awaitable[bytes]]


async def _chat(context: HttpContext, origin: Origin, data: bytes) -> bytes:
    body = _read(data, ChatBody)
    body.priority = LOWEST_PRIORITY
    facts = await receipt_facts(body, context)
    dialect = chat_dialect(_unstreamed(body), origin)
    return await _generated(context, with_receipt(dialect, facts, context))


async def _completion(context: HttpContext, origin: Origin, data: bytes) -> bytes:
    body = _read(data, CompletionBody)
    body.priority = LOWEST_PRIORITY
    facts = await receipt_facts(body, context)
    dialect = CompletionDialect(completion_call(_unstreamed(body), origin))
    return await _generated(context, with_receipt(dialect, facts, context))


async def _embedding(context: HttpContext, origin: Origin, data: bytes) -> bytes:
    body = _read(data, EmbeddingBody)
    body.priority = LOWEST_PRIORITY
    in_order = await embed(context, body, origin)
    model = body.model or context.model_names[0]
    return b"".join(pieces_of(answer_of(body, in_order, model)))


def _read(data: bytes, kind: type[LineT]) -> LineT:
    body = parse_body(data, kind, where="body")
    ignored_fields(parse_body(data, dict[str, msgspec.Raw], where="body"), kind, where="body")
    return body


ENDPOINTS: dict[str, Answer] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embedding,
}


class HttpLineWork:
    """Answers the lines of batches by the code that answers requests."""

    def __init__(self, context: HttpContext) -> None:
        self.max_line = context.options.max_body_size
        self._context = context

    def parse(self, data: bytes) -> BatchLine:
        check_json_bounds(data)
        return parse_body(data, BatchLine)

    def num_rows(self) -> int:
        spec = self._context.state.spec
        return 0 if spec is None else spec.max_rows

    def num_open(self) -> int:
        return self._context.gateway.num_open

    async def answer(self, line: BatchLine, request_id: str, caller: bytes) -> LineAnswer:
        origin = origin_for(msgspec.json.decode(caller, type=Caller), request_id, self._context)
        try:
            _check_open(self._context)  # until then an adapter of the line may be unknown
            body = await ENDPOINTS[line.url](self._context, origin, bytes(line.body))
        except (AserveError, RequestFailed) as error:
            info = info_of(error)
            # A pause ends what runs.
            is_paused = info.code == ABORTED and self._context.state.is_held
            is_again = info.status in AGAIN or is_paused
            again_s = (info.retry_after_s or RETRY_S) if is_again else None
            return LineAnswer(info.status, error_body(info), again_s)
        return LineAnswer(200, body)


def _check_open(context: HttpContext) -> None:
    if (refusal := context.state.refusal()) is not None:
        raise refusal


async def _generated(context: HttpContext, dialect: Dialect[ChoiceT]) -> bytes:
    _check_open(context)  # again: a receipt may have taken long
    request_stream = context.gateway.open(*dialect.call.requests)
    try:
        return b"".join(await whole_answer(request_stream, dialect))
    finally:
        request_stream.cancel()


def _unstreamed(body: BodyT) -> BodyT:
    if body.stream:
        raise InvalidRequest(
            "Unsupported value for 'body.stream': a line of a batch is answered whole.",
            param="body.stream",
            code="unsupported_value",
        )
    return body
