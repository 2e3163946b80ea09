"""The bodies of Ollama's /api/chat and /api/generate, and their conversion to a chat."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.chat_plan import ChatPlan, plan_chat
from aserve.http.openai.checks import check_unsupported
from aserve.http.openai.conversation import Chat, ReasoningOptions
from aserve.http.openai.grammars import format_grammar
from aserve.http.openai.limits import Range, check_within
from aserve.http.openai.reasoning import reasoning_limit
from aserve.http.openai.schema import ChatMessage, FunctionCall, GenerationBody, ToolCall
from aserve.http.openai.tools import ToolChoice, choose_tools
from aserve.messages.base import MAX_INT32
from aserve.messages.requests import Grammar
from aserve.parsers.registry import ParserNames

LATEST = ":latest"  # Ollama's clients add it to names without a tag
KEEP_ALIVE = Range(-MAX_INT32, MAX_INT32)  # seconds; negative numbers mean forever
NUM_PREDICT = Range(-2, MAX_INT32)  # negative numbers mean the rest of the context

# Options that would change the output, with the values that mean no effect.
NEUTRAL_OPTIONS: dict[str, tuple[object, ...]] = {
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "mirostat": (0,),
}


class Options(msgspec.Struct, kw_only=True):
    """The sampling parameters. Other options are about Ollama's runner, and have no effect."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(msgspec.Struct, kw_only=True):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(msgspec.Struct, kw_only=True):
    """The fields of both endpoints. `stream` is true unless it is false. `keep_alive` is accepted:
    the model stays loaded.
    """

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None


class ChatBody(OllamaBody, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateBody(OllamaBody, kw_only=True):
    """With `raw` the prompt is the text itself, without the chat template."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None
    context: list[Any] | None = None


def plain_name(name: str | None) -> str | None:
    return None if name is None else name.removesuffix(LATEST)


def generation_of(body: OllamaBody) -> GenerationBody:
    """Returns the sampling parameters in OpenAI's fields."""
    options = body.options or Options()
    check_unsupported(options, NEUTRAL_OPTIONS, where="options.")
    check_unsupported(body, {"logprobs": (False,)})
    check_keep_alive(body.keep_alive)
    num_predict = options.num_predict
    if num_predict is not None:
        check_within(num_predict, NUM_PREDICT, param="options.num_predict")
    is_limited = num_predict is not None and num_predict >= 0
    return GenerationBody(
        model=plain_name(body.model),
        stream=body.stream is not False,
        max_tokens=num_predict if is_limited else None,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop=options.stop,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def check_keep_alive(keep_alive: float | str | None) -> None:
    if isinstance(keep_alive, int | float):
        check_within(keep_alive, KEEP_ALIVE, param="keep_alive")


def grammar_of(body: OllamaBody) -> Grammar | None:
    """Returns the grammar of `format`, which is "json" or a JSON schema."""
    match body.format:
        case None | "":
            return None
        case "json":
            return format_grammar("json_object", None, param="format")
        case dict():
            return format_grammar("json_schema", body.format, param="format")
        case _:
            raise InvalidRequest(
                "Invalid 'format': it is json or a JSON schema.",
                param="format",
                code="invalid_value",
            )


def plan_of_chat(body: ChatBody, parsers: ParserNames) -> ChatPlan:
    chat = Chat(
        messages=[_message_of(each, i) for i, each in enumerate(body.messages or ())],
        tool_use=choose_tools(body.tools or (), ToolChoice()),
        reasoning=_reasoning_of(body),
    )
    return plan_chat(chat, parsers, grammar=grammar_of(body))


def plan_of_prompt(body: GenerateBody, parsers: ParserNames) -> ChatPlan:
    """Plans /api/generate, in which the prompt is the message of a user."""
    system = [ChatMessage("system", body.system)] if body.system else []
    chat = Chat(
        messages=[*system, ChatMessage("user", body.prompt or "")],
        reasoning=_reasoning_of(body),
    )
    return plan_chat(chat, parsers, grammar=grammar_of(body))


def _message_of(message: OllamaMessage, index: int) -> ChatMessage:
    if message.images:
        raise InvalidRequest(
            "This endpoint reads no pictures; /v1/chat/completions does.",
            param=f"messages[{index}].images",
            code="unsupported_content_type",
        )
    calls = [
        ToolCall(FunctionCall(call.function.name, call.function.arguments or {}), call.id)
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        message.role,
        message.content,
        name=message.tool_name,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.thinking,
    )


def _reasoning_of(body: OllamaBody) -> ReasoningOptions:
    match body.think:
        case None:
            return ReasoningOptions()
        case bool(is_enabled):
            return ReasoningOptions(
                is_enabled=is_enabled,
                max_tokens=reasoning_limit(None, is_enabled=is_enabled),
                is_shown=is_enabled,
            )
        case effort:
            return ReasoningOptions(effort=effort)
