"""The parser of one answer, and what a family of models declares of its format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from aserve.parsers.events import Content, ParsedEvent, Reasoning, ToolSpec
from aserve.parsers.reader import MAX_SPACE, Markers, Parsing, Reader


class OutputParser(Protocol):
    """Turns the text of an answer into events. The joined events do not depend on the cuts."""

    def push(self, text: str) -> list[ParsedEvent]:
        """Returns the events that the text completes."""

    def finish(self) -> list[ParsedEvent]:
        """Ends the answer, and returns what was held back."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The form in which a grammar writes calls: `begin` with `{name}` in it, the arguments in a
    style of xgrammar, and `end`; calls are joined by `separator` and stand in a `section`.

    In free text, a call follows wherever `trigger` stands. Where a number belongs to a call, it is
    written before `behind_number`. A call that `is_last` ends the answer.
    """

    begin: str
    end: str
    trigger: str
    style: Literal["json", "qwen_xml", "glm_xml", "python"] = "json"
    separator: str = ""
    section: tuple[str, str] = ("", "")
    behind_number: str = ""
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """The form in which a family of models writes calls.

    `parse` reads the text after the reasoning; with `has_reasoning` it reads the reasoning itself.
    `begins` are the texts that calls begin with, and `markers` all special tokens that must stay in
    the text. `call_id_len` is the length of a call's id where chat templates accept no other.
    """

    parse: Callable[[Reader, Sequence[ToolSpec]], Parsing[None]]
    syntax: CallSyntax
    markers: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    has_reasoning: bool = False
    call_id_len: int | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """The tags around reasoning, the first of each being those that a grammar uses.

    With `is_implied` the model thinks although its prompt opens no tag. With `ends_at_calls` a tool
    call ends the reasoning, too. `before_call` and `before_content` are what a grammar writes
    between the end of reasoning and what follows. With `parsed_by`, that family reads the reasoning
    with the calls. `markers` are the special tokens that must stay in the text.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    is_implied: bool = False
    ends_at_calls: bool = False
    before_call: str = ""
    before_content: str = ""
    parsed_by: ToolFamily | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        own = self.opens + self.closes
        return own if self.parsed_by is None else self.parsed_by.markers


class StreamParser:
    """Drives the generator of a parser."""

    __slots__ = ("_parsing", "_reader")

    def __init__(self, reader: Reader, parsing: Parsing[None]) -> None:
        self._reader = reader
        self._parsing = parsing

    def push(self, text: str) -> list[ParsedEvent]:
        self._reader.feed(text)
        return self._run()

    def finish(self) -> list[ParsedEvent]:
        self._reader.end()
        return self._run()

    def _run(self) -> list[ParsedEvent]:
        next(self._parsing, None)
        return self._reader.events.take()


def parse_answer(
    reader: Reader,
    reasoning: ReasoningFamily | None,
    tools: ToolFamily | None,
    *,
    tool_specs: Sequence[ToolSpec],
    starts_in_reasoning: bool,
) -> Parsing[None]:
    """Parses reasoning, which comes first if at all, and then content with calls."""
    if reasoning is not None:
        begins = tools.begins if tools is not None and reasoning.ends_at_calls else ()
        opened = yield from reader.accept(*reasoning.opens, space=MAX_SPACE)
        if opened or starts_in_reasoning:
            yield from _think(reader, Markers((*reasoning.closes, *begins)), begins)
    if tools is None:
        yield from reader.rest(reader.events.to(Content))
    else:
        yield from tools.parse(reader, tool_specs)


def _think(reader: Reader, ends: Markers, begins: Sequence[str]) -> Parsing[None]:
    """Emits reasoning up to its end, without whitespace at its edges and before what follows."""
    yield from reader.skip_space()
    found = yield from reader.until(ends, reader.events.to(Reasoning), trims=True)
    reader.release()
    if found in begins:
        reader.unread(found)
    else:
        yield from reader.skip_space()
