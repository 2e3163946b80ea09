"""Values of a body that are JSON only on the surface, deep within fields that nothing here reads:
each is a 400 that names its field, and the server goes on.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import aiohttp
import pytest

from tests.fakes.echo_engine import EchoEngine

HEADERS = {"Content-Type": "application/json"}
NESTED = "[" * 200 + "]" * 200
DEEPER_THAN_PYTHON = "[" * sys.getrecursionlimit() + "]" * sys.getrecursionlimit()

VALUES = {
    "infinite": b"1e999",
    "many digits": b"1" * 5000,
    "many digits below zero": b"-" + b"1" * 5000,
    "not UTF-8": b'"\xff"',
    "a key that is not UTF-8": b'{"\xff": 1}',
    "a lone surrogate": rb'"\ud800"',
    "a lone surrogate as key": rb'{"\udfff": 1}',
    "deep": NESTED.encode(),
    "deeper": DEEPER_THAN_PYTHON.encode(),
}

MESSAGES = b'"messages": [{"role": "user", "content": "hi"}]'
FIELDS = {
    "tools": b'{%s, "tools": [{"type": "function", "function": {"name": "f", "parameters": '
    b'{"maximum": @}}}]}' % MESSAGES,
    "chat_template_kwargs": b'{%s, "chat_template_kwargs": {"a": {"b": @}}}' % MESSAGES,
    "messages": b'{"messages": [{"role": "assistant", "tool_calls": [{"type": "function", '
    b'"function": {"name": "f", "arguments": {"a": @}}}]}]}',
}


def within_text(value: bytes) -> bytes:
    """A call's arguments as a text with JSON in it."""
    arguments = '{"a": ' + value.decode("utf-8", "surrogateescape") + "}"
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    text = json.dumps(body, ensure_ascii="\\ud" not in arguments)
    return text.encode("utf-8", "surrogateescape")


async def goes_on(echo: EchoEngine, web: aiohttp.ClientSession) -> None:
    async with web.post("/v1/chat/completions", data=b"{%s}" % MESSAGES, headers=HEADERS) as answer:
        assert answer.status == 200
    assert echo.died == []
    assert echo.gateway.num_open == 0


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("field", FIELDS)
async def test_a_value_that_no_json_has_is_refused_by_the_name_of_its_field(
    echo: EchoEngine, web: aiohttp.ClientSession, field: str, value: str
) -> None:
    data = FIELDS[field].replace(b"@", VALUES[value])
    async with web.post("/v1/chat/completions", data=data, headers=HEADERS) as answer:
        body: dict[str, Any] = await answer.json()
        assert answer.status == 400, body
    if value in ("infinite", "many digits", "many digits below zero"):
        assert str(body["error"]["param"]).startswith(field)
    await goes_on(echo, web)


@pytest.mark.parametrize("value", ["infinite", "many digits", "deep", "deeper", "a lone surrogate"])
async def test_arguments_that_are_no_json_stay_the_text_that_they_are(
    echo: EchoEngine, web: aiohttp.ClientSession, value: str
) -> None:
    data = within_text(VALUES[value])
    async with web.post("/v1/chat/completions", data=data, headers=HEADERS) as answer:
        assert answer.status == 200, await answer.text()
    await goes_on(echo, web)


async def test_a_number_of_more_than_64_bits_is_still_a_number(
    echo: EchoEngine, web: aiohttp.ClientSession
) -> None:
    for field in FIELDS.values():
        data = field.replace(b"@", b"123456789012345678901234567890")
        async with web.post("/v1/chat/completions", data=data, headers=HEADERS) as answer:
            assert answer.status == 200, await answer.text()
    await goes_on(echo, web)
