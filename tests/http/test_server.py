"""The server around the routes: phases, keys, sizes, streams that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from aserve.errors import EngineDead, QueueFull, ShuttingDown, StepError
from aserve.http.openai.completions import CompletionDialect
from aserve.messages.base import ServerPhase
from aserve.messages.requests import Cancel
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, complete

COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "a"}]
PROMPT: dict[str, Any] = {"prompt": "hello world", "max_tokens": 50}
STREAM = PROMPT | {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("phase", ["starting", "draining", "dead"])
async def test_refusals_follow_the_phase(echo: EchoEngine, phase: ServerPhase) -> None:
    echo.state.phase, echo.state.reason = phase, "because"
    refused = await ask(echo, COMPLETIONS, PROMPT)
    code = "engine_dead" if phase == "dead" else f"server_{phase}"
    assert (refused.status, refused.error["code"]) == (503, code)
    assert ("Retry-After" in refused.headers) is (phase != "dead")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other/name", 404, "model_not_found"),
        ("POST", "/v1/responses/other/name", 404, "unknown_url"),
    ],
)
async def test_unknown_routes_and_methods_have_the_same_envelope(
    echo: EchoEngine, method: str, path: str, status: int, code: str
) -> None:
    answer = await ask(echo, path, method=method)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert ("Allow" in answer.headers) is (status == 405)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_that_is_too_large_is_413(is_chunked: bool) -> None:
    data = b'{"prompt": "' + b"a" * 5000 + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        yield data

    async with EchoEngine(max_body_size=2048) as echo:
        answer = await ask(echo, COMPLETIONS, pieces() if is_chunked else data)
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


async def test_metrics_are_public_without_a_key_or_where_the_option_says_so() -> None:
    public: dict[str, Any] = {"api_key": "secret", "public_metrics": True}
    for options in ({}, public):
        async with EchoEngine(**options) as echo:
            assert (await ask(echo, "/metrics")).status == 200
            assert (await ask(echo, "/v1/models")).status == (401 if options else 200)


async def test_models_are_listed_and_found_by_name(echo: EchoEngine) -> None:
    models = (await echo.client.models.list()).data
    assert [model.id for model in models] == ["echo", "parrot"]
    assert models[0].model_dump()["max_model_len"] == 512
    assert [await echo.client.models.retrieve(model.id) for model in models] == models


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_fields_without_effect_are_named_in_a_header(
    echo: EchoEngine, path: str, streams: bool
) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == "completions" else {"messages": MESSAGES}
    body |= {"stream": streams}
    answer = await ask(echo, f"/v1/{path}", body)
    assert (answer.status, answer.headers.get("X-Ignored-Params")) == (200, None)
    body |= {"user": "me", "store": False, "verbosity": None, "a\r\nb: ö" + "x" * 90: {"n": 1}}
    answer = await ask(echo, f"/v1/{path}", body)
    assert answer.status == 200
    assert answer.headers["X-Ignored-Params"] == "user, store, a__b___" + "x" * 33


async def test_the_header_of_ignored_fields_is_bounded(echo: EchoEngine) -> None:
    body = {f"{i:x>1000}": 1 for i in range(200)}
    answer = await ask(echo, COMPLETIONS, body | {"prompt": "a"})
    assert answer.headers["X-Ignored-Params"] == ", ".join(["x" * 40] * 16 + ["..."])


async def test_every_answer_has_an_id_of_the_servers_making(echo: EchoEngine) -> None:
    """Trap 13: a client's id never becomes a key."""
    headers = {"X-Request-Id": "mine"}
    answers = [await ask(echo, COMPLETIONS, PROMPT, headers=headers) for _ in range(2)]
    for answer in answers:
        assert answer.json["id"] == f"cmpl-{answer.headers['X-Request-Id']}"
    answers.append(await ask(echo, "/nowhere", headers=headers))
    answers.append(await ask(echo, COMPLETIONS, PROMPT, headers={"Expect": "wonders"}))
    assert answers[-1].status == 417
    ids = {answer.headers["X-Request-Id"] for answer in answers}
    assert len(ids - {"mine"}) == 4


async def test_a_full_queue_is_a_429_with_retry_after(echo: EchoEngine) -> None:
    echo.scheduler.refusal = QueueFull("512 sequences wait", retry_after_s=1.2).info()
    for body in (PROMPT, STREAM):
        answer = await ask(echo, COMPLETIONS, body)
        assert (answer.status, answer.headers["Retry-After"]) == (429, "2")
        assert answer.error["code"] == "queue_full"


async def test_one_refused_prompt_cancels_the_other_prompts_of_its_call(echo: EchoEngine) -> None:
    echo.scheduler.is_paused = True
    answer = await ask(echo, COMPLETIONS, PROMPT | {"prompt": ["hello", "z" * 1000, "world"]})
    assert answer.error["code"] == "context_length_exceeded"
    await echo.until(lambda: len(echo.scheduler.cancels) == 2)
    assert not echo.scheduler.live
    assert echo.gateway.num_open == 0


async def test_a_timeout_is_a_408_that_clients_do_not_retry(echo: EchoEngine) -> None:
    echo.scheduler.is_paused = True
    asked = asyncio.create_task(ask(echo, COMPLETIONS, PROMPT))
    await echo.until(lambda: bool(echo.scheduler.live))
    (request,) = echo.scheduler.admitted
    echo.scheduler.inbox.send(Cancel(request.request_id, None, 0, "deadline"))
    answer = await asked
    assert (answer.status, answer.headers["X-Should-Retry"]) == (408, "false")
    assert answer.error["code"] == "deadline_exceeded"


@pytest.mark.parametrize("code", ["step_failed", "engine_dead", "server_draining"])
async def test_a_stream_that_fails_ends_with_an_error_event_and_done(
    echo: EchoEngine, code: str
) -> None:
    echo.scheduler.is_paused = True
    post = asyncio.create_task(echo.web.post(COMPLETIONS, json=STREAM))
    await echo.until(lambda: bool(echo.scheduler.live))
    echo.scheduler.step()
    answer = await post
    match code:
        case "step_failed":
            echo.scheduler.fail(StepError("it broke").info())
        case "engine_dead":
            echo.gateway.end_all(EngineDead("it died").info())
        case _:
            echo.gateway.end_all(ShuttingDown("closing").info())
    *_, last, done, _ = (await answer.text()).split("\n\n")
    assert last.startswith('data: {"error":{"message":')
    assert code in last
    assert done == "data: [DONE]"


async def test_a_silent_stream_is_kept_alive_while_it_is_queued() -> None:
    async with EchoEngine(keep_alive_s=0.01) as echo:
        echo.scheduler.is_paused = True
        async with echo.web.post(COMPLETIONS, json=STREAM) as answer:
            assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            echo.scheduler.is_paused = False
            echo.scheduler.resume()
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        stream = await complete(echo, **PROMPT, stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "hello world"


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_bug_is_opaque_and_names_the_request(
    echo: EchoEngine, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    """Before the answer, or in the middle of a stream."""

    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("/secret/path.py")

    if is_streaming:
        monkeypatch.setattr(CompletionDialect, "usage", broken)
    else:
        monkeypatch.setattr(echo.gateway, "open", broken)
    answer = await ask(echo, COMPLETIONS, STREAM if is_streaming else PROMPT)
    assert "secret" not in answer.text
    if is_streaming:
        assert '"code":"bug"' in answer.events[-2]
        assert answer.events[-1] == "data: [DONE]"
    else:
        assert (answer.status, answer.headers["X-Should-Retry"]) == (500, "false")
        assert answer.headers["X-Request-Id"] in answer.error["message"]


async def test_a_stop_waits_neither_for_idle_connections_nor_for_slow_readers() -> None:
    async with EchoEngine() as echo:
        assert (await ask(echo, "/health")).status == 200
        echo.scheduler.is_paused = True
        post = asyncio.create_task(echo.web.post(COMPLETIONS, json=STREAM))
        await echo.until(lambda: bool(echo.scheduler.live))
        echo.scheduler.step()
        stream = await post
        echo.gateway.end_all(ShuttingDown("closing").info())
        async with asyncio.timeout(30):
            await echo.server.stop()
        assert (await stream.text()).endswith("data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientConnectionError):
            await ask(echo, "/health")
