"""Reads a call that is one JSON object: `{"name": "f", "arguments": {...}}`.

The name may come after the arguments, and these may be a JSON text in a string. Further members
are ignored. The arguments are emitted as the model writes them.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from aserve.parsers.calls import CallWriter
from aserve.parsers.json_scan import HEX, JsonScanner
from aserve.parsers.reader import MAX_SPACE, AnswerEnded, CallError, Parsing, Reader
from aserve.parsers.writer import ignore

NAMES = ("name",)
ARGUMENTS = ("arguments", "parameters")
MAX_STRING = 1_000  # characters of a name, an id or a key
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "/": "/", "\\": "\\", '"': '"'}
REPLACEMENT = "\ufffd"


def json_call(reader: Reader, *, known: Collection[str] | None = None) -> Parsing[None]:
    """Reads a call and emits it. With `known`, an object is a call only if its name is one of them
    and it has arguments. Raises CallError.
    """
    call = CallWriter(reader)
    keys: set[str] = set()
    yield from reader.expect("{")
    is_done = bool((yield from reader.accept("}", space=MAX_SPACE)))
    while not is_done:
        key = yield from json_text(reader)
        yield from reader.expect(":")
        yield from reader.skip_space()
        is_ignored = key in ARGUMENTS and not keys.isdisjoint(ARGUMENTS)
        yield from _member(reader, call, "" if is_ignored else key, known)
        keys.add(key)
        is_done = (yield from reader.expect(",", "}")) == "}"
    if known is not None and keys.isdisjoint(ARGUMENTS):
        raise CallError("the object has no arguments")
    call.finish()


def _member(
    reader: Reader, call: CallWriter, key: str, known: Collection[str] | None
) -> Parsing[None]:
    if key in NAMES:
        name = yield from json_text(reader)
        if not name or (known is not None and name not in known):
            raise CallError(f"there is no tool of the name {name[:40]!r}")
        call.set_name(name)
    elif key in ARGUMENTS:
        yield from arguments(reader, call)
    elif key == "id" and (yield from reader.peek()) == '"':
        call.call_id = yield from json_text(reader)
    else:
        yield from reader.json_value(ignore)


def arguments(reader: Reader, call: CallWriter) -> Parsing[None]:
    """Reads the arguments: an object, null, or the JSON text of an object in a string."""
    match (yield from reader.peek()):
        case "{":
            yield from reader.json_value(call.write)
        case '"':
            yield from _quoted_arguments(reader, call)
        case "n":
            yield from reader.expect("null")
            call.write("{}")
        case "":
            raise AnswerEnded
        case _:
            raise CallError("the arguments are not an object")


def _quoted_arguments(reader: Reader, call: CallWriter) -> Parsing[None]:
    """Reads the arguments in a string.

    NOTE: the characters behind the first invalid one are given back, because how many of them are
    here depends on the cuts of the text.
    """
    scanner = JsonScanner()
    is_begun = False
    yield from reader.char()
    while True:
        yield from reader.peek()
        plain = reader.match(PLAIN)
        piece = plain or (yield from _escape_or_end(reader))
        if not piece:
            break
        start = 0 if is_begun else _num_spaces(piece)
        is_begun = is_begun or piece[start:].startswith("{")
        end = scanner.feed(piece, start) if is_begun else start
        call.write(piece[start:end])
        if scanner.is_done:
            end += _num_spaces(piece[end:])
        if end < len(piece):
            reader.unread(plain[end:])
            raise CallError("the arguments are not a JSON object")
    if is_begun and not scanner.is_done:
        raise CallError("the arguments are not a JSON object")
    if not is_begun:
        call.write("{}")


def _num_spaces(text: str) -> int:
    return len(text) - len(text.lstrip())


def json_text(reader: Reader) -> Parsing[str]:
    """Reads a JSON string of bounded size, and returns what it means."""
    yield from reader.expect('"')
    pieces: list[str] = []
    room = MAX_STRING
    while True:
        yield from reader.peek()
        plain = reader.match(PLAIN)
        reader.unread(plain[room:])
        piece = plain[:room] or (yield from _escape_or_end(reader))
        if not piece:
            return "".join(pieces)
        pieces.append(piece)
        room -= len(piece)
        if room <= 0:
            raise CallError(f"a name of {MAX_STRING} characters or more")


def _escape_or_end(reader: Reader) -> Parsing[str]:
    """Returns the meaning of an escape in a string, or "" at the string's end."""
    char = yield from reader.char()
    if char == '"':
        return ""
    if char != "\\":
        raise CallError("a control character in a string")
    escaped = yield from reader.char()
    if escaped == "u":
        return (yield from _unicode_escape(reader))
    if escaped not in ESCAPES:
        raise CallError("an invalid escape in a string")
    return ESCAPES[escaped]


def _unicode_escape(reader: Reader) -> Parsing[str]:
    r"""Reads the digits of `\u` and of the second half of a surrogate pair. Half a pair alone is
    replaced, because it cannot be encoded.
    """
    code = yield from _four_digits(reader)
    if not 0xD800 <= code < 0xDC00:
        return REPLACEMENT if 0xDC00 <= code < 0xE000 else chr(code)
    if not (yield from reader.accept("\\u", is_inside=True)):
        return REPLACEMENT
    low = yield from _four_digits(reader)
    if 0xDC00 <= low < 0xE000:
        return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00)
    return REPLACEMENT + (REPLACEMENT if 0xD800 <= low < 0xDC00 else chr(low))


def _four_digits(reader: Reader) -> Parsing[int]:
    digits = ""
    for _ in range(4):
        digits += yield from reader.char()
    if not HEX.issuperset(digits):
        raise CallError("an invalid escape in a string")
    return int(digits, 16)
