"""Pages of other origins: without the option nothing, with it the named ones, also for errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import Answer, ask, bearer

PAGE, OTHER = "https://chat.example", "https://evil.example"
ALLOW_ORIGIN = "Access-Control-Allow-Origin"
WANTED = "authorization,content-type, x-stainless-os"


async def preflight(
    echo: EchoEngine, path: str, origin: str = PAGE, wanted: str = WANTED, **headers: str
) -> Answer:
    given = {"Origin": origin, "Access-Control-Request-Method": "POST"} | headers
    given |= {"Access-Control-Request-Headers": wanted}
    return await ask(echo, path, method="OPTIONS", headers=given)


def cors_headers(answer: Answer) -> set[str]:
    return {name for name in answer.headers if name.startswith("Access-Control-")}


@pytest.mark.parametrize("allowed", [PAGE, f"https://b.example,{PAGE.upper()}", "*"])
async def test_a_preflight_of_an_allowed_origin_needs_no_key(allowed: str) -> None:
    async with EchoEngine(allowed_origins=allowed, api_key="secret") as echo:
        answer = await preflight(echo, "/v1/chat/completions")
        assert (answer.status, answer.text) == (204, "")
        assert answer.headers[ALLOW_ORIGIN] == PAGE
        assert answer.headers["Access-Control-Allow-Methods"] == "POST"
        assert answer.headers["Access-Control-Allow-Headers"] == WANTED
        assert answer.headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in answer.headers
        both = await preflight(echo, "/v1/responses/resp_1")
        assert both.headers["Access-Control-Allow-Methods"] == "DELETE, GET, HEAD"


async def test_answers_errors_and_streams_name_an_allowed_origin() -> None:
    async with EchoEngine(allowed_origins=PAGE, api_key="secret") as echo:
        body: dict[str, Any] = {"prompt": "a"}
        for headers, sent, status in (
            (bearer("secret"), body, 200),
            (bearer("secret"), body | {"stream": True}, 200),
            (bearer("secret"), body | {"n": 0}, 400),
            (bearer("wrong"), body, 401),
        ):
            for origin in (PAGE, OTHER):
                given = headers | {"Origin": origin}
                answer = await ask(echo, "/v1/completions", sent, headers=given)
                assert answer.status == status
                assert answer.headers.get(ALLOW_ORIGIN) == (PAGE if origin == PAGE else None)
                assert answer.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    ("allowed", "path", "headers"),
    [
        (None, "/v1/models", {}),
        (PAGE, "/v1/models", {"origin": OTHER}),
        (PAGE, "/v1/models", {"origin": "null"}),
        (PAGE, "/v1/models", {"origin": PAGE + ".evil.example"}),
        (PAGE, "/v1/models", {"Host": "evil.example"}),
        (PAGE, "/v1/unknown", {}),
    ],
)
async def test_other_preflights_get_nothing(
    allowed: str | None, path: str, headers: dict[str, str]
) -> None:
    async with EchoEngine(allowed_origins=allowed, api_key="secret") as echo:
        answer = await preflight(echo, path, **headers)
        assert answer.status in (401, 403)
        assert "Access-Control-Allow-Methods" not in cors_headers(answer)
        assert (ALLOW_ORIGIN in answer.headers) is (allowed is not None and "origin" not in headers)


async def test_headers_that_are_no_names_are_not_sent_back() -> None:
    async with EchoEngine(allowed_origins="*") as echo:
        answer = await preflight(echo, "/v1/models", wanted="a, <b>")
        assert "Access-Control-Allow-Headers" not in answer.headers
        private = {"Access-Control-Request-Private-Network": "true"}
        answer = await preflight(echo, "/v1/models", wanted="a", **private)
        assert answer.headers["Access-Control-Allow-Private-Network"] == "true"
