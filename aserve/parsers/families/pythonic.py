"""Calls as a list of Python calls: `[get_weather(city="Rome", days=2), get_time()]`.

Llama 4, Llama 3.2 and ToolACE write them. A list is one of calls only if it begins with a tool of
the request. Arguments are literals with a keyword, and become JSON.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence

from aserve.parsers.base import CallSyntax, ToolFamily
from aserve.parsers.calls import CallWriter, name_of_call, read_calls, run
from aserve.parsers.events import ToolSpec
from aserve.parsers.python_values import python_value
from aserve.parsers.reader import MAX_SPACE, CallError, Parsing, Reader
from aserve.parsers.xml_values import quoted

START, END = "<|python_start|>", "<|python_end|>"
KEYWORD = re.compile(r"\w+")


def parse(reader: Reader, tool_specs: Sequence[ToolSpec]) -> Parsing[None]:
    names = {spec.name for spec in tool_specs}
    calls = functools.partial(_calls, names=names)
    return read_calls(reader, calls, begins=(START, "[", END), unmarked=("[",))


def _calls(reader: Reader, found: str, *, names: Collection[str]) -> Parsing[None]:
    if found == END:  # it may be missing
        reader.release()
        return
    if found == START:
        yield from reader.expect("[")
    while True:
        yield from _call(reader, names)
        if (yield from reader.expect(",", "]")) == "]":
            return
        reader.hold()


def _call(reader: Reader, names: Collection[str]) -> Parsing[None]:
    name = yield from name_of_call(reader)
    if name not in names and (yield from reader.peek()):
        raise CallError(f"there is no tool of the name {name[:40]!r}")
    call = CallWriter(reader, name)
    yield from reader.expect("(")
    separator = "{"
    while not (yield from reader.accept(")", space=MAX_SPACE)):
        key = yield from _keyword(reader)
        call.write(f"{separator}{quoted(key)}: ")
        separator = ", "
        yield from python_value(reader, call.write)
        if (yield from reader.expect(",", ")")) == ")":
            break
    call.write("{}" if separator == "{" else "}")


def _keyword(reader: Reader) -> Parsing[str]:
    yield from reader.skip_space()
    key = yield from run(reader, KEYWORD)
    yield from reader.expect("=")
    if not key:
        raise CallError("an argument has no keyword")
    return key


SYNTAX = CallSyntax("{name}(", ")", trigger="[", style="python", separator=", ", section=("[", "]"))
PYTHONIC = ToolFamily(parse, SYNTAX, markers=(START, END), begins=(START,))
