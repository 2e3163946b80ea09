"""The parsed outputs of a call: reasoning, content and tool calls, in no endpoint's own form.

Each reader of a call's chunks makes one ParsedChoice per choice and writes it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from aserve.messages.base import FinishReason
from aserve.messages.output import OutputChunk
from aserve.parsers.base import OutputParser
from aserve.parsers.events import (
    Content,
    Malformed,
    ParsedEvent,
    Reasoning,
    ToolArguments,
    ToolCallStart,
    ToolSpec,
)
from aserve.parsers.registry import TOOL_PARSERS, make_parser, opens_reasoning

logger = logging.getLogger(__name__)

ID_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsePlan:
    """The names of the parsers that read the outputs of a call, and their options. Without a name
    that part of the output stays content.

    Without `is_parallel` only the first tool call counts. Reasoning is left out unless
    `shows_reasoning`, and comes as one event unless `streams_reasoning`. `starts_inside` says
    whether the output begins inside of the reasoning; None leaves it to the end of the prompt.
    """

    reasoning: str | None = None
    tools: str | None = None
    tool_specs: tuple[ToolSpec, ...] = ()
    is_parallel: bool = True
    shows_reasoning: bool = True
    streams_reasoning: bool = True
    starts_inside: bool | None = None


PLAIN = ParsePlan()  # all of the output is content


class ParsedChoice:
    """Turns the chunks of one choice into events. `choice_id` is unique among the choices of the
    server: the ids of tool calls are derived from it.
    """

    __slots__ = (
        "_choice_id",
        "_held_reasoning",
        "_parser",
        "_plan",
        "has_calls",
        "num_reasoning_tokens",
    )

    def __init__(self, plan: ParsePlan, choice_id: str) -> None:
        self._plan = plan
        self._choice_id = choice_id
        self._parser: OutputParser | None = None
        self._held_reasoning: list[str] = []
        self.has_calls = False
        self.num_reasoning_tokens = 0

    def add(self, chunk: OutputChunk) -> list[ParsedEvent]:
        """Returns the events that the chunk completes, without those that the client must not
        see. There is no Malformed among them, and every call has an id.
        """
        if self._parser is None:
            self._parser = self._open(chunk.prompt_tail)
        events = self._parser.push(chunk.text)
        if chunk.finish_reason is not None:
            events += self._parser.finish()
        self.num_reasoning_tokens = chunk.usage.reasoning_tokens
        shown = [each for event in events for each in self._shown(event)]
        if chunk.finish_reason is not None:
            shown += self._release_reasoning()
        return shown

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Returns OpenAI's finish reason: `tool_calls` for an output that ended with calls."""
        return "tool_calls" if self.has_calls and reason == "stop" else reason

    def _open(self, prompt_tail: str) -> OutputParser:
        plan = self._plan
        is_open = (
            opens_reasoning(prompt_tail, plan.reasoning)
            if plan.starts_inside is None
            else plan.starts_inside and plan.reasoning is not None
        )
        return make_parser(
            plan.reasoning,
            plan.tools,
            tool_specs=plan.tool_specs,
            starts_in_reasoning=is_open,
        )

    def _shown(self, event: ParsedEvent) -> Iterable[ParsedEvent]:
        if isinstance(event, Reasoning):
            if not self._plan.shows_reasoning:
                return []
            self._held_reasoning.append(event.text)
            return self._release_reasoning() if self._plan.streams_reasoning else []
        return [*self._release_reasoning(), *self._shown_answer(event)]

    def _shown_answer(self, event: ParsedEvent) -> Iterable[ParsedEvent]:
        match event:
            case Malformed(text, reason):
                if reason:
                    logger.warning("malformed tool call choice=%s: %s", self._choice_id, reason)
                return [Content(text)] if text else []
            case ToolCallStart(index) | ToolArguments(index) if self._is_surplus(index):
                return []
            case ToolCallStart(index, _, call_id):
                self.has_calls = True
                return [msgspec.structs.replace(event, call_id=call_id or self._call_id(index))]
            case _:
                return [event]

    def _is_surplus(self, index: int) -> bool:
        return index > 0 and not self._plan.is_parallel

    def _release_reasoning(self) -> list[ParsedEvent]:
        text = "".join(self._held_reasoning)
        self._held_reasoning.clear()
        return [Reasoning(text)] if text else []

    def _call_id(self, index: int) -> str:
        name = f"{self._choice_id}/{index}".encode()
        digest = hashlib.blake2s(name, digest_size=ID_BYTES).hexdigest()
        family = TOOL_PARSERS.get(self._plan.tools or "")
        length = None if family is None else family.call_id_len
        return f"call_{digest}" if length is None else digest[:length]


class GatheredCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: str


class ParsedMessage:
    """The message that the events of a whole choice add up to."""

    __slots__ = ("_calls", "_content", "_reasoning")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[ToolCallStart, list[str]]] = {}

    def add(self, events: Iterable[ParsedEvent]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case ToolCallStart(index):
                    self._calls[index] = (event, [])
                case ToolArguments(index, text):
                    self._calls[index][1].append(text)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[GatheredCall]:
        return [
            GatheredCall(start.call_id or "", start.name, "".join(arguments))
            for start, arguments in self._calls.values()
        ]
