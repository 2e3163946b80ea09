"""POST /v1/messages and /v1/messages/count_tokens, as in Anthropic's API.

An answer is a list of blocks: thinking, text and tool use. A stream begins and ends each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

from aserve.errors import ErrorInfo
from aserve.http.anthropic.body import MessagesBody, PromptBody, plan_of
from aserve.http.delivery import json_response
from aserve.http.openai.call import Call, Origin, build_call, sampling_of
from aserve.http.openai.chat_plan import ChatPlan
from aserve.http.openai.checks import check_body, check_model, check_unsupported
from aserve.http.openai.json_values import object_in
from aserve.http.openai.parsed import ParsedChoice
from aserve.http.openai.schema import GenerationBody
from aserve.http.rendering import Output, answer, choice_id_of, field_names, parsed_whole
from aserve.http.route import post
from aserve.http.sse import EVENT_STREAM
from aserve.http.state import HttpContext, origin_of
from aserve.http.streams.handlers import resumable
from aserve.messages.output import OutputChunk, Usage
from aserve.parsers.events import Content, ParsedEvent, Reasoning, ToolArguments, ToolCallStart

NAMES = {"stop": "stop_sequences", "structured_outputs": "output_config"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ErrorFields(msgspec.Struct):
    """Anthropic's fields, with the code and field that aserve's other APIs have."""

    type: str
    message: str
    code: str
    param: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorFields
    type: str = "error"


def anthropic_error(info: ErrorInfo) -> bytes:
    default = "invalid_request_error" if info.status < 500 else "api_error"
    kind = ERROR_TYPES.get(info.status, default)
    return msgspec.json.encode(ErrorBody(ErrorFields(kind, info.message, info.code, info.param)))


async def create(
    request: web.Request, context: HttpContext, body: MessagesBody
) -> web.StreamResponse:
    return await answer(request, context, messages_rendering(body, origin_of(request, context)))


def messages_rendering(body: MessagesBody, origin: Origin) -> MessagesRendering:
    generation = GenerationBody(
        model=body.model,
        stream=body.stream,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )
    with field_names(NAMES):
        check_body(generation, origin.model_names)
        _check_unsupported(body)
        plan = plan_of(body, origin.parsers)
        sampling = sampling_of(
            generation,
            max_tokens=body.max_tokens,
            logprobs=None,
            draw_seed=origin.draw_seed,
            defaults=origin.defaults,
        )
        call = build_call(
            generation,
            origin,
            prompts=[plan.prompt],
            sampling=plan.constrained(sampling),
            id_prefix="msg_",
        )
    return MessagesRendering(call, plan)


class TokenCount(msgspec.Struct):
    input_tokens: int


async def count_tokens(
    request: web.Request, context: HttpContext, body: PromptBody
) -> web.Response:
    if body.model is not None:
        check_model(body.model, context.served_names)
    refusal = context.state.refusal()
    if refusal is not None:
        raise refusal
    _check_unsupported(body)
    prompt = plan_of(body, origin_of(request, context).parsers).prompt
    count = await context.tokenize_service.count(prompt)
    return json_response(TokenCount(count))


def _check_unsupported(body: PromptBody) -> None:
    check_unsupported(body, {"mcp_servers": ([],), "container": (msgspec.Raw(b"null"),)})


class MessageUsage(msgspec.Struct):
    """`input_tokens` are those that were not found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


def usage_of(usage: Usage) -> MessageUsage:
    return MessageUsage(
        usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens, usage.cached_tokens
    )


class MessageObject(msgspec.Struct):
    id: str
    model: str
    content: list[dict[str, Any]]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


class MessagesRendering:
    content_type = EVENT_STREAM
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'
    names: Mapping[str, str] = NAMES
    answered: frozenset[str] = frozenset()

    def __init__(self, call: Call, plan: ChatPlan) -> None:
        self.call = call
        self._plan = plan
        self._parsed = ParsedChoice(plan.parse, choice_id_of(call))
        self._is_open = False
        self._blocks = BlockEvents()

    def events(self, index: int, chunk: OutputChunk, output: Output) -> Iterator[bytes]:
        if not self._is_open:
            self._is_open = True
            usage = usage_of(chunk.usage)
            usage.output_tokens = 0
            message = MessageObject(self.call.call_id, self.call.model, [], usage)
            yield event("message_start", message=message)
        yield from self._blocks.of(self._parsed.add(chunk))
        if chunk.finish_reason is not None:
            yield from self._blocks.stop()
            reason, sequence = stop_of(output, has_calls=self._parsed.has_calls)
            yield event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=usage_of(chunk.usage),
            )
            yield event("message_stop")

    def last_events(self, outputs: list[Output]) -> Iterable[bytes]:
        return ()

    def failure(self, info: ErrorInfo) -> Iterable[bytes]:
        return (b"event: error\ndata: %b\n\n" % anthropic_error(info),)

    def whole(self, outputs: list[Output]) -> Iterable[bytes]:
        output = outputs[0]
        blocks = blocks_of(parsed_whole(self._plan.parse, self.call, output))
        has_calls = any(block["type"] == "tool_use" for block in blocks)
        reason, sequence = stop_of(output, has_calls=has_calls)
        message = MessageObject(
            self.call.call_id, self.call.model, blocks, usage_of(output.usage), reason, sequence
        )
        return (msgspec.json.encode(message),)


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (
        kind.encode(),
        msgspec.json.encode({"type": kind, **fields}),
    )


def stop_of(output: Output, *, has_calls: bool) -> tuple[str, str | None]:
    """Returns the stop reason and the stop sequence, if it was one."""
    if output.finish_reason == "stop" and isinstance(output.stop_reason, str):
        return "stop_sequence", output.stop_reason
    reason = output.finish_reason or "stop"
    if has_calls and reason == "stop":
        return "tool_use", None
    return STOP_REASONS.get(reason, "end_turn"), None


class BlockEvents:
    """The events of the blocks of one stream. One block is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None  # of the open block

    def of(self, events: Iterable[ParsedEvent]) -> Iterator[bytes]:
        for each in events:
            match each:
                case Content(text):
                    yield from self._open({"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Reasoning(text):
                    yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case ToolCallStart():
                    yield from self.stop()
                    yield from self._open(tool_use(each, {}))
                case ToolArguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def stop(self) -> Iterator[bytes]:
        if self._kind is not None:
            self._kind = None
            yield event("content_block_stop", index=self._index)

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        """Begins a block, unless one of its kind is open."""
        if block["type"] == self._kind:
            return
        yield from self.stop()
        self._kind = block["type"]
        self._index += 1
        yield event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)


def blocks_of(events: Iterable[ParsedEvent]) -> list[dict[str, Any]]:
    """Returns the blocks of a whole answer. The input of a call that was cut off is empty, because
    a part of its JSON is no object.
    """
    blocks: list[dict[str, Any]] = []
    for each in events:
        match each:
            case Content(text):
                blocks.append({"type": "text", "text": text})
            case Reasoning(text):
                blocks.append({"type": "thinking", "thinking": text, "signature": ""})
            case ToolCallStart():
                blocks.append(tool_use(each, {}))
            case ToolArguments(_, text):
                blocks[-1]["input"] = object_in(text)
    return blocks


def tool_use(start: ToolCallStart, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": start.call_id, "name": start.name, "input": arguments}


ROUTES = (
    post("/v1/messages", MessagesBody, resumable("msg_", create), errors=anthropic_error),
    post("/v1/messages/count_tokens", PromptBody, count_tokens, errors=anthropic_error),
)
