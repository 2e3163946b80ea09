"""Makes the events of one response from its chunks, for SSE, websocket and unstreamed answers.

Only the reader of the response's RequestStream calls the maker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from aserve.errors import ErrorInfo
from aserve.http.openai.answers import LogprobEntry, logprob_entries
from aserve.http.openai.parsed import PLAIN, ParsedChoice, ParsePlan
from aserve.http.responses.events import Event, ResponseEvent
from aserve.http.responses.output_items import OpenCall, OpenItem, OpenMessage, OpenReasoning
from aserve.http.responses.records import (
    IncompleteDetails,
    ItemStatus,
    OutputItem,
    ResponseError,
    ResponseObject,
    Status,
    error_of,
    usage_of,
)
from aserve.messages.base import FinishReason
from aserve.messages.output import OutputChunk, Usage
from aserve.parsers.events import Content, ParsedEvent, Reasoning, ToolArguments, ToolCallStart

# The other finish reasons are `completed`, or come with an error.
STATUSES: dict[FinishReason, Status] = {"length": "incomplete", "cancelled": "cancelled"}


class EventMaker:
    """Makes the events. `response` is the response object so far. `add` may be called until
    `is_done`.

    The output is a list of items, of which the last one may be open. Log-probabilities go with the
    text of a message; those of tokens whose text the parser holds back wait for it.
    """

    def __init__(self, response: ResponseObject, *, parse: ParsePlan = PLAIN) -> None:
        self.response = response
        self.is_open = False
        self._num_events = 0
        self._stem = response.id.removeprefix("resp_")
        self._parsed = ParsedChoice(parse, response.id)
        self._ended: list[OutputItem] = []
        self._item: OpenItem | None = None
        self._logprobs: list[LogprobEntry] = []  # of tokens whose text has not come
        self._usage: Usage | None = None

    @property
    def is_done(self) -> bool:
        return self.response.status not in ("queued", "in_progress")

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
            self._num_events += 1
        return stamped

    def _opening(self) -> Iterator[Event]:
        if not self.is_open:
            self.is_open = True
            self.response = msgspec.structs.replace(self.response, status="in_progress")
            yield ResponseEvent(type="response.created", response=self.response)
            yield ResponseEvent(type="response.in_progress", response=self.response)

    def _added(self, chunk: OutputChunk) -> Iterator[Event]:
        yield from self._opening()
        self._usage = chunk.usage
        self._logprobs += logprob_entries(chunk.logprobs)
        for event in self._parsed.add(chunk):
            yield from self._write(event)
        if chunk.error is not None:
            yield self._fail(chunk.error)
        elif chunk.finish_reason is not None:
            if not self._ended and self._item is None:
                yield from self._begin(OpenMessage(self._stem, 0))
            yield from self._end(STATUSES.get(chunk.finish_reason, "completed"))

    def _write(self, event: ParsedEvent) -> Iterator[Event]:
        """Writes an event to the open item, or to a new one if it is of another kind."""
        logprobs, self._logprobs = self._logprobs, []
        match event:
            case Content(text):
                if not isinstance(self._item, OpenMessage):
                    yield from self._begin(OpenMessage(*self._next_place()))
                assert isinstance(self._item, OpenMessage)
                yield self._item.add(text, logprobs)
            case Reasoning(text):
                if not isinstance(self._item, OpenReasoning):
                    yield from self._begin(OpenReasoning(*self._next_place()))
                assert isinstance(self._item, OpenReasoning)
                yield self._item.add(text)
            case ToolCallStart(_, name, call_id):
                place = self._next_place()
                yield from self._begin(OpenCall(*place, call_id=call_id or "", name=name))
            case ToolArguments(_, text):
                assert isinstance(self._item, OpenCall), "a call begins before its arguments"
                yield self._item.add(text)

    def _next_place(self) -> tuple[str, int]:
        """Returns the stem of the next item's id, and its index."""
        index = len(self._ended) + (self._item is not None)
        return (f"{self._stem}_{index}" if index else self._stem), index

    def _begin(self, item: OpenItem) -> Iterator[Event]:
        yield from self._end_item("completed")
        self._item = item
        yield from item.begin()

    def _end_item(self, status: ItemStatus) -> Iterator[Event]:
        item, self._item = self._item, None
        if item is None:
            return
        if isinstance(item, OpenMessage) and self._logprobs:
            yield item.add("", self._logprobs)
            self._logprobs = []
        self._ended.append(item.item(status))
        yield from item.end(status)

    def _fail(self, info: ErrorInfo) -> Event:
        """Ends with an error. The output so far stays in the response."""
        if self._item is not None:
            self._ended.append(self._item.item("incomplete"))
        self._finish("failed", error=error_of(info))
        return ResponseEvent(type="response.failed", response=self.response)

    def _end(self, status: Status) -> Iterator[Event]:
        cut = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        yield from self._end_item("completed" if status == "completed" else "incomplete")
        self._finish(status, incomplete_details=cut)
        # WHY incomplete: the protocol has no event for a cancelled response.
        kind = "completed" if status == "completed" else "incomplete"
        yield ResponseEvent(type=f"response.{kind}", response=self.response)

    def _finish(
        self,
        status: Status,
        *,
        incomplete_details: IncompleteDetails | None = None,
        error: ResponseError | None = None,
    ) -> None:
        num_tokens = self._parsed.num_reasoning_tokens
        usage = self._usage and usage_of(self._usage, num_reasoning_tokens=num_tokens)
        self.response = msgspec.structs.replace(
            self.response,
            status=status,
            output=tuple(self._ended),
            usage=usage,
            incomplete_details=incomplete_details,
            error=error,
        )
