"""The body of POST /v1/messages, and its conversion to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.chat_plan import ChatPlan, plan_chat
from aserve.http.openai.conversation import (
    ANTHROPIC_PICTURE,
    Chat,
    ReasoningOptions,
    no_text,
    pictures_of,
)
from aserve.http.openai.grammars import format_grammar
from aserve.http.openai.limits import Range, check_within
from aserve.http.openai.reasoning import reasoning_limit
from aserve.http.openai.schema import (
    ChatMessage,
    ContentPart,
    Effort,
    FunctionCall,
    PicturePart,
    ToolCall,
    null_value,
)
from aserve.http.openai.tools import ToolChoice, ToolDefinition, choose_tools
from aserve.messages.base import MAX_INT32
from aserve.parsers.registry import ParserNames

BUDGET = Range(1, MAX_INT32)

T = TypeVar("T")


class ImageSource(msgspec.Struct, kw_only=True):
    """A picture: base64 `data` of a `media_type`, or a `url`."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(msgspec.Struct, kw_only=True):
    """A block of a message's content. `type` decides which of the other fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    source: ImageSource | None = None
    is_error: bool | None = None


Content: TypeAlias = str | list[Block]


class MessageParam(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Content


class ToolParam(msgspec.Struct, kw_only=True):
    """A tool of the client. `type` is custom, or else names one that Anthropic's servers run."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoiceParam(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct, kw_only=True):
    """At `budget_tokens` the reasoning ends, as it does by itself before."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class FormatParam(msgspec.Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    format: FormatParam | None = None
    effort: Effort | None = None


class PromptBody(msgspec.Struct, kw_only=True):
    """The fields that make the prompt: the body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[MessageParam]
    system: Content | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: FormatParam | None = None
    mcp_servers: list[Any] | None = None
    container: msgspec.Raw = msgspec.field(default_factory=null_value)


class MessagesBody(PromptBody, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    resumable: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def plan_of(body: PromptBody, parsers: ParserNames) -> ChatPlan:
    """Plans the chat. A final message of the assistant is continued, as in Anthropic's API."""
    choice = _choice_of(body.tool_choice)
    is_parallel = body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use
    tools = choose_tools(
        [_definition_of(tool, i) for i, tool in enumerate(body.tools or ())],
        choice,
        is_parallel=is_parallel,
    )
    continues_last = bool(body.messages) and body.messages[-1].role == "assistant"
    config = body.output_config or OutputConfig()
    output_format = config.format or body.output_format
    param = "output_config.format" if config.format else "output_format"
    grammar = None
    if output_format is not None:
        grammar = format_grammar(output_format.type, output_format.schema, param=param)
    chat = Chat(
        messages=messages_of(body),
        tool_use=tools,
        reasoning=_reasoning_of(
            body.thinking, config.effort, has_limit=parsers.reasoning is not None
        ),
        add_generation_prompt=not continues_last,
        continues_last=continues_last,
    )
    return plan_chat(chat, parsers, grammar=grammar, bans_calls=choice.mode == "none")


def messages_of(body: PromptBody) -> list[ChatMessage]:
    system = text_of(body.system or "", where="system")
    messages = [ChatMessage("system", system)] if system else []
    for i, message in enumerate(body.messages):
        where = f"messages[{i}].content"
        if isinstance(message.content, str):
            messages.append(ChatMessage(message.role, message.content))
        elif message.role == "assistant":
            messages.append(_assistant_message(message.content, where))
        else:
            messages += _user_messages(message.role, message.content, where)
    return messages


def _user_messages(role: str, blocks: Sequence[Block], where: str) -> list[ChatMessage]:
    """Returns a message of its own for each tool result, and one for what is between them."""
    messages: list[ChatMessage] = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block.type == "tool_result":
            result = text_of(block.content or "", where=f"{place}.content")
            messages.append(ChatMessage("tool", result, tool_call_id=block.tool_use_id))
            continue
        part = _part_of(block, place)
        last = messages[-1] if messages else None
        if last is not None and last.role == role and isinstance(last.content, list):
            last.content.append(part)
        else:
            messages.append(ChatMessage(role, [part]))
    for message in messages:
        if isinstance(message.content, list) and not pictures_of(message.content):
            message.content = "".join(part.text or "" for part in message.content)
    return messages or [ChatMessage(role, "")]


def _part_of(block: Block, where: str) -> ContentPart:
    if block.type != ANTHROPIC_PICTURE:
        return ContentPart("text", _text_of_block(block, where))
    source = _required(block.source, f"{where}.source")
    url = _required(source.url, f"{where}.source.url") if source.type == "url" else None
    if url is None:
        data = _required(source.data, f"{where}.source.data")
        url = f"data:{source.media_type or 'image'};base64,{data}"
    return PicturePart(ANTHROPIC_PICTURE, url=url, param=where)


def _assistant_message(blocks: Sequence[Block], where: str) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        match block.type:
            case "tool_use":
                call = FunctionCall(_required(block.name, f"{where}[{i}].name"), block.input or {})
                calls.append(ToolCall(call, block.id))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # nobody but Anthropic's servers can read it
            case _:
                texts.append(_text_of_block(block, f"{where}[{i}]"))
    return ChatMessage(
        "assistant",
        "".join(texts),
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def text_of(content: Content, *, where: str) -> str:
    """Returns the text of a content that may have nothing but text."""
    if isinstance(content, str):
        return content
    return "".join(_text_of_block(block, f"{where}[{i}]") for i, block in enumerate(content))


def _text_of_block(block: Block, where: str) -> str:
    if block.type != "text":
        raise no_text(block.type, param=where)
    return _required(block.text, f"{where}.text")


def _required(value: T | None, where: str) -> T:
    if value is None:
        raise InvalidRequest(
            f"Missing required parameter: '{where}'.",
            param=where,
            code="missing_required_parameter",
        )
    return value


def _definition_of(tool: ToolParam, index: int) -> ToolDefinition:
    """Converts a tool to OpenAI's form, which chat templates expect."""
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise InvalidRequest(
            f"Unsupported value for 'tools[{index}].type': this server runs no tools of its own. "
            "Give tools of the client, with an input_schema.",
            param=f"tools[{index}]",
            code="unsupported_value",
        )
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice_of(given: ToolChoiceParam | None) -> ToolChoice:
    if given is None:
        return ToolChoice()
    match given.type:
        case "auto" | "none":
            return ToolChoice(given.type)
        case "any":
            return ToolChoice("required")
        case "tool":
            name = _required(given.name, "tool_choice.name")
            return ToolChoice("required", (name,), is_one=True)


def _reasoning_of(
    thinking: ThinkingParam | None, effort: Effort | None, *, has_limit: bool
) -> ReasoningOptions:
    """Reasoning is off and not shown unless the client asks for it, as in Anthropic's API: other
    clients expect that the first block is the text. Anthropic's clients must send a limit, so one
    that cannot be kept, because no reasoning parser fits the model, has no effect.
    """
    if thinking is not None and thinking.budget_tokens is not None:
        check_within(thinking.budget_tokens, BUDGET, param="thinking.budget_tokens")
    kind = "disabled" if thinking is None else thinking.type
    is_enabled = None if kind == "adaptive" else kind == "enabled"
    limit = None
    if thinking is not None:
        limit = reasoning_limit(thinking.budget_tokens, is_enabled=is_enabled)
    return ReasoningOptions(
        is_enabled=is_enabled,
        effort=effort,
        max_tokens=limit if has_limit else None,
        is_shown=kind != "disabled",
    )
