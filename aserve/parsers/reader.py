"""The text of an answer as parsers read it, and the events that they write.

A parser is a generator: it reads with the methods below by `yield from`, and it is suspended
wherever it needs more text. So it reads like a parser of whole text, and its result does not depend
on where the text was cut. What a method consumes and emits depends on the text so far alone.

Text is consumed once. While a parser holds text, what it consumes is kept (at most MAX_HELD
characters), so that it can be returned as content if it turns out not to be a call.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeAlias, TypeVar

from aserve.parsers.json_scan import JsonScanner
from aserve.parsers.writer import EventWriter, MalformedText, Write, ignore

T = TypeVar("T")
Parsing: TypeAlias = Generator[None, None, T]

MAX_HELD = 1 << 16  # characters
MAX_SPACE = 64  # characters of whitespace before a marker that do not count as content
SPACE = re.compile(r"\s*")


class CallError(Exception):
    """The text is not the call that it began as. The message is the reason."""


class AnswerEnded(CallError):
    """The answer ended inside of a call."""

    def __init__(self) -> None:
        super().__init__("the answer ended inside of a call")


class Markers:
    """Texts to search for.

    NOTE: none contains another one, except at its end: else the first one found would depend on
    how much text there is.
    """

    __slots__ = ("_first_chars", "_longest", "_pattern", "_texts")

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = tuple(texts)
        pairs = [(a, b) for a in self._texts for b in self._texts if a != b]
        assert not any(short in long[:-1] for short, long in pairs), self._texts
        self._pattern = re.compile("|".join(map(re.escape, self._texts)))
        self._first_chars = {text[0] for text in self._texts}
        self._longest = max(map(len, self._texts))

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def partial(self, text: str, start: int) -> int:
        """Returns where the end of `text` may begin a marker; its length if nowhere."""
        for place in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[place] in self._first_chars:
                tail = text[place:]
                if any(marker.startswith(tail) for marker in self._texts):
                    return place
        return len(text)


class Reader:
    """Written by the generators that read from it, and by the parser that drives them."""

    __slots__ = ("_held", "_is_ended", "_num_held", "_place", "_text", "events")

    def __init__(self) -> None:
        self._text = ""
        self._place = 0  # of the next character
        self._is_ended = False
        self._held: list[str] | None = None
        self._num_held = 0
        self.events = EventWriter()

    def feed(self, text: str) -> None:
        self._text = self._text[self._place :] + text
        self._place = 0

    def end(self) -> None:
        self._is_ended = True

    def hold(self, text: str = "") -> None:
        """Keeps `text` and what is consumed from now on."""
        self._held = [text]
        self._num_held = len(text)

    def release(self) -> str:
        """Stops holding, and returns what was held."""
        held, self._held = self._held, None
        return "".join(held or ())

    def fail(self, error: CallError) -> Write:
        """Begins a malformed call with what is held, and returns where the rest of it goes. A call
        that has begun and ends with the answer is incomplete, but not malformed.
        """
        if self._held is None and isinstance(error, AnswerEnded):
            return ignore
        write = self.events.to(MalformedText(str(error)))
        write(self.release())
        return write

    def peek(self) -> Parsing[str]:
        """Returns the next character without consuming it, or "" at the end of the answer."""
        while self._place == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._place]

    def skip_space(self) -> Parsing[None]:
        while True:
            found = SPACE.match(self._text, self._place)
            assert found is not None, "the pattern matches an empty text"
            self._take(found.end())
            if self._place < len(self._text) or self._is_ended:
                return
            yield

    def accept(self, *texts: str, space: int = 0, is_inside: bool = False) -> Parsing[str]:
        """Consumes and returns the longest of `texts` that comes next, or "" if none does. Up to
        `space` characters of whitespace before it are consumed with it. With `is_inside`, an
        answer that ends where one of them may have begun raises AnswerEnded.
        """
        longest = max(map(len, texts)) + space
        while True:
            coming = self._text[self._place : self._place + longest]
            begin = min(len(coming) - len(coming.lstrip()), space)
            tail = coming[begin:]
            may_grow = any(text.startswith(tail) and len(text) > len(tail) for text in texts)
            if not may_grow or self._is_ended:
                break
            yield
        found = max((text for text in texts if tail.startswith(text)), key=len, default="")
        if not found and may_grow and is_inside:
            raise AnswerEnded
        self._take(self._place + (begin + len(found) if found else 0))
        return found

    def expect(self, *texts: str, space: int = MAX_SPACE) -> Parsing[str]:
        """Like `accept`, but raises CallError if none of `texts` comes next."""
        found = yield from self.accept(*texts, space=space, is_inside=True)
        if not found:
            raise CallError(f"{' or '.join(texts)} is missing")
        return found

    def char(self) -> Parsing[str]:
        """Consumes and returns the next character."""
        if not (yield from self.peek()):
            raise AnswerEnded
        return self._take(self._place + 1)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Consumes and returns what matches of the text that is here already."""
        found = pattern.match(self._text, self._place)
        return "" if found is None else self._take(found.end())

    def until(
        self, markers: Markers, write: Write, *, trims: bool = False, is_inside: bool = False
    ) -> Parsing[str]:
        """Writes the text before the next marker, and consumes and returns the marker, or "" at the
        end of the answer.

        With `trims`, whitespace before the marker is not written, but held with the marker. With
        `is_inside` the marker is needed: the end of the answer raises AnswerEnded, and the begin of
        a marker before it is dropped.
        """
        while True:
            found = markers.search(self._text, self._place)
            is_all = self._is_ended and not is_inside
            if found is not None:
                end = found.start()
            else:
                end = len(self._text) if is_all else markers.partial(self._text, self._place)
            if trims and (found or not is_all):
                end -= min(self._num_spaces_before(end), MAX_SPACE)
            write(self._take(end))
            if found is not None:
                if trims:
                    self.hold()
                self._take(found.start())
                return self._take(found.end())
            if self._is_ended and is_inside:
                raise AnswerEnded
            if self._is_ended:
                return ""
            yield

    def rest(self, write: Write) -> Parsing[None]:
        """Writes all text to the end of the answer."""
        while True:
            write(self._take(len(self._text)))
            if self._is_ended:
                return
            yield

    def json_value(self, write: Write) -> Parsing[None]:
        """Writes a JSON value as it is. Where it becomes invalid, CallError is raised."""
        scanner = JsonScanner()
        while True:
            write(self._take(scanner.feed(self._text, self._place)))
            if self._is_ended:
                scanner.end()
            if scanner.is_done:
                return
            if scanner.is_invalid:
                raise CallError("the arguments are not valid JSON")
            if self._is_ended:
                raise AnswerEnded
            yield

    def unread(self, text: str) -> None:
        """Gives back text, which is the end of what was just consumed."""
        assert self._text.endswith(text, 0, self._place), "only what was consumed last"
        self._place -= len(text)
        if self._held is not None:
            self._held[-1] = self._held[-1].removesuffix(text)
            self._num_held -= len(text)

    def _take(self, end: int) -> str:
        """Consumes text. NOTE: too much of it fails at a place that does not depend on the cuts."""
        text = self._text[self._place : end]
        is_too_much = False
        if self._held is not None:
            is_too_much = len(text) > MAX_HELD - self._num_held
            text = text[: MAX_HELD - self._num_held]
            self._held.append(text)
            self._num_held += len(text)
        self._place += len(text)
        if is_too_much:
            raise CallError(f"more than {MAX_HELD} characters before the call can begin")
        return text

    def _num_spaces_before(self, end: int) -> int:
        text = self._text[self._place : end]
        return len(text) - len(text.rstrip())
