"""Calls whose arguments are text between tags: Qwen3-Coder and GLM-4.5.

    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>

Texts are not escaped, so an end tag counts only where the next tag follows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from aserve.parsers.base import CallSyntax, ToolFamily
from aserve.parsers.calls import CallWriter, name_of_call, read_calls, run
from aserve.parsers.events import ToolSpec
from aserve.parsers.reader import CallError, Markers, Parsing, Reader
from aserve.parsers.xml_values import XmlArguments

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
PARAMETER_NAME = re.compile(r"[^<>=\s]+")
GLM_NAME = re.compile(r"[^<>]+")
# An end tag may be missing where the next tag begins a line.
QWEN_ENDS = Markers(
    (PARAMETER_END, *(f"\n{tag}" for tag in (PARAMETER_END, PARAMETER, FUNCTION_END, END)))
)
GLM_ENDS = Markers((VALUE_END, f"\n{KEY}", f"\n{END}"))


def parse_qwen(reader: Reader, tool_specs: Sequence[ToolSpec]) -> Parsing[None]:
    call = functools.partial(_qwen_call, tool_specs=tool_specs)
    return read_calls(reader, call, begins=(BEGIN, FUNCTION), ends=(END,))


def _qwen_call(reader: Reader, found: str, *, tool_specs: Sequence[ToolSpec]) -> Parsing[None]:
    if found == BEGIN:
        yield from reader.expect(FUNCTION)
    call = CallWriter(reader, (yield from name_of_call(reader)))
    yield from reader.expect(">")
    following = yield from reader.expect(PARAMETER, FUNCTION_END, END)
    arguments = XmlArguments(call, tool_specs)
    while following == PARAMETER:
        key = yield from run(reader, PARAMETER_NAME)
        yield from reader.expect(">", space=0)
        yield from reader.accept("\n")
        following = yield from arguments.read_value(
            reader, key, ends=QWEN_ENDS, followers=(PARAMETER, FUNCTION_END, END)
        )
    arguments.finish()
    if following == FUNCTION_END:
        yield from reader.accept(END, space=2)


def parse_glm(reader: Reader, tool_specs: Sequence[ToolSpec]) -> Parsing[None]:
    call = functools.partial(_glm_call, tool_specs=tool_specs)
    return read_calls(reader, call, begins=(BEGIN,), ends=(END,))


def _glm_call(reader: Reader, _: str, *, tool_specs: Sequence[ToolSpec]) -> Parsing[None]:
    call = CallWriter(reader, (yield from name_of_call(reader)))
    following = yield from reader.expect(KEY, END)
    arguments = XmlArguments(call, tool_specs)
    while following == KEY:
        key = (yield from run(reader, GLM_NAME)).strip()
        if not key:
            raise CallError("an argument has no name")
        yield from reader.expect(KEY_END)
        yield from reader.expect(VALUE)
        following = yield from arguments.read_value(
            reader, key, ends=GLM_ENDS, followers=(KEY, END)
        )
    arguments.finish()


QWEN_SYNTAX = CallSyntax(
    f"{BEGIN}\n{FUNCTION}{{name}}>\n",
    f"\n{FUNCTION_END}\n{END}",
    trigger=BEGIN,
    style="qwen_xml",
    separator="\n",
)
GLM_SYNTAX = CallSyntax(
    f"{BEGIN}{{name}}\n", f"\n{END}", trigger=BEGIN, style="glm_xml", separator="\n"
)
GLM_MARKERS = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)
QWEN3_CODER = ToolFamily(parse_qwen, QWEN_SYNTAX, markers=(BEGIN, END), begins=(BEGIN,))
GLM45 = ToolFamily(parse_glm, GLM_SYNTAX, markers=GLM_MARKERS, begins=(BEGIN,))
