"""Bodies that somebody made to hurt, on every route that reads one: always an answer, never a 5xx.

What is sent is made from the routes' own types (body_fields.py), so that new ones are in by
themselves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from msgspec import inspect

from aserve.http.json_bounds import MAX_DEPTH
from tests.http.body_fields import BODIES, RIGHT, Place, alternatives, places

JSON_HEADERS = {"Content-Type": "application/json"}
ENORMOUS = 1 << 18  # characters
SLOW_S = 5.0  # even beside other tests


async def posted(web: aiohttp.ClientSession, path: str, data: str | bytes) -> tuple[int, Any]:
    """Status and error code, None for a good answer; the server lives on afterwards."""
    async with (
        asyncio.timeout(SLOW_S),
        web.post(path, data=data, headers=JSON_HEADERS) as answer,
    ):
        assert answer.status < 500, (await answer.text(), data[:200])
        if answer.status < 400:
            await answer.read()
            return answer.status, None
        error = (await answer.json())["error"]
        assert len(error["message"]) < 1000, "an error doesn't send the body back"
        return answer.status, error["code"]


def of_kind(path: str, *kinds: type[inspect.Type]) -> Iterator[Place]:
    for place in places(BODIES[path]):
        if any(isinstance(each, kinds) for each in alternatives(place.kind)):
            yield place


def body_with(place: Place, text: str) -> str:
    """A right body but for that JSON text at that place."""
    mark = "MARK"
    return json.dumps(RIGHT | place.wrap(mark)).replace(f'"{mark}"', text)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "0x1F", "01", "1.", "+1"]
)
async def test_an_invalid_number_is_a_400_in_every_field(
    web: aiohttp.ClientSession, path: str, number: str
) -> None:
    for place in of_kind(path, inspect.IntType, inspect.FloatType):
        assert (await posted(web, path, body_with(place, number)))[0] == 400, place.path


@pytest.mark.parametrize("path", BODIES)
async def test_half_a_surrogate_pair_is_a_400_in_any_string(
    web: aiohttp.ClientSession, path: str
) -> None:
    for place in of_kind(path, inspect.StrType):
        for text in (r'"\ud800"', r'"a\udc00b"', r'"\ud800\ud800"'):
            status, code = await posted(web, path, body_with(place, text))
            assert (status, code) == (400, "invalid_json"), place.path


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "text",
    [
        "\0",
        "a\0b",
        "\ufeff\u202e\ufffe",
        "%s%n{}{{7*7}}{% raise %}",
        "../../etc/passwd",
        "🚀" * 300,
    ],
    ids=["null", "inner-null", "marks", "format", "path", "wide"],
)
async def test_any_string_may_hold_any_character(
    web: aiohttp.ClientSession, path: str, text: str
) -> None:
    for place in of_kind(path, inspect.StrType):
        await posted(web, path, body_with(place, json.dumps(text)))


@pytest.mark.parametrize("path", BODIES)
async def test_an_enormous_string_in_any_field_is_answered_soon(
    web: aiohttp.ClientSession, path: str
) -> None:
    enormous = json.dumps("x" * ENORMOUS)
    for place in of_kind(path, inspect.StrType):
        if place.path.count(".") < 2:  # deeper ones are the same types
            await posted(web, path, body_with(place, enormous))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("depth", [10, 200, 990, 100_000])
@pytest.mark.parametrize("shape", ["[]", '{"a":}'])
async def test_deeply_nested_json_is_answered_in_any_field(
    web: aiohttp.ClientSession, path: str, depth: int, shape: str
) -> None:
    opening, closing = shape[:-1], shape[-1]
    deep = opening * depth + "1" + closing * depth
    top = [*BODIES[path].__struct_encode_fields__, "unknown"]
    for name in top:
        status, code = await posted(web, path, json.dumps(RIGHT)[:-1] + f', "{name}": {deep}}}')
        if depth > MAX_DEPTH:
            assert (status, code) == (400, "body_too_complex")
    for place in of_kind(path, inspect.AnyType, inspect.RawType, inspect.DictType):
        await posted(web, path, body_with(place, deep))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("key", [b"a\xff", b"\xed\xa0\x80", b"\xc0\xaf"])
async def test_a_key_that_is_not_utf8_is_a_400(
    web: aiohttp.ClientSession, path: str, key: bytes
) -> None:
    data = json.dumps(RIGHT).encode()[:-1] + b', "' + key + b'": 1}'
    assert await posted(web, path, data) == (400, "invalid_json")


@pytest.mark.parametrize("path", BODIES)
async def test_the_last_of_two_equal_members_counts(web: aiohttp.ClientSession, path: str) -> None:
    right = json.dumps(RIGHT)
    twice = f'{{"model": "nobody", {right[1:-1]}, "model": "echo"}}'
    assert await posted(web, path, twice) == await posted(web, path, right)
    assert await posted(web, path, f'{right[:-1]}, "model": "nobody"}}') == (404, "model_not_found")
    status, _ = await posted(web, path, f'{{"model": 5, {right[1:-1]}, "model": "echo"}}')
    assert status == 400, "each of them is read"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("data", ["[]", "null", "true", "5", '"text"', "", " ", "{", "{}}", "\0"])
async def test_a_body_that_is_not_an_object_is_a_400(
    web: aiohttp.ClientSession, path: str, data: str
) -> None:
    assert (await posted(web, path, data))[0] == 400


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "a", ""]
)
async def test_another_content_type_is_415(
    web: aiohttp.ClientSession, path: str, kind: str
) -> None:
    headers = {"Content-Type": kind}
    async with web.post(path, data=json.dumps(RIGHT), headers=headers) as answer:
        assert answer.status == 415
        assert (await answer.json())["error"]["code"] == "unsupported_media_type"
