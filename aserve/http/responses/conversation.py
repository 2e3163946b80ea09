"""The messages of a conversation. They are read from a body's input or an earlier response, and
converted to a prompt for the engine or to items for clients.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.conversation import ROLES, texts_of
from aserve.http.openai.schema import ChatMessage
from aserve.http.responses.body import InputItem
from aserve.http.responses.records import InputMessage, InputText, OutputMessage, OutputText
from aserve.messages.requests import ChatPrompt

TEXT_PARTS = ("input_text", "output_text", "text")
MAX_ITEMS = 16_384  # messages of a conversation: the template renders all of them in each turn
MESSAGE_BYTES = 256  # a generous bound on the memory of a message without its text


class Message(msgspec.Struct, frozen=True):
    """One message. `texts` are the parts of its content."""

    id: str
    role: str
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def size_bytes(self) -> int:
        return MESSAGE_BYTES + sum(len(text.encode()) for text in self.texts)


def messages_of(given: str | list[InputItem] | None, response_id: str) -> tuple[Message, ...]:
    """Reads a body's input. The messages' ids are derived from `response_id`."""
    if given is None:
        raise _missing("input")
    if not given and not isinstance(given, str):
        raise InvalidRequest(
            "Invalid 'input': the list is empty.", param="input", code="empty_array"
        )
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    stem = response_id.replace("resp_", "msg_")
    return tuple(_message(item, f"{stem}_{i}", where=f"input[{i}]") for i, item in enumerate(items))


def message_of_output(item: OutputMessage) -> Message:
    return Message(item.id, item.role, tuple(part.text for part in item.content))


def prompt_of(instructions: str | None, messages: Iterable[Message]) -> ChatPrompt:
    """Returns the prompt, with the instructions before all messages."""
    shown = [ChatMessage(ROLES[message.role], message.text) for message in messages]
    if instructions is not None:
        shown.insert(0, ChatMessage("system", instructions))
    return ChatPrompt(msgspec.json.encode(shown))


def item_of(message: Message) -> InputMessage | OutputMessage:
    """Returns a message as an item for clients."""
    if message.role == "assistant":
        return OutputMessage(message.id, "completed", tuple(map(OutputText, message.texts)))
    return InputMessage(message.id, message.role, tuple(map(InputText, message.texts)))


def _message(item: InputItem, message_id: str, *, where: str) -> Message:
    if item.type not in (None, "message"):
        raise InvalidRequest(
            f"Unsupported value for '{where}.type': '{item.type[:40]}'. The only supported value "
            "is message.",
            param=f"{where}.type",
            code="unsupported_value",
        )
    if item.role is None:
        raise _missing(f"{where}.role")
    if item.content is None:
        raise _missing(f"{where}.content")
    if isinstance(item.content, str):
        return Message(message_id, item.role, (item.content,))
    texts = texts_of(item.content, kinds=TEXT_PARTS, where=where)
    return Message(message_id, item.role, tuple(texts))


def _missing(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )
