"""Llama 3's calls: `{"name": "f", "parameters": {"a": 1}}`, with `<|python_tag|>` before it or not.

Without the tag, an object is a call only if it names a tool of the request and has arguments.
Several calls are separated by semicolons, by tags or by nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from aserve.parsers.base import CallSyntax, ToolFamily
from aserve.parsers.calls import read_calls
from aserve.parsers.events import ToolSpec
from aserve.parsers.json_calls import json_call
from aserve.parsers.reader import Parsing, Reader

TAG = "<|python_tag|>"


def parse(reader: Reader, tool_specs: Sequence[ToolSpec]) -> Parsing[None]:
    names = {spec.name for spec in tool_specs}
    call = functools.partial(_call, names=names)
    return read_calls(reader, call, begins=(TAG, "{"), unmarked=("{",))


def _call(reader: Reader, found: str, *, names: Collection[str]) -> Parsing[None]:
    if found == "{":
        reader.unread("{")
    yield from json_call(reader, known=None if found == TAG else names)
    yield from reader.accept(";", space=1)


SYNTAX = CallSyntax('{"name": "{name}", "parameters": ', "}", trigger='{"name": ', separator="; ")
LLAMA3 = ToolFamily(parse, SYNTAX, markers=(TAG,), begins=(TAG,))
