"""The JSON of the answers of POST /v1/chat/completions, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET, UnsetType

from aserve.http.long_json import JsonEach, JsonList
from aserve.http.openai.answers import LogprobEntry, UsageBody
from aserve.http.openai.parsed import ParsedMessage
from aserve.parsers.events import Content, ParsedEvent, Reasoning, ToolArguments, ToolCallStart
from aserve.receipts.record import Receipt


class ChatLogprobs(msgspec.Struct):
    content: list[LogprobEntry] | JsonList
    refusal: None = None


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(msgspec.Struct):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(msgspec.Struct):
    """`function_call` is the older form of `tool_calls`. Reasoning has two names, because clients
    of vLLM read the one and clients of SGLang and DeepSeek the other.
    """

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class DeltaChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Function(msgspec.Struct):
    name: str
    arguments: str


class ToolCallBody(msgspec.Struct):
    id: str
    function: Function
    type: str = "function"


class AssistantMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET


class MessageChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[DeltaChoice] | JsonEach
    usage: UsageBody | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: JsonList | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET  # added by http/receipts.py


def deltas_of(events: Iterable[ParsedEvent], *, has_functions: bool) -> Iterator[Delta]:
    """Yields one delta for each event. With `has_functions` calls have the older form."""
    for event in events:
        match event:
            case Content(text):
                yield Delta(content=text)
            case Reasoning(text):
                yield Delta(reasoning_content=text, reasoning=text)
            case ToolCallStart(index, name, call_id):
                function = FunctionDelta(name, "")
                call = CallDelta(index, call_id or "", "function", function)
                yield _call_delta(call, has_functions=has_functions)
            case ToolArguments(index, text):
                call = CallDelta(index, function=FunctionDelta(arguments=text))
                yield _call_delta(call, has_functions=has_functions)


def _call_delta(call: CallDelta, *, has_functions: bool) -> Delta:
    return Delta(function_call=call.function) if has_functions else Delta(tool_calls=[call])


def message_of(parsed: ParsedMessage, *, prefix: str, has_functions: bool) -> AssistantMessage:
    """Returns the message of a whole answer. Its content is null if there is nothing but reasoning
    or calls.
    """
    reasoning, content = parsed.reasoning, prefix + parsed.content
    calls = [
        ToolCallBody(call.call_id, Function(call.name, call.arguments)) for call in parsed.calls
    ]
    return AssistantMessage(
        None if not content and (calls or reasoning) else content,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=UNSET if has_functions or not calls else calls,
        function_call=calls[0].function if has_functions and calls else UNSET,
    )
