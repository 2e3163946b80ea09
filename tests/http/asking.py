"""How tests ask a server with the echo engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from aserve.messages.base import array_i32
from aserve.messages.requests import GenerateRequest
from aserve.request_stream import RequestStream
from tests.fakes.echo_engine import EchoEngine

WAIT = {"queue_position", "expected_wait_ms"}
JSON_HEADERS = {"Content-Type": "application/json"}


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's fields, of whichever API the envelope is."""
        body = self.json
        error: dict[str, Any] = body["error"]
        if isinstance(error, str):
            assert set(body) - {"error_type"} == {"error", "code", "param"}, self.text
            return {"message": error, "param": body["param"], "code": body["code"]}
        assert set(body) == {"error"} or body["type"] == "error", self.text
        assert set(error) - WAIT == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[str]:
        return [event for event in self.text.split("\n\n") if event]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events of a stream that ended well."""
        *events, done = self.events
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]


async def ask(
    echo: EchoEngine,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """POST of a body, as JSON unless it is text or bytes already; GET where there is none."""
    method = method or ("GET" if body is None else "POST")
    data = json.dumps(body) if isinstance(body, dict | list) else body
    given = JSON_HEADERS | dict(headers or {})
    async with echo.web.request(method, path, data=data, headers=given) as answer:
        return Answer(answer.status, answer.headers, await answer.text())


async def told(echo: EchoEngine, path: str, body: Any, **fields: Any) -> Any:
    """The JSON of an answer that is good."""
    answer = await ask(echo, path, body | fields)
    assert answer.status == 200, answer.text
    return answer.json


async def complete(echo: EchoEngine, /, prompt: Any, **body: Any) -> Any:
    """A completion, or its stream, through the official client."""
    return await echo.client.completions.create(model="echo", prompt=prompt, **body)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def prompts(echo: EchoEngine) -> list[str]:
    """The prompts that the engine got."""
    ids = [array_i32(request.prompt_ids).tolist() for request in echo.scheduler.admitted]
    return [echo.tokenizer.decode(each) for each in ids]


def opened_requests(echo: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> list[GenerateRequest]:
    """The requests that the server opens from now on."""
    opened: list[GenerateRequest] = []
    submit = echo.gateway.open

    def noted(*requests: GenerateRequest) -> RequestStream:
        opened.extend(requests)
        return submit(*requests)

    monkeypatch.setattr(echo.gateway, "open", noted)
    return opened
