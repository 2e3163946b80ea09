"""The events of a response, for SSE and websocket, with OpenAI's names."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from aserve.http.long_json import JsonList, pieces_of
from aserve.http.openai.answers import LogprobEntry
from aserve.http.responses.records import OutputItem, OutputText, ReasoningText, ResponseObject


class Event(msgspec.Struct, kw_only=True):
    """An event of a response. EventMaker sets `sequence_number`."""

    type: str
    sequence_number: int = 0


class ResponseEvent(Event, kw_only=True):
    response: ResponseObject


class ItemEvent(Event, kw_only=True):
    output_index: int
    item: OutputItem


class PartEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class DeltaEvent(Event, kw_only=True):
    """A fragment of a text or, without a `content_index`, of a call's arguments."""

    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    delta: str
    logprobs: tuple[LogprobEntry, ...] | UnsetType = UNSET


class TextEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: tuple[LogprobEntry, ...] | JsonList | UnsetType = UNSET


class ArgumentsEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    name: str
    arguments: str


def frame_of(event: Event) -> Iterator[bytes]:
    """Yields the pieces of a server-sent event with its type."""
    yield b"event: %b\ndata: " % event.type.encode()
    yield from pieces_of(event)
    yield b"\n\n"
