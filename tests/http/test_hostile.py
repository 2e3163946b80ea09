"""Bodies that somebody made to hurt, on every route that reads one: always an answer, never a 5xx.

What is sent is made from the routes' own types (body_fields.py), so that new ones are in by
themselves.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from aserve.bench.hostile_bodies import BODIES as HOSTILE_BODIES
from aserve.bench.hostile_bodies import HostileBody
from aserve.http.intake import INTAKE
from aserve.http.json_bounds import MAX_DEPTH
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import Answer, ask
from tests.http.body_fields import BODIES, PATHS, Place, alternatives, places, right_body

ENORMOUS = 1 << 18  # characters
SLOW_S = 30.0  # even beside other tests


async def posted(echo: EchoEngine, path: str, data: str | bytes) -> tuple[int, Any]:
    """Status and error code, None for a good answer; the server lives on afterwards."""
    async with asyncio.timeout(SLOW_S):
        answer = await ask(echo, path, data)
    assert answer.status < 500, (answer.text, data[:200])
    if answer.status < 400:
        return answer.status, None
    assert len(answer.error["message"]) < 1000, "an error doesn't send the body back"
    return answer.status, answer.error["code"]


def of_kind(path: str, *kinds: type[inspect.Type]) -> Iterator[Place]:
    for place in places(BODIES[path]):
        if any(isinstance(each, kinds) for each in alternatives(place.kind)):
            yield place


def body_with(path: str, place: Place, text: str) -> str:
    """A right body but for that JSON text at that place."""
    mark = "MARK"
    return json.dumps(right_body(path) | place.wrap(mark)).replace(f'"{mark}"', text)


EACH_PATH = pytest.mark.parametrize("path", PATHS)
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "0x1F", "01", "1.", "+1")
ODD_TEXTS = (
    "\0",
    "a\0b",
    "\ufeff\u202e\ufffe",
    "%s%n{}{{7*7}}{% raise %}",
    "../../etc/passwd",
    "🚀" * 300,
)


@EACH_PATH
async def test_an_invalid_number_is_a_400_in_every_field(echo: EchoEngine, path: str) -> None:
    for place in of_kind(path, inspect.IntType, inspect.FloatType):
        for number in NO_NUMBERS:
            assert (await posted(echo, path, body_with(path, place, number)))[0] == 400, place.path


@EACH_PATH
async def test_half_a_surrogate_pair_is_a_400_in_any_string(echo: EchoEngine, path: str) -> None:
    for place in of_kind(path, inspect.StrType):
        for text in (r'"\ud800"', r'"a\udc00b"', r'"\ud800\ud800"'):
            status, code = await posted(echo, path, body_with(path, place, text))
            assert (status, code) == (400, "invalid_json"), place.path


@EACH_PATH
async def test_any_string_may_hold_any_character(echo: EchoEngine, path: str) -> None:
    for place in of_kind(path, inspect.StrType):
        for text in ODD_TEXTS:
            await posted(echo, path, body_with(path, place, json.dumps(text)))


@EACH_PATH
async def test_an_enormous_string_in_any_field_is_answered_soon(
    echo: EchoEngine, path: str
) -> None:
    enormous = json.dumps("x" * ENORMOUS)
    for place in of_kind(path, inspect.StrType):
        if place.path.count(".") < 2:  # deeper ones are the same types
            await posted(echo, path, body_with(path, place, enormous))


@EACH_PATH
@pytest.mark.parametrize(
    ("depth", "shape"), [(10, "[]"), (200, '{"a":}'), (990, "[]"), (20_000, '{"a":}')]
)
async def test_deeply_nested_json_is_answered_in_any_field(
    echo: EchoEngine, path: str, depth: int, shape: str
) -> None:
    opening, closing = shape[:-1], shape[-1]
    deep = opening * depth + "1" + closing * depth
    top = [*BODIES[path].__struct_encode_fields__, "unknown"]
    for name in top:
        status, code = await posted(
            echo, path, json.dumps(right_body(path))[:-1] + f', "{name}": {deep}}}'
        )
        if depth > MAX_DEPTH:
            assert (status, code) == (400, "body_too_complex")
    for place in of_kind(path, inspect.AnyType, inspect.RawType, inspect.DictType):
        await posted(echo, path, body_with(path, place, deep))


@EACH_PATH
async def test_a_key_that_is_not_utf8_is_a_400(echo: EchoEngine, path: str) -> None:
    for key in (b"a\xff", b"\xed\xa0\x80", b"\xc0\xaf"):
        data = json.dumps(right_body(path)).encode()[:-1] + b', "' + key + b'": 1}'
        assert await posted(echo, path, data) == (400, "invalid_json")


@EACH_PATH
async def test_the_last_of_two_equal_members_counts(echo: EchoEngine, path: str) -> None:
    right = json.dumps(right_body(path))
    twice = f'{{"model": "nobody", {right[1:-1]}, "model": "echo"}}'
    assert await posted(echo, path, twice) == await posted(echo, path, right)
    if "model" not in BODIES[path].__struct_fields__:
        return
    other = await posted(echo, path, f'{right[:-1]}, "model": "nobody"}}')
    assert other == (404, "model_not_found")
    status, _ = await posted(echo, path, f'{{"model": 5, {right[1:-1]}, "model": "echo"}}')
    assert status == 400, "each of them is read"


@EACH_PATH
async def test_a_body_that_is_not_an_object_is_a_400(echo: EchoEngine, path: str) -> None:
    for data in ("[]", "null", "true", "5", '"text"', "", " ", "{", "{}}", "\0"):
        assert (await posted(echo, path, data))[0] == 400, data


@EACH_PATH
async def test_another_content_type_is_415(echo: EchoEngine, path: str) -> None:
    form, parts = "application/x-www-form-urlencoded", "multipart/form-data"
    for kind in ("text/plain", form, parts, "a", ""):
        answer = await ask(echo, path, right_body(path), headers={"Content-Type": kind})
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type"), kind


SIZE = 4 << 20
# Of one turn of the loop; ten times what it takes on a slow machine.
MAX_TURN_CPU_S = 0.5


@pytest.mark.parametrize("body", HOSTILE_BODIES, ids=lambda body: body.name.replace(" ", "-"))
async def test_each_is_refused_with_its_code_and_takes_the_loop_little_time(
    echo: EchoEngine, body: HostileBody
) -> None:
    data = body.data(SIZE)
    start_s = time.thread_time()
    async with echo.web.post(body.path, data=data, headers=body.headers) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (body.status, body.code), error
    assert len(error["message"]) < 300
    assert time.thread_time() - start_s < MAX_TURN_CPU_S
    assert not echo.scheduler.admitted
    assert echo.server._app[INTAKE].held_bytes == 0


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


async def answered(echo: EchoEngine, data: bytes) -> Answer:
    """The server goes on afterwards."""
    answer = await ask(echo, "/v1/chat/completions", data)
    assert (await ask(echo, "/v1/chat/completions", b"{%s}" % MESSAGES)).status == 200
    assert echo.died == []
    assert echo.gateway.num_open == 0
    return answer


@pytest.mark.parametrize("field", FIELDS)
async def test_a_value_that_no_json_has_is_refused_by_the_name_of_its_field(
    echo: EchoEngine, field: str
) -> None:
    for name, value in VALUES.items():
        answer = await answered(echo, FIELDS[field].replace(b"@", value))
        assert answer.status == 400, (name, answer.text)
        if name in ("infinite", "many digits", "many digits below zero"):
            assert answer.error["param"].startswith(field), name


@pytest.mark.parametrize("value", ["infinite", "many digits", "deep", "deeper", "a lone surrogate"])
async def test_arguments_that_are_no_json_stay_the_text_that_they_are(
    echo: EchoEngine, value: str
) -> None:
    answer = await answered(echo, within_text(VALUES[value]))
    assert answer.status == 200, answer.text


async def test_a_number_of_more_than_64_bits_is_still_a_number(echo: EchoEngine) -> None:
    for field in FIELDS.values():
        answer = await answered(echo, field.replace(b"@", b"1234567890" * 3))
        assert answer.status == 200, answer.text
