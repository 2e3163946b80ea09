"""The events that a parser makes of the text of an answer, in order.

Text events come in fragments: joined, the fragments of one kind that follow each other are the same
wherever the text was cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

JsonSchema: TypeAlias = dict[str, Any]


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for the reader of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text that the model thinks before it answers, without its tags."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A call begins. `call_id` is the model's own id; with None the server makes one."""

    index: int
    name: str
    call_id: str | None = None


class ToolArguments(msgspec.Struct, frozen=True, gc=False):
    """A fragment of the JSON text of the arguments of call `index`, which are an object."""

    index: int
    text: str


class Malformed(msgspec.Struct, frozen=True, gc=False):
    """Text of a call that cannot be read. It is shown as content, and logged as a warning.

    `reason` is empty in the later fragments of one malformed call.
    """

    text: str
    reason: str = ""


ParsedEvent: TypeAlias = Content | Reasoning | ToolCallStart | ToolArguments | Malformed


class ToolSpec(msgspec.Struct, frozen=True, gc=False):
    """A tool of the request. `parameters` is the JSON schema of its arguments; None allows any."""

    name: str
    parameters: JsonSchema | None = None
    strict: bool = False


def joined(events: Iterable[ParsedEvent]) -> list[ParsedEvent]:
    """Joins the fragments of one kind that follow each other, as a whole answer needs them."""
    result: list[ParsedEvent] = []
    for event in events:
        whole = _join(result[-1], event) if result else None
        if whole is None:
            result.append(event)
        else:
            result[-1] = whole
    return result


def _join(first: ParsedEvent, second: ParsedEvent) -> ParsedEvent | None:
    """Returns the two as one event, or None if they are not parts of one."""
    match first, second:
        case Content(), Content():
            return Content(first.text + second.text)
        case Reasoning(), Reasoning():
            return Reasoning(first.text + second.text)
        case ToolArguments(index), ToolArguments(other) if index == other:
            return ToolArguments(index, first.text + second.text)
        case Malformed(), Malformed(reason=""):
            return Malformed(first.text + second.text, first.reason)
        case _:
            return None
