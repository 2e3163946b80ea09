"""An incremental validator of one JSON value, which may come in any pieces.

It follows RFC 8259 and keeps a stack of the open brackets, so its memory is bounded by MAX_DEPTH.
"""

from __future__ import annotations

import enum
import re

MAX_DEPTH = 128
SPACE = re.compile(r"[ \t\n\r]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # the characters of a string that stand for themselves
LITERALS = {"t": "true", "f": "false", "n": "null"}
HEX = frozenset("0123456789abcdefABCDEF")
DIGITS = frozenset("0123456789")
# Where a number may go from each of its states: sign, zero, integer, point, fraction, e, exponent
# sign, exponent. It may end in those of NUMBER_ENDS.
NUMBER = {
    "-": {"0": "0", "1-9": "i"},
    "0": {".": ".", "e": "e"},
    "i": {"0": "i", "1-9": "i", ".": ".", "e": "e"},
    ".": {"0": "f", "1-9": "f"},
    "f": {"0": "f", "1-9": "f", "e": "e"},
    "e": {"0": "x", "1-9": "x", "+": "s", "-": "s"},
    "s": {"0": "x", "1-9": "x"},
    "x": {"0": "x", "1-9": "x"},
}
NUMBER_ENDS = frozenset("0ifx")


class _State(enum.Enum):
    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()  # a value or the end of the list
    FIRST_KEY = enum.auto()  # a key or the end of the object
    KEY = enum.auto()
    COLON = enum.auto()
    NEXT = enum.auto()  # a comma or the end of the list or object
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    LITERAL = enum.auto()
    DONE = enum.auto()
    INVALID = enum.auto()


ENDED = (_State.DONE, _State.INVALID)
BETWEEN_TOKENS = (
    *(_State.VALUE, _State.FIRST_ITEM, _State.FIRST_KEY),
    *(_State.KEY, _State.COLON, _State.NEXT),
)


class JsonScanner:
    """Follows one JSON value. `feed` is called with its text, piece by piece."""

    __slots__ = ("_is_key", "_number", "_pending", "_stack", "_state")

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._stack: list[str] = []  # the brackets that close what is open
        self._is_key = False
        self._number = ""
        self._pending = ""  # what completes a literal, or a place for each missing hex digit

    @property
    def is_done(self) -> bool:
        return self._state is _State.DONE

    @property
    def is_invalid(self) -> bool:
        return self._state is _State.INVALID

    def feed(self, text: str, start: int = 0) -> int:
        """Returns the end of what belongs to the value: it is before the end of `text` if the value
        is done, or invalid from there on.
        """
        place = start
        while place < len(text) and self._state not in ENDED:
            if self._state is _State.STRING:
                found = PLAIN.match(text, place)
            else:
                found = SPACE.match(text, place) if self._state in BETWEEN_TOKENS else None
            place = place if found is None else found.end()
            if place < len(text):
                place += self._step(text[place])
        return place

    def end(self) -> None:
        """Says that the text has ended. A number is done only then or with a character behind
        it.
        """
        if self._state is _State.NUMBER and not self._stack and self._number in NUMBER_ENDS:
            self._state = _State.DONE

    def _step(self, char: str) -> int:
        """Takes one character, and returns 1, or 0 if the character is not part of the value or
        has to be looked at again.
        """
        match self._state:
            case _State.VALUE | _State.FIRST_ITEM:
                if char == "]" and self._state is _State.FIRST_ITEM:
                    return self._close(char)
                return self._begin_value(char)
            case _State.FIRST_KEY | _State.KEY:
                if char == "}" and self._state is _State.FIRST_KEY:
                    return self._close(char)
                self._is_key = True
                return self._go(_State.STRING if char == '"' else _State.INVALID)
            case _State.COLON:
                return self._go(_State.VALUE if char == ":" else _State.INVALID)
            case _State.NEXT if char == ",":
                return self._go(_State.KEY if self._stack[-1] == "}" else _State.VALUE)
            case _State.NEXT:
                return self._close(char)
            case _State.NUMBER:
                return self._continue_number(char)
            case _:
                return self._continue_text(char)

    def _go(self, state: _State) -> int:
        self._state = state
        return int(state is not _State.INVALID)

    def _begin_value(self, char: str) -> int:
        if char in "{[":
            if len(self._stack) == MAX_DEPTH:
                return self._go(_State.INVALID)
            self._stack.append("}" if char == "{" else "]")
            return self._go(_State.FIRST_KEY if char == "{" else _State.FIRST_ITEM)
        if char == '"':
            self._is_key = False
            return self._go(_State.STRING)
        if char in LITERALS:
            self._pending = LITERALS[char][1:]
            return self._go(_State.LITERAL)
        if char == "-" or char in DIGITS:
            self._number = char if char in "-0" else "i"
            return self._go(_State.NUMBER)
        return self._go(_State.INVALID)

    def _close(self, char: str) -> int:
        if char != self._stack[-1]:
            return self._go(_State.INVALID)
        self._stack.pop()
        return self._end_value()

    def _end_value(self) -> int:
        return self._go(_State.NEXT if self._stack else _State.DONE)

    def _continue_number(self, char: str) -> int:
        kind = char.lower() if char in "eE" else "1-9" if char in DIGITS - {"0"} else char
        following = NUMBER[self._number].get(kind)
        if following is not None:
            self._number = following
            return 1
        if self._number in NUMBER_ENDS:
            self._end_value()  # the character is looked at again
        else:
            self._go(_State.INVALID)
        return 0

    def _continue_text(self, char: str) -> int:
        """Takes a character of a string, an escape or a literal."""
        match self._state:
            case _State.STRING if char == '"':
                return self._go(_State.COLON) if self._is_key else self._end_value()
            case _State.STRING if char == "\\":
                return self._go(_State.ESCAPE)
            case _State.ESCAPE if char == "u":
                self._pending = "0000"
                return self._go(_State.HEX)
            case _State.ESCAPE if char in '"\\/bfnrt':
                return self._go(_State.STRING)
            case _State.HEX if char in HEX:
                self._pending = self._pending[1:]
                return self._go(_State.HEX if self._pending else _State.STRING)
            case _State.LITERAL if char == self._pending[0]:
                self._pending = self._pending[1:]
                return 1 if self._pending else self._end_value()
            case _:
                return self._go(_State.INVALID)
