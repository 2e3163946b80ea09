"""The events of a response, for SSE and websocket, with OpenAI's names."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from aserve.http.long_json import JsonList
from aserve.http.openai.answers import LogprobEntry
from aserve.http.responses.records import OutputItem, OutputText, ReasoningText, ResponseObject


class Event(msgspec.Struct, kw_only=True):
    """An event of a response. EventMaker sets `sequence_number` and `stream_id`, which a websocket
    client gives its request to tell the answers apart.
    """

    type: str
    sequence_number: int = 0
    stream_id: str | UnsetType = UNSET


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
