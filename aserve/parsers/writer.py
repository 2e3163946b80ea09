"""Collects the events of an answer. Written by the parser that reads the answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

from aserve.parsers.events import Content, Malformed, ParsedEvent

TextEvent: TypeAlias = Callable[[str], ParsedEvent]
Write: TypeAlias = Callable[[str], None]


class EventWriter:
    """Joins texts of one kind that follow each other to one event, in linear time."""

    __slots__ = ("_events", "_kind", "_pieces", "num_calls")

    def __init__(self) -> None:
        self._events: list[ParsedEvent] = []
        self._kind: TextEvent = Content  # of the event whose text is being collected
        self._pieces: list[str] = []
        self.num_calls = 0

    def take(self) -> list[ParsedEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def to(self, kind: TextEvent) -> Write:
        """Returns a function that emits text as events of a kind. Texts of one kind that follow
        each other are joined.
        """
        return functools.partial(self._write, kind)

    def _write(self, kind: TextEvent, text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def emit(self, event: ParsedEvent) -> None:
        self._flush()
        self._events.append(event)

    def _flush(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if text:
            self._events.append(self._kind(text))


def ignore(text: str) -> None:
    """A Write that drops its text."""


class MalformedText:
    """Makes the events of one malformed call. Only the first one has the reason."""

    __slots__ = ("_reason",)

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __call__(self, text: str) -> ParsedEvent:
        reason, self._reason = self._reason, ""
        return Malformed(text, reason)
