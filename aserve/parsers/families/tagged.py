"""Calls as JSON objects between two tags: Hermes, Qwen 2.5 and 3, and the bundled model.

<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aserve.parsers.base import CallSyntax, ToolFamily
from aserve.parsers.calls import read_calls
from aserve.parsers.events import ToolSpec
from aserve.parsers.json_calls import json_call
from aserve.parsers.reader import Parsing, Reader


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """A parser of calls between the tags `begin` and `end`."""

    begin: str
    end: str

    def __call__(self, reader: Reader, tool_specs: Sequence[ToolSpec]) -> Parsing[None]:
        return read_calls(reader, self._call, begins=(self.begin,), ends=(self.end,))

    def _call(self, reader: Reader, _: str) -> Parsing[None]:
        yield from json_call(reader)
        if (yield from reader.expect(self.end, self.begin)) == self.begin:
            reader.unread(self.begin)


def tagged(begin: str, end: str, *, space: str) -> ToolFamily:
    """`space` is what a model writes between the tags and the object, and between calls."""
    syntax = CallSyntax(
        f'{begin}{space}{{"name": "{{name}}", "arguments": ',
        f"}}{space}{end}",
        trigger=begin,
        separator=space,
    )
    return ToolFamily(TaggedCalls(begin, end), syntax, markers=(begin, end), begins=(begin,))


HERMES = tagged("<tool_call>", "</tool_call>", space="\n")
ASERVE_TINY = tagged("<|tool_call|>", "<|/tool_call|>", space="")
