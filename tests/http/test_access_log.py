"""The access log: a line per request with its id, status and times, and nothing that was said."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from aserve.host.logs import fields_of
from aserve.observability import request_log
from tests.fakes.echo_engine import EchoEngine
from tests.fakes.executor import FakeExecutor
from tests.http.asking import ask, bearer
from tests.http.whole_server import whole_server

SECRET = "xyzzy"
OPTIONS: dict[str, Any] = {"access_log": True, "api_key": "sesame"}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.endswith("access_log")]


async def test_each_request_but_quiet_probes_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with EchoEngine(**OPTIONS) as echo:
        asked = [
            ("/v1/completions", {"prompt": SECRET}, "sesame", 200, "/v1/completions"),
            ("/v1/completions", {"prompt": SECRET, "stream": True}, "sesame", 200, None),
            ("/v1/completions", {"prompt": SECRET, "n": 0}, "sesame", 400, None),
            ("/v1/completions", {"prompt": SECRET}, SECRET, 401, None),
            (f"/v1/models/{SECRET}", None, "sesame", 404, "/v1/models/{name}"),
            (f"/{SECRET}", None, "sesame", 404, "unknown"),
        ]
        for path, body, key, status, route in asked:
            answer = await ask(echo, path, body, headers=bearer(key))
            line = lines(caplog)[-1]
            assert f"id={answer.headers['X-Request-Id']} " in line
            assert f"route={route or path} status={status} client=" in line
        assert len(lines(caplog)) == len(asked)
        await ask(echo, "/livez")
        assert len(lines(caplog)) == len(asked)
        echo.state.phase = "dead"
        await ask(echo, "/livez")
        assert "route=/livez status=503" in lines(caplog)[-1]
    assert SECRET not in caplog.text
    assert "sesame" not in caplog.text


async def test_a_client_that_leaves_before_its_answer_is_499(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with EchoEngine(access_log=True) as echo:
        echo.scheduler.is_paused = True
        asked = asyncio.ensure_future(echo.web.post("/v1/completions", json={"prompt": "a"}))
        await echo.until(lambda: bool(echo.scheduler.live))
        asked.cancel()
        await echo.until(lambda: bool(echo.scheduler.cancels))
        await asyncio.sleep(0.01)
    assert "status=499" in lines(caplog)[-1]


async def test_without_the_option_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with EchoEngine() as echo:
        await ask(echo, "/v1/completions", {"prompt": "a"})
    assert lines(caplog) == []


async def test_no_level_logs_what_was_said(caplog: pytest.LogCaptureFixture) -> None:
    """Through the whole server, with good bodies, wrong ones, and steps and requests that are
    logged.
    """
    caplog.set_level(logging.DEBUG)
    options = {"access_log": True, "log_requests": True, "log_level": "debug"}
    async with whole_server(FakeExecutor(), **options) as server:
        bodies: list[Any] = [
            {"prompt": SECRET, "max_tokens": 4},
            {"prompt": SECRET * 100},
            {"prompt": [SECRET, 5]},
            {"prompt": "a", "stop": [SECRET], "stream": True},
            {"prompt": "a", "bad_words": [SECRET], "prediction": {"content": SECRET}},
            {"prompt": "a", SECRET: 1, "model": SECRET},
            SECRET,
        ]
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            for body in bodies:
                messages = [{"role": "user", "content": SECRET}]
                said = {"input": SECRET, "messages": messages} | body if body != SECRET else body
                async with server.client.post(path, json=said) as answer:
                    await answer.read()
        await server.until_idle()
    assert len(lines(caplog)) == 21
    assert SECRET not in caplog.text
    assert "request ended" in caplog.text


@pytest.mark.parametrize(("level", "shown"), [(0, 0), (1, 0), (2, 8), (3, 20)])
async def test_requests_are_logged_as_they_come_and_as_they_end(
    level: int, shown: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(request_log, "SHOWN_CHARS", 8)
    options = {"log_requests": True, "log_requests_level": level}
    async with whole_server(FakeExecutor(), **options) as server:
        prompt = "\n" + "x" * 19
        body = {"prompt": prompt, "max_tokens": 3, "temperature": 0.25, "n": 2, "ignore_eos": True}
        async with server.client.post("/v1/completions", json=body) as answer:
            texts = [choice["text"] for choice in (await answer.json())["choices"]]
        received, ended = (each for each in caplog.records if each.name.endswith("request_log"))
        await server.client.post("/v1/completions", json={"prompt": "x" * 6000})
        refused = next(each for each in caplog.records if "context_length" in each.getMessage())
    fields = fields_of(received)
    assert fields["operation"] == "text_completion"
    assert ('"temperature": 0.25' in str(fields["params"])) == (level > 0)
    assert fields.get("prompt", "") == prompt[:shown]
    fields = fields_of(ended)
    assert (fields["outcome"], fields["completion_tokens"]) == ("length,length", 6)
    assert fields["prompt_tokens"] == 20
    assert fields.get("outputs", "[]") == (repr(texts) if shown else "[]")
    assert "\n" not in received.getMessage()
    assert fields_of(refused)["outcome"] == "context_length_exceeded"
