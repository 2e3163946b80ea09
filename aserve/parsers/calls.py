"""Reads content with calls in it, and emits the calls."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from aserve.parsers.events import Content, ToolArguments, ToolCallStart
from aserve.parsers.reader import AnswerEnded, CallError, Markers, Parsing, Reader
from aserve.parsers.writer import Write

NAME = re.compile(r"[\w.:/-]+")


def read_calls(
    reader: Reader,
    call: Callable[[Reader, str], Parsing[None]],
    *,
    begins: Sequence[str],
    ends: Sequence[str] = (),
    unmarked: Sequence[str] = (),
) -> Parsing[None]:
    """Emits content, and calls `call` behind each of `begins`. A call that fails is malformed up to
    one of `ends`, or to the next begin. Whitespace beside a call is not content.

    The `unmarked` ones among `begins` may begin other text, too: if that is no call, it is content.
    """
    begin_markers, all_markers = Markers(begins), Markers((*begins, *ends))
    content = reader.events.to(Content)
    while found := (yield from reader.until(begin_markers, content, trims=True)):
        num_calls = reader.events.num_calls
        try:
            yield from call(reader, found)
        except CallError as error:
            if found in unmarked and reader.events.num_calls == num_calls:
                content(reader.release())
                continue
            yield from _skip_malformed(reader, reader.fail(error), all_markers, begins)
        yield from reader.skip_space()


def _skip_malformed(
    reader: Reader, write: Write, markers: Markers, begins: Sequence[str]
) -> Parsing[None]:
    found = yield from reader.until(markers, write)
    if found in begins:
        reader.unread(found)
    else:
        write(found)


def run(reader: Reader, pattern: re.Pattern[str]) -> Parsing[str]:
    """Reads the characters that match a pattern, which is one set of characters, once or more."""
    pieces: list[str] = []
    while (yield from reader.peek()) and (piece := reader.match(pattern)):
        pieces.append(piece)
    return "".join(pieces)


def name_of_call(reader: Reader) -> Parsing[str]:
    """Reads a name that stands for itself, without quotes."""
    yield from reader.skip_space()
    name = yield from run(reader, NAME)
    if not name:
        raise CallError("the name is missing") if (yield from reader.peek()) else AnswerEnded
    return name


class CallWriter:
    """Emits one call. It starts with the first text of its arguments, once the name is known."""

    __slots__ = ("_arguments", "_is_started", "_reader", "_waiting", "call_id", "name")

    def __init__(self, reader: Reader, name: str = "", call_id: str | None = None) -> None:
        self._reader = reader
        self._is_started = False
        self._waiting: list[str] = []  # arguments that came before the name
        self.name = name
        self.call_id = call_id

    def write(self, text: str) -> None:
        """Adds text of the arguments."""
        if not text:
            return
        if not self.name:
            self._waiting.append(text)
            return
        if not self._is_started:
            self._start()
        self._arguments(text)

    def set_name(self, name: str) -> None:
        self.name = self.name or name
        waiting, self._waiting = self._waiting, []
        self.write("".join(waiting))

    def finish(self) -> None:
        """Ends the call. A call without arguments has an empty object."""
        if not self.name:
            raise CallError("the call has no name")
        if not self._is_started:
            self.write("{}")

    def _start(self) -> None:
        self._is_started = True
        index = self._reader.events.num_calls
        self._reader.events.num_calls += 1
        self._reader.release()
        self._reader.events.emit(ToolCallStart(index, self.name, self.call_id))
        self._arguments = self._reader.events.to(functools.partial(ToolArguments, index))
