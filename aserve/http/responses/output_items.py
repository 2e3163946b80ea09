"""The items of a response's output while they are written, each with its events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from aserve.http.long_json import JsonList
from aserve.http.openai.answers import LogprobEntry
from aserve.http.responses.events import (
    ArgumentsEvent,
    DeltaEvent,
    Event,
    ItemEvent,
    PartEvent,
    TextEvent,
)
from aserve.http.responses.records import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)


class OpenMessage:
    """A message that gets text."""

    def __init__(self, stem: str, index: int) -> None:
        self._id = f"msg_{stem}"
        self._index = index
        self._texts: list[str] = []
        self._logprobs = JsonList()

    def begin(self) -> Iterator[Event]:
        item = OutputMessage(self._id, "in_progress")
        yield _item_event("added", item, self._index)
        yield _part_event("added", item, OutputText(""), self._index)

    def add(self, text: str, logprobs: Sequence[LogprobEntry] = ()) -> Event:
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        return DeltaEvent(
            type="response.output_text.delta",
            item_id=self._id,
            output_index=self._index,
            content_index=0,
            delta=text,
            logprobs=tuple(logprobs),
        )

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(self._id, status, (self._part(),))

    def end(self, status: ItemStatus) -> Iterator[Event]:
        item, part = self.item(status), self._part()
        yield TextEvent(
            type="response.output_text.done",
            item_id=self._id,
            output_index=self._index,
            text=part.text,
            logprobs=part.logprobs,
        )
        yield _part_event("done", item, part, self._index)
        yield _item_event("done", item, self._index)

    def _part(self) -> OutputText:
        return OutputText("".join(self._texts), logprobs=self._logprobs)


class OpenReasoning:
    """Reasoning that gets text."""

    def __init__(self, stem: str, index: int) -> None:
        self._id = f"rs_{stem}"
        self._index = index
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        item = ReasoningItem(self._id, "in_progress")
        yield _item_event("added", item, self._index)
        yield _part_event("added", item, ReasoningText(""), self._index)

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return DeltaEvent(
            type="response.reasoning_text.delta",
            item_id=self._id,
            output_index=self._index,
            content_index=0,
            delta=text,
        )

    def item(self, status: ItemStatus) -> ReasoningItem:
        return ReasoningItem(self._id, status, (self._part(),))

    def end(self, status: ItemStatus) -> Iterator[Event]:
        item, part = self.item(status), self._part()
        yield TextEvent(
            type="response.reasoning_text.done",
            item_id=self._id,
            output_index=self._index,
            text=part.text,
        )
        yield _part_event("done", item, part, self._index)
        yield _item_event("done", item, self._index)

    def _part(self) -> ReasoningText:
        return ReasoningText("".join(self._texts))


class OpenCall:
    """A function call that gets arguments."""

    def __init__(self, stem: str, index: int, *, call_id: str, name: str) -> None:
        self._id = f"fc_{stem}"
        self._index = index
        self._call_id = call_id
        self._name = name
        self._arguments: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield _item_event("added", self.item("in_progress"), self._index)

    def add(self, text: str) -> Event:
        self._arguments.append(text)
        return DeltaEvent(
            type="response.function_call_arguments.delta",
            item_id=self._id,
            output_index=self._index,
            delta=text,
        )

    def item(self, status: ItemStatus) -> FunctionCallItem:
        arguments = "".join(self._arguments)
        return FunctionCallItem(self._id, status, self._call_id, self._name, arguments)

    def end(self, status: ItemStatus) -> Iterator[Event]:
        item = self.item(status)
        yield ArgumentsEvent(
            type="response.function_call_arguments.done",
            item_id=self._id,
            output_index=self._index,
            name=self._name,
            arguments=item.arguments,
        )
        yield _item_event("done", item, self._index)


OpenItem: TypeAlias = OpenMessage | OpenReasoning | OpenCall


def _item_event(change: str, item: OutputItem, index: int) -> Event:
    return ItemEvent(type=f"response.output_item.{change}", output_index=index, item=item)


def _part_event(
    change: str, item: OutputItem, part: OutputText | ReasoningText, index: int
) -> Event:
    return PartEvent(
        type=f"response.content_part.{change}", item_id=item.id, output_index=index, part=part
    )
