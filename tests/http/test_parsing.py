"""The parsers of answers over HTTP: /parse_function_call and /separate_reasoning."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from aserve.parsers.registry import ParserNames
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, told

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
async def echo() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(parsers=ParserNames("qwen3", "hermes")) as engine:
        yield engine


async def test_calls_and_other_text_are_told_apart(echo: EchoEngine) -> None:
    expected = {
        "normal_text": "hi",
        "calls": [
            {"tool_index": index, "name": "f", "parameters": '{"a": 1}'} for index in range(2)
        ],
    }
    body = {"text": f"hi{CALL}{CALL}", "tools": TOOLS}
    assert await told(echo, "/parse_function_call", body) == expected
    assert await told(echo, "/parse_function_call", body, tool_call_parser="hermes") == expected
    broken = await told(echo, "/parse_function_call", {"text": "<tool_call>{", "tools": TOOLS})
    assert broken == {"normal_text": "<tool_call>{", "calls": []}


async def test_reasoning_and_content_are_told_apart(echo: EchoEngine) -> None:
    answer = await told(echo, "/separate_reasoning", {"text": "<think>so</think>hi"})
    assert answer == {"reasoning_text": "so", "text": "hi"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/parse_function_call", {"tool_call_parser": "nobody"}, "tool_call_parser"),
        ("/parse_function_call", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("/separate_reasoning", {"reasoning_parser": "nobody"}, "reasoning_parser"),
    ],
)
async def test_an_unknown_parser_or_a_wrong_tool_is_refused(
    echo: EchoEngine, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = await ask(echo, path, {"text": "a"} | fields)
    assert (answer.status, answer.error["param"]) == (400, param)
