"""Converts a Python literal to JSON while it is read: `'a'` to `"a"`, `True` to `true`."""

from __future__ import annotations

import re

from aserve.parsers.calls import run
from aserve.parsers.json_scan import HEX, MAX_DEPTH
from aserve.parsers.reader import MAX_SPACE, AnswerEnded, CallError, Parsing, Reader
from aserve.parsers.writer import Write
from aserve.parsers.xml_values import quoted

WORD = re.compile(r"\w+")
NUMBER_CHARS = re.compile(r"[\w.+-]+")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
CONSTANTS |= {"true": "true", "false": "false", "null": "null"}
QUOTES = ("'", '"', "'''", '"""')
PLAIN = re.compile(r"[^\\'\"]+")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
ESCAPES |= {"\n": "", "/": "/", "\\": "\\", "'": "'", '"': '"'}
HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


def python_value(reader: Reader, write: Write, *, depth: int = 0) -> Parsing[None]:
    """Reads a literal and writes it as JSON. Raises CallError for what is none."""
    if depth > MAX_DEPTH:
        raise CallError("the arguments are nested too deep")
    yield from reader.skip_space()
    char = yield from reader.peek()
    if char in ("'", '"'):
        yield from _string(reader, write)
    elif char == "{":
        yield from _dict(reader, write, depth)
    elif char in ("[", "("):
        yield from _list(reader, write, depth)
    elif char.isalpha():
        word = yield from run(reader, WORD)
        if word not in CONSTANTS:
            raise _ended_or("an argument is not a literal", (yield from reader.peek()))
        write(CONSTANTS[word])
    else:
        yield from _number(reader, write)


def _ended_or(reason: str, following: str) -> CallError:
    return CallError(reason) if following else AnswerEnded()


def _number(reader: Reader, write: Write) -> Parsing[None]:
    number = (yield from run(reader, NUMBER_CHARS)).replace("_", "").removeprefix("+")
    following = yield from reader.peek()
    if not following or not NUMBER.fullmatch(number):
        raise _ended_or("an argument is not a literal", following)
    write(number)


def _list(reader: Reader, write: Write, depth: int) -> Parsing[None]:
    """Reads a list or a tuple."""
    end = "]" if (yield from reader.char()) == "[" else ")"
    write("[")
    is_first = True
    while not (yield from _is_closed(reader, end)):
        write("" if is_first else ", ")
        is_first = False
        yield from python_value(reader, write, depth=depth + 1)
        if (yield from reader.expect(",", end)) == end:
            break
    write("]")


def _dict(reader: Reader, write: Write, depth: int) -> Parsing[None]:
    yield from reader.char()
    write("{")
    is_first = True
    while not (yield from _is_closed(reader, "}")):
        write("" if is_first else ", ")
        is_first = False
        yield from reader.skip_space()
        yield from _string(reader, write)
        yield from reader.expect(":")
        write(": ")
        yield from python_value(reader, write, depth=depth + 1)
        if (yield from reader.expect(",", "}")) == "}":
            break
    write("}")


def _is_closed(reader: Reader, end: str) -> Parsing[bool]:
    if (yield from reader.accept(end, space=MAX_SPACE)):
        return True
    yield from reader.skip_space()
    if not (yield from reader.peek()):
        raise AnswerEnded
    return False


def _string(reader: Reader, write: Write) -> Parsing[None]:
    quote = yield from reader.expect(*QUOTES)
    write('"')
    while not (yield from reader.accept(quote, is_inside=True)):
        char = yield from reader.peek()
        if char == "\\":
            yield from _escape(reader, write)
        elif char in ("'", '"'):
            write(quoted((yield from reader.char()))[1:-1])
        elif char:
            write(quoted(reader.match(PLAIN))[1:-1])
        else:
            raise AnswerEnded
    if not (yield from reader.peek()):  # two quotes may become three
        raise AnswerEnded
    write('"')


def _escape(reader: Reader, write: Write) -> Parsing[None]:
    """Reads an escape. Half of a surrogate pair is written as JSON's own escape, so that two
    halves are a character.
    """
    yield from reader.char()
    char = yield from reader.char()
    if char not in HEX_ESCAPES:
        write(quoted(ESCAPES.get(char, "\\" + char))[1:-1])
        return
    digits = ""
    for _ in range(HEX_ESCAPES[char]):
        digits += yield from reader.char()
    if not HEX.issuperset(digits) or int(digits, 16) > 0x10FFFF:
        raise CallError("an invalid escape in a string")
    code = int(digits, 16)
    write(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else quoted(chr(code))[1:-1])
