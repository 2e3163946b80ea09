"""Mistral's calls, in the form of each of its tokenizers.

up to v7   [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]
from v11   [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}
"""

from __future__ import annotations

from collections.abc import Sequence

from aserve.parsers.base import CallSyntax, ToolFamily
from aserve.parsers.calls import CallWriter, name_of_call, read_calls
from aserve.parsers.events import ToolSpec
from aserve.parsers.json_calls import arguments, json_call
from aserve.parsers.reader import Parsing, Reader

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def parse(reader: Reader, _: Sequence[ToolSpec]) -> Parsing[None]:
    return read_calls(reader, _calls, begins=(CALLS,))


def _calls(reader: Reader, _: str) -> Parsing[None]:
    yield from reader.skip_space()
    match (yield from reader.peek()):
        case "[":
            yield from _list(reader)
        case "{":
            yield from json_call(reader)
        case _:
            yield from _named_call(reader)


def _list(reader: Reader) -> Parsing[None]:
    yield from reader.char()
    while True:
        yield from json_call(reader)
        if (yield from reader.expect(",", "]")) == "]":
            return
        reader.hold()


def _named_call(reader: Reader) -> Parsing[None]:
    call = CallWriter(reader, (yield from name_of_call(reader)))
    if (yield from reader.accept(CALL_ID, ARGS)) == CALL_ID:
        call.call_id = yield from name_of_call(reader)
        yield from reader.expect(ARGS)
    yield from reader.skip_space()
    yield from arguments(reader, call)
    call.finish()


MARKERS = (CALLS, CALL_ID, ARGS)
LISTED = CallSyntax(
    '{"name": "{name}", "arguments": ',
    "}",
    trigger=CALLS,
    separator=", ",
    section=(f"{CALLS}[", "]"),
)
NAMED = CallSyntax(f"{CALLS}{{name}}{ARGS}", "", trigger=CALLS)
MISTRAL = ToolFamily(parse, LISTED, markers=MARKERS, begins=(CALLS,), call_id_len=9)
MISTRAL_V11 = ToolFamily(parse, NAMED, markers=MARKERS, begins=(CALLS,), call_id_len=9)
