"""POST /parse_function_call and /separate_reasoning, as in SGLang: the parsers of answers as pure
functions of a text. Without a name they take the parser of the server's model; a model without one
writes nothing but content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.openai.tools import ToolChoice, choose_tools
from aserve.http.route import post
from aserve.http.state import HttpContext
from aserve.parsers.events import Content, Malformed, ToolArguments, ToolCallStart, ToolSpec
from aserve.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    parse_function_call,
    separate_reasoning,
)


class CallsBody(msgspec.Struct, kw_only=True):
    text: str
    tools: list[dict[str, Any]] | None = None
    tool_call_parser: str | None = None


class ReasoningBody(msgspec.Struct, kw_only=True):
    text: str
    reasoning_parser: str | None = None


class ParsedCall(msgspec.Struct):
    tool_index: int
    name: str
    parameters: str


class ParsedCalls(msgspec.Struct):
    normal_text: str
    calls: list[ParsedCall]


class SeparatedText(msgspec.Struct):
    reasoning_text: str
    text: str


async def parse_calls(_: web.Request, context: HttpContext, body: CallsBody) -> web.Response:
    """Splits a text into tool calls and what is not a call."""
    specs = choose_tools(body.tools or (), ToolChoice()).specs
    name = _name_of(
        body.tool_call_parser, context.state.parsers.tools, TOOL_PARSERS, "tool_call_parser"
    )
    return await _parsed(context, lambda: calls_in(body.text, name, specs))


async def separate(_: web.Request, context: HttpContext, body: ReasoningBody) -> web.Response:
    """Splits a text into reasoning and content."""
    name = _name_of(
        body.reasoning_parser,
        context.state.parsers.reasoning,
        REASONING_PARSERS,
        "reasoning_parser",
    )
    return await _parsed(context, lambda: reasoning_in(body.text, name))


def calls_in(text: str, parser: str | None, specs: tuple[ToolSpec, ...]) -> ParsedCalls:
    if parser is None:
        return ParsedCalls(text, [])
    parsed = ParsedCalls("", [])
    for event in parse_function_call(text, parser, specs):
        match event:
            case ToolCallStart(index, name):
                parsed.calls.append(ParsedCall(index, name, ""))
            case ToolArguments(_, arguments):
                parsed.calls[-1].parameters += arguments
            case Content(part) | Malformed(part):
                parsed.normal_text += part
    return parsed


def reasoning_in(text: str, parser: str | None) -> SeparatedText:
    return (
        SeparatedText("", text)
        if parser is None
        else SeparatedText(*separate_reasoning(text, parser))
    )


def _name_of(given: str | None, own: str | None, known: Collection[str], param: str) -> str | None:
    name = given or own
    if name is not None and name not in known:
        raise InvalidRequest(
            f"Invalid '{param}': got '{name[:40]}'. Supported values are {', '.join(known)}.",
            param=param,
            code="invalid_value",
        )
    return name


async def _parsed(
    context: HttpContext, work: Callable[[], ParsedCalls | SeparatedText]
) -> web.Response:
    """Parses in the tokenizer's thread, because a text may be long."""
    parsed = await context.tokenize_service.run(lambda _: msgspec.json.encode(work()))
    return web.Response(body=parsed, content_type="application/json")


ROUTES = (
    post("/parse_function_call", CallsBody, parse_calls),
    post("/separate_reasoning", ReasoningBody, separate),
)
