"""Fields of other servers that would change the output are refused, whatever carries the body."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aserve.errors import InvalidRequest
from aserve.http.openai.schema import ChatBody
from aserve.http.unknown_fields import FOREIGN, ignored_fields
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    "/generate": {"text": "a"},
    "/completion": {"prompt": "a"},
    "/tokenize": {"messages": [{"role": "user", "content": "a"}]},
}


def body_of(name: str, value: object) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value))}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_field_is_refused_with_advice_unless_its_value_changes_nothing(name: str) -> None:
    field = FOREIGN[name]
    for value in (None, *field.neutral):
        assert ignored_fields(body_of(name, value), ChatBody) in ("", name)
    for value in ({"x": 1}, 7, "x", True):
        with pytest.raises(InvalidRequest) as raised:
            ignored_fields(body_of(name, value), ChatBody, where="body")
        error = raised.value.info()
        assert (error.code, error.param) == ("unsupported_parameter", f"body.{name}")
        assert field.advice in error.message


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_refuses_them(echo: EchoEngine, path: str) -> None:
    body = BODIES[path]
    assert (await ask(echo, path, body | {"watermark": False})).status == 200
    answer = await ask(echo, path, body | {"watermark": True})
    assert (answer.status, answer.error["param"]) == (400, "watermark")
    assert answer.error["code"] == "unsupported_parameter"


async def test_a_known_field_of_the_same_name_is_not_foreign(echo: EchoEngine) -> None:
    body = BODIES["/v1/completions"] | {"best_of": 2}
    assert (await ask(echo, "/v1/completions", body)).status == 200
