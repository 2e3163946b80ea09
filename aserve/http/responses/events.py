"""Makes the events of one response from its chunks, for SSE, websocket and unstreamed answers.

Only the reader of the response's RequestStream calls the maker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET, UnsetType

from aserve.errors import ErrorInfo
from aserve.http.long_json import JsonList
from aserve.http.openai.answers import LogprobEntry, logprob_entries
from aserve.http.responses.records import (
    IncompleteDetails,
    ItemStatus,
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseObject,
    Status,
    error_of,
    usage_of,
)
from aserve.messages.base import FinishReason
from aserve.messages.output import OutputChunk, Usage

# The other finish reasons are `completed`, or come with an error.
STATUSES: dict[FinishReason, Status] = {"length": "incomplete", "cancelled": "cancelled"}


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
    output_index: int = 0
    item: OutputMessage


class PartEvent(Event, kw_only=True):
    item_id: str
    output_index: int = 0
    content_index: int = 0
    part: OutputText


class DeltaEvent(Event, kw_only=True):
    item_id: str
    output_index: int = 0
    content_index: int = 0
    delta: str
    logprobs: tuple[LogprobEntry, ...]


class TextEvent(Event, kw_only=True):
    item_id: str
    output_index: int = 0
    content_index: int = 0
    text: str
    logprobs: tuple[LogprobEntry, ...] | JsonList


class EventMaker:
    """Makes the events. `response` is the response object so far. `add` may be called until
    `is_done`.
    """

    def __init__(self, response: ResponseObject, *, stream_id: str | UnsetType = UNSET) -> None:
        self.response = response
        self.is_open = False
        self._stream_id = stream_id
        self._num_events = 0
        self._item_id = "msg_" + response.id.removeprefix("resp_")
        self._has_item = False
        self._texts: list[str] = []
        self._logprobs = JsonList()
        self._usage: Usage | None = None

    @property
    def is_done(self) -> bool:
        return self.response.status != "in_progress"

    def open(self) -> list[Event]:
        """Returns the opening events. The other methods begin with them if they were not sent."""
        return self._stamped(self._opening())

    def add(self, chunk: OutputChunk) -> list[Event]:
        return self._stamped(self._added(chunk))

    def cancel(self) -> list[Event]:
        return self._stamped([*self._opening(), *self._end("cancelled")])

    def fail(self, info: ErrorInfo) -> list[Event]:
        return self._stamped([*self._opening(), self._fail(info)])

    def _stamped(self, events: Iterable[Event]) -> list[Event]:
        stamped = list(events)
        for event in stamped:
            event.sequence_number = self._num_events
            event.stream_id = self._stream_id
            self._num_events += 1
        return stamped

    def _opening(self) -> Iterator[Event]:
        if not self.is_open:
            self.is_open = True
            yield ResponseEvent(type="response.created", response=self.response)
            yield ResponseEvent(type="response.in_progress", response=self.response)

    def _added(self, chunk: OutputChunk) -> Iterator[Event]:
        yield from self._opening()
        if not self._has_item:
            self._has_item = True
            yield from self._begin_item()
        self._usage = chunk.usage
        if chunk.text or chunk.logprobs:
            yield self._delta(chunk)
        if chunk.error is not None:
            yield self._fail(chunk.error)
        elif chunk.finish_reason is not None:
            yield from self._end(STATUSES.get(chunk.finish_reason, "completed"))

    def _begin_item(self) -> Iterator[Event]:
        item = OutputMessage(self._item_id, "in_progress")
        yield ItemEvent(type="response.output_item.added", item=item)
        yield PartEvent(
            type="response.content_part.added", item_id=self._item_id, part=OutputText("")
        )

    def _delta(self, chunk: OutputChunk) -> Event:
        logprobs = logprob_entries(chunk.logprobs)
        self._texts.append(chunk.text)
        self._logprobs.extend(logprobs)
        return DeltaEvent(
            type="response.output_text.delta",
            item_id=self._item_id,
            delta=chunk.text,
            logprobs=tuple(logprobs),
        )

    def _fail(self, info: ErrorInfo) -> Event:
        """Ends with an error. The output so far stays in the response."""
        self._finish("failed", error=error_of(info))
        return ResponseEvent(type="response.failed", response=self.response)

    def _end(self, status: Status) -> Iterator[Event]:
        cut = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        self._finish(status, incomplete_details=cut)
        for item in self.response.output:
            yield from self._end_item(item)
        # WHY incomplete: the protocol has no event for a cancelled response.
        kind = "completed" if status == "completed" else "incomplete"
        yield ResponseEvent(type=f"response.{kind}", response=self.response)

    def _end_item(self, item: OutputMessage) -> Iterator[Event]:
        (part,) = item.content
        yield TextEvent(
            type="response.output_text.done",
            item_id=item.id,
            text=part.text,
            logprobs=part.logprobs,
        )
        yield PartEvent(type="response.content_part.done", item_id=item.id, part=part)
        yield ItemEvent(type="response.output_item.done", item=item)

    def _finish(
        self,
        status: Status,
        *,
        incomplete_details: IncompleteDetails | None = None,
        error: ResponseError | None = None,
    ) -> None:
        self.response = msgspec.structs.replace(
            self.response,
            status=status,
            output=self._output("completed" if status == "completed" else "incomplete"),
            usage=None if self._usage is None else usage_of(self._usage),
            incomplete_details=incomplete_details,
            error=error,
        )

    def _output(self, status: ItemStatus) -> tuple[OutputMessage, ...]:
        if not self._has_item:
            return ()
        part = OutputText("".join(self._texts), logprobs=self._logprobs)
        return (OutputMessage(self._item_id, status, (part,)),)
