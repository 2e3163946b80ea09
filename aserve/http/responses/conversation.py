"""The items of a conversation. They are read from a body's input or an earlier response, and
converted to the messages of a chat or to items for clients.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.conversation import REFUSAL, parts_of, pictures_of, texts_of
from aserve.http.openai.schema import ChatMessage, ContentPart, FunctionCall, PicturePart, ToolCall
from aserve.http.responses.body import InputItem
from aserve.http.responses.records import (
    CompactionItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputImage,
    InputMessage,
    InputText,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

TEXT_PARTS = ("input_text", "output_text", "text")
ASSISTANT_PARTS = (*TEXT_PARTS, REFUSAL)
REASONING_PARTS = ("reasoning_text", "summary_text", "text")
SUMMARY = "Summary of the conversation so far: "
MAX_ITEMS = 16_384  # items of a conversation: the template renders all of them in each turn
ITEM_BYTES = 256  # a generous bound on the memory of an item without its text


class Message(msgspec.Struct, frozen=True):
    """One message. `texts` are the parts of its content."""

    id: str
    role: str
    texts: tuple[str, ...]
    parts: tuple[ContentPart, ...] = ()  # all parts, if there are pictures among them

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Call(msgspec.Struct, frozen=True):
    """A function call of the model. `arguments` is JSON."""

    id: str
    call_id: str
    name: str
    arguments: str

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.name, self.arguments)


class CallOutput(msgspec.Struct, frozen=True):
    """The output of a function that the model called."""

    id: str
    call_id: str
    texts: tuple[str, ...]


class Thought(msgspec.Struct, frozen=True):
    """Reasoning of the model."""

    id: str
    texts: tuple[str, ...]


class Compaction(msgspec.Struct, frozen=True):
    """The model's summary of a conversation."""

    id: str
    texts: tuple[str, ...]


Item: TypeAlias = Message | Call | CallOutput | Thought | Compaction
ClientItem: TypeAlias = (
    InputMessage
    | OutputMessage
    | FunctionCallItem
    | FunctionOutputItem
    | ReasoningItem
    | CompactionItem
)


def size_of(item: Item) -> int:
    """Returns a generous bound on the memory of an item."""
    pictures = pictures_of([*item.parts]) if isinstance(item, Message) else []
    urls = sum(len(picture.url) for picture in pictures)
    return ITEM_BYTES + urls + sum(len(text.encode()) for text in item.texts)


def items_of(
    given: str | list[InputItem] | None, response_id: str, *, param: str = "input"
) -> tuple[Item, ...]:
    """Reads a body's input. The items' ids are derived from `response_id`."""
    if given is None:
        raise _missing(param)
    if not given and not isinstance(given, str):
        raise InvalidRequest(
            f"Invalid '{param}': the list is empty.", param=param, code="empty_array"
        )
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    stem = response_id.removeprefix("resp_")
    return tuple(_item(item, f"{stem}_{i}", where=f"{param}[{i}]") for i, item in enumerate(items))


def item_of_output(item: OutputItem) -> Item:
    match item:
        case OutputMessage():
            return Message(item.id, item.role, tuple(part.text for part in item.content))
        case FunctionCallItem():
            return Call(item.id, item.call_id, item.name, item.arguments)
        case ReasoningItem():
            return Thought(item.id, tuple(part.text for part in item.content))


def item_for_client(item: Item) -> ClientItem:
    match item:
        case Message(role="assistant"):
            return OutputMessage(item.id, "completed", tuple(map(OutputText, item.texts)))
        case Message():
            shown = tuple(map(_part_for_client, item.parts)) or tuple(map(InputText, item.texts))
            return InputMessage(item.id, item.role, shown)
        case Call():
            return FunctionCallItem(item.id, "completed", item.call_id, item.name, item.arguments)
        case CallOutput():
            return FunctionOutputItem(item.id, item.call_id, "".join(item.texts))
        case Thought():
            return ReasoningItem(item.id, "completed", tuple(map(ReasoningText, item.texts)))
        case Compaction():
            return CompactionItem(item.id, b64encode("".join(item.texts).encode()).decode())


def _part_for_client(part: ContentPart) -> InputText | InputImage:
    return InputImage(part.url) if isinstance(part, PicturePart) else InputText(part.text or "")


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[ChatMessage]:
    """Returns the messages of a chat, with the instructions before all others. Reasoning, text and
    calls of the assistant that follow each other are one message.
    """
    messages = [] if instructions is None else [ChatMessage("system", instructions)]
    for item in items:
        match item:
            case Message(role="assistant"):
                _assistant_of(messages, has_content=True).content = item.text
            case Message():
                messages.append(ChatMessage(item.role, [*item.parts] or item.text))
            case Call():
                message = _assistant_of(messages)
                call = ToolCall(FunctionCall(item.name, item.arguments), item.call_id)
                message.tool_calls = [*(message.tool_calls or ()), call]
            case CallOutput():
                text = "".join(item.texts)
                messages.append(ChatMessage("tool", text, tool_call_id=item.call_id))
            case Thought():
                message = _assistant_of(messages, has_content=True)
                message.reasoning_content = "".join(item.texts)
            case Compaction():
                text = SUMMARY + "".join(item.texts)
                messages.append(ChatMessage("assistant", text))
    for message in messages:
        message.content = message.content or ""
    return messages


def _assistant_of(messages: list[ChatMessage], *, has_content: bool = False) -> ChatMessage:
    """Returns the assistant's message that an item belongs to, which is a new one if the last
    message has ended. `has_content`: the item comes before the calls of a message.
    """
    last = messages[-1] if messages else None
    is_open = last is not None and last.role == "assistant"
    if last is None or not is_open or (has_content and (last.content or last.tool_calls)):
        last = ChatMessage("assistant")
        messages.append(last)
    return last


def _item(item: InputItem, stem: str, *, where: str) -> Item:
    match item.type:
        case None | "message":
            return _message(item, f"msg_{stem}", where=where)
        case "function_call":
            return Call(
                f"fc_{stem}",
                _given(item.call_id, f"{where}.call_id"),
                _given(item.name, f"{where}.name"),
                _given(item.arguments, f"{where}.arguments"),
            )
        case "function_call_output":
            if item.output is None:
                raise _missing(f"{where}.output")
            texts = _texts(item.output, TEXT_PARTS, where=where)
            return CallOutput(f"fco_{stem}", _given(item.call_id, f"{where}.call_id"), texts)
        case "reasoning":
            parts = item.content or item.summary or []
            return Thought(f"rs_{stem}", _texts(parts, REASONING_PARTS, where=where))
        case "compaction":
            return Compaction(f"cmp_{stem}", (_summary(item, f"{where}.encrypted_content"),))
        case _:
            raise InvalidRequest(
                f"Unsupported value for '{where}.type': '{item.type[:40]}'. Supported values are "
                "message, function_call, function_call_output, reasoning and compaction.",
                param=f"{where}.type",
                code="unsupported_value",
            )


def _message(item: InputItem, message_id: str, *, where: str) -> Message:
    if item.role is None:
        raise _missing(f"{where}.role")
    if item.content is None:
        raise _missing(f"{where}.content")
    if item.role == "user" and isinstance(item.content, list):
        parts = parts_of(item.content, where=where, kinds=TEXT_PARTS)
        if pictures_of(parts):
            texts = tuple(part.text for part in parts if part.text is not None)
            return Message(message_id, item.role, texts, tuple(parts))
    kinds = ASSISTANT_PARTS if item.role == "assistant" else TEXT_PARTS
    return Message(message_id, item.role, _texts(item.content, kinds, where=where))


def _summary(item: InputItem, param: str) -> str:
    try:
        return b64decode(_given(item.encrypted_content, param), validate=True).decode()
    except ValueError:  # also binascii.Error and UnicodeDecodeError, which it is the base of
        raise InvalidRequest(
            f"Invalid '{param}': it is not of this server's /v1/responses/compact.",
            param=param,
            code="invalid_value",
        ) from None


def _texts(
    content: str | list[ContentPart], kinds: Sequence[str], *, where: str
) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    return tuple(texts_of(content, kinds=kinds, where=where))


def _given(value: str | None, param: str) -> str:
    if value is None:
        raise _missing(param)
    return value


def _missing(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )
