"""Converts the messages and tools of a chat to a ChatPrompt, which the chat template renders.

Content becomes plain text, and arguments of tool calls become objects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.json_values import decode_json, encode_json
from aserve.http.openai.schema import (
    ChatBody,
    ChatMessage,
    ContentPart,
    Effort,
    FunctionCall,
    ImageUrl,
    PicturePart,
    TokenizeBody,
    ToolCall,
)
from aserve.http.openai.tools import NO_TOOLS, ToolUse
from aserve.messages.requests import ChatPrompt
from aserve.picture import PictureSource
from aserve.text.template import RESERVED

# Newer clients say developer; templates know it as system.
PICTURES = frozenset({"image_url", "input_image"})  # types of parts
ANTHROPIC_PICTURE = "image"
REFUSAL = "refusal"  # the type of a part that only the assistant's messages have
Content: TypeAlias = str | list[ContentPart] | None
ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """A client's wishes about reasoning. `is_enabled` and `effort` are for the chat template;
    None leaves them to it. `max_tokens` is the limit of reasoning tokens. Without `is_separate` the
    reasoning stays in the content. Without `is_shown` it is left out, and without `is_streamed` a
    stream has it in one piece.
    """

    is_enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: int | None = None
    is_separate: bool = True
    is_shown: bool = True
    is_streamed: bool = True

    @property
    def is_asked(self) -> bool:
        """Whether the client asks for reasoning."""
        return bool(self.is_enabled) or self.effort not in (None, "none")

    def variables(self) -> dict[str, Any]:
        """Returns the variables by which templates switch reasoning. WHY three: gpt-oss reads the
        effort, Qwen and GLM `enable_thinking`, and DeepSeek `thinking`.
        """
        found: dict[str, Any] = {} if self.effort is None else {"reasoning_effort": self.effort}
        is_enabled = self.is_enabled
        if is_enabled is None and self.effort is not None:
            is_enabled = self.effort != "none"
        if is_enabled is not None:
            found |= {"enable_thinking": is_enabled, "thinking": is_enabled}
        return found


BY_TEMPLATE = ReasoningOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat whose next message is asked for, in one form for all endpoints.

    With `continues_last` the output continues the last message, which is the assistant's.
    """

    messages: Sequence[ChatMessage]
    tool_use: ToolUse = NO_TOOLS
    variables: Mapping[str, Any] | None = None  # of the template
    reasoning: ReasoningOptions = BY_TEMPLATE
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    continues_last: bool = False

    def template_variables(self) -> dict[str, Any]:
        """Returns the variables of the template; those that the client names win."""
        return self.reasoning.variables() | dict(self.variables or {})


def chat_of(body: ChatBody | TokenizeBody, tool_use: ToolUse, reasoning: ReasoningOptions) -> Chat:
    """Returns the chat of a body of OpenAI's API."""
    if body.messages is None:
        raise InvalidRequest(
            "Missing required parameter: 'messages'.",
            param="messages",
            code="missing_required_parameter",
        )
    continues_last = bool(body.continue_final_message)
    if continues_last and body.add_generation_prompt:
        raise InvalidRequest(
            "Invalid 'continue_final_message': it excludes 'add_generation_prompt', which begins "
            "another message.",
            param="continue_final_message",
            code="invalid_value",
        )
    return Chat(
        messages=body.messages,
        tool_use=tool_use,
        variables=body.chat_template_kwargs,
        reasoning=reasoning,
        add_special_tokens=bool(body.add_special_tokens),
        add_generation_prompt=body.add_generation_prompt is not False and not continues_last,
        continues_last=continues_last,
    )


def prompt_of(chat: Chat) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequest(
            "Invalid 'messages': the list is empty.", param="messages", code="empty_array"
        )
    messages = [_to_plain_text(message, i) for i, message in enumerate(chat.messages)]
    pictures = [part for message in messages for part in pictures_of(message.content)]
    if chat.continues_last and messages[-1].role != "assistant":
        raise InvalidRequest(
            "Invalid 'continue_final_message': the last message must be the assistant's, but its "
            f"role is {messages[-1].role}.",
            param="continue_final_message",
            code="invalid_value",
        )
    tools = chat.tool_use.definitions
    return ChatPrompt(
        encode_json([_without_urls(message) for message in messages], param="messages"),
        encode_json(tools, param="tools") if tools else None,
        variables=template_variables(chat.template_variables()),
        add_special_tokens=chat.add_special_tokens,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continues_last,
        pictures=tuple(PictureSource(part.url, part.param, part.type) for part in pictures),
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
    message = _with_tools(message)
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"Invalid value for '{where}.role': '{message.role[:40]}'. Supported values are "
            f"{', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    may_be_empty = role == "assistant" and (message.tool_calls or message.refusal)
    if message.content is None and not may_be_empty:
        raise InvalidRequest(
            f"Missing required parameter: '{where}.content'.",
            param=f"{where}.content",
            code="missing_required_parameter",
        )
    calls = message.tool_calls and [_with_parsed_arguments(call) for call in message.tool_calls]
    return ChatMessage(
        role,
        content_of(message, where=where) if role == "user" else text_of(message, where=where),
        name=message.name,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content or message.reasoning,
    )


def _with_tools(message: ChatMessage) -> ChatMessage:
    """Converts the older form of calls and results. A call has no id there, so its name serves."""
    if message.role == "function":
        return msgspec.structs.replace(message, role="tool", tool_call_id=f"call_{message.name}")
    call = message.function_call
    if call is None:
        return message
    calls = [ToolCall(call, f"call_{call.name}")]
    return msgspec.structs.replace(message, tool_calls=calls, function_call=None)


def content_of(message: ChatMessage, *, where: str) -> str | list[ContentPart]:
    """Returns the text of a message, or its parts if there are pictures among them."""
    if not isinstance(message.content, list):
        return text_of(message, where=where)
    parts = parts_of(message.content, where=where)
    return parts if pictures_of(parts) else "".join(part.text or "" for part in parts)


def parts_of(
    content: list[ContentPart], *, where: str, kinds: Collection[str] = ("text",)
) -> list[ContentPart]:
    """Returns the texts and pictures of a content. `kinds` are the types of its texts, and `where`
    is the path of the message in the body."""
    return [
        picture_part(part, param=f"{where}.content[{i}]")
        if _is_picture(part)
        else ContentPart("text", text_part(part, i, kinds=kinds, where=where))
        for i, part in enumerate(content)
    ]


def _is_picture(part: ContentPart) -> bool:
    return isinstance(part, PicturePart) or part.type in PICTURES


def picture_part(part: ContentPart, *, param: str) -> PicturePart:
    """A part that another endpoint has read is returned as it is."""
    if isinstance(part, PicturePart):
        return part
    given = part.image_url
    url = given.url if isinstance(given, ImageUrl) else given
    if url is None:
        raise InvalidRequest(
            f"Missing required parameter: '{param}.image_url'.",
            param=f"{param}.image_url",
            code="missing_required_parameter",
        )
    return PicturePart(part.type, url=url, param=param)


def pictures_of(content: Content) -> list[PicturePart]:
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, PicturePart)]


def _without_urls(message: ChatMessage) -> ChatMessage:
    """Returns the message as a chat template reads it."""
    if not isinstance(message.content, list):
        return message
    parts = [
        ContentPart("image") if isinstance(part, PicturePart) else part for part in message.content
    ]
    return msgspec.structs.replace(message, content=parts)


def text_of(message: ChatMessage, *, where: str) -> str:
    """Returns the text of a message, to which a refusal of the assistant's belongs."""
    is_assistant = message.role == "assistant"
    content = message.content
    if isinstance(content, list):
        kinds = ("text", REFUSAL) if is_assistant else ("text",)
        content = "".join(texts_of(content, kinds=kinds, where=where))
    return (content or "") + ((is_assistant and message.refusal) or "")


def texts_of(content: list[ContentPart], *, kinds: Collection[str], where: str) -> list[str]:
    """Returns the texts of the parts. Raises if a part is of another kind. `where` is the path of
    the message in the body.
    """
    return [text_part(part, i, kinds=kinds, where=where) for i, part in enumerate(content)]


def text_part(part: ContentPart, index: int, *, kinds: Collection[str], where: str) -> str:
    text = part.refusal if part.type == REFUSAL else part.text
    if part.type not in kinds or text is None:
        raise no_text(part.type, param=f"{where}.content[{index}]")
    return text


def no_text(kind: str, *, param: str) -> InvalidRequest:
    """Returns the error of a part of this type where only text may be."""
    if kind in PICTURES or kind == ANTHROPIC_PICTURE:
        message = "Pictures can only be in messages of the user."
    else:
        message = f"Unsupported content type '{kind[:40]}'; expected a part with text."
    return InvalidRequest(message, param=param, code="unsupported_content_type")


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
