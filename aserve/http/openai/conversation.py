"""Converts the messages and tools of a chat body to a ChatPrompt, which the chat template renders.

Content becomes plain text. Other fields are passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.body import wrong_field
from aserve.http.openai.json_values import decode_json, encode_json
from aserve.http.openai.schema import (
    ChatBody,
    ChatMessage,
    ContentPart,
    FunctionCall,
    TokenizeBody,
    Tool,
    ToolCall,
)
from aserve.messages.requests import ChatPrompt
from aserve.text.template import RESERVED

# Newer clients say developer; templates know it as system.
ROLES = {"developer": "system"} | {
    role: role for role in ("system", "user", "assistant", "tool", "function")
}


def chat_prompt(body: ChatBody | TokenizeBody) -> ChatPrompt:
    if body.messages is None:
        raise InvalidRequest(
            "Missing required parameter: 'messages'.",
            param="messages",
            code="missing_required_parameter",
        )
    if not body.messages:
        raise InvalidRequest(
            "Invalid 'messages': the list is empty.", param="messages", code="empty_array"
        )
    messages = [_to_plain_text(message, i) for i, message in enumerate(body.messages)]
    return ChatPrompt(
        encode_json(messages, param="messages"),
        tools_of(body),
        variables=template_variables(body.chat_template_kwargs),
        add_special_tokens=bool(body.add_special_tokens),
        add_generation_prompt=body.add_generation_prompt is not False,
    )


def template_variables(given: Mapping[str, Any] | None) -> bytes | None:
    """Encodes the extra variables of the template. The reserved ones cannot be replaced."""
    if not given:
        return None
    wrong = next((name for name in given if name in RESERVED), None)
    if wrong is not None:
        raise InvalidRequest(
            f"Invalid 'chat_template_kwargs': '{wrong}' cannot be set by a request.",
            param=f"chat_template_kwargs.{wrong}",
            code="invalid_value",
        )
    return encode_json(given, param="chat_template_kwargs")


def _to_plain_text(message: ChatMessage, index: int) -> ChatMessage:
    """Checks a message, and returns it with plain text as content and objects as arguments."""
    where = f"messages[{index}]"
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"Invalid value for '{where}.role': '{message.role[:40]}'. Supported values are "
            f"{', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    if message.content is None and not (role == "assistant" and message.tool_calls):
        raise InvalidRequest(
            f"Missing required parameter: '{where}.content'.",
            param=f"{where}.content",
            code="missing_required_parameter",
        )
    calls = message.tool_calls and [_with_parsed_arguments(call) for call in message.tool_calls]
    return msgspec.structs.replace(
        message, role=role, content=_text(message.content, where), tool_calls=calls
    )


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(texts_of(content, kinds=("text",), where=where))


def texts_of(content: list[ContentPart], *, kinds: Collection[str], where: str) -> list[str]:
    """Returns the texts of the parts. Raises if a part is of another kind. `where` is the path of
    the message in the body.
    """
    texts = []
    for i, part in enumerate(content):
        if part.type not in kinds or part.text is None:
            raise InvalidRequest(
                "This model supports text input only; received unsupported content type "
                f"'{part.type[:40]}'.",
                param=f"{where}.content[{i}]",
                code="unsupported_content_type",
            )
        texts.append(part.text)
    return texts


def _with_parsed_arguments(call: ToolCall) -> ToolCall:
    """Parses the arguments, because templates expect an object. Invalid JSON, which a model may
    have written, stays a string.
    """
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments.encode(), dict[str, Any], param="arguments")
        except InvalidRequest:
            return call
    return msgspec.structs.replace(call, function=FunctionCall(call.function.name, arguments))


def _check_tools(tools: list[dict[str, Any]]) -> None:
    try:
        msgspec.convert(tools, list[Tool])
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), "tools") from None


def tools_of(body: ChatBody | TokenizeBody) -> bytes | None:
    """Returns the tools as JSON, or None without tools or with tool_choice none. Raises if the
    choice cannot be met.
    """
    given = bytes(body.tools)
    tools = None if given == b"null" else decode_json(given, list[dict[str, Any]], param="tools")
    if tools is not None:
        _check_tools(tools)
    if tools == []:
        raise InvalidRequest(
            "Invalid 'tools': the list is empty.", param="tools", code="empty_array"
        )
    match body.tool_choice:
        case None | "auto":
            return None if tools is None else encode_json(tools, param="tools")
        case "none":
            return None
        case _ if tools is None:
            raise InvalidRequest(
                "Invalid 'tool_choice': it is only allowed when 'tools' are given.",
                param="tool_choice",
                code="invalid_value",
            )
        case _:
            raise InvalidRequest(
                "Unsupported value for 'tool_choice': this server supports auto and none.",
                param="tool_choice",
                code="unsupported_value",
            )
