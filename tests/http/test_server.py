"""The server around the routes: phases, keys, sizes, streams that fail, clients that vanish."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import openai
import pytest

from aserve.errors import ConfigError, EngineDead, QueueFull, ShuttingDown, StepError
from aserve.http.openai.completions import CompletionDialect
from aserve.http.routes import STUCK_S
from aserve.messages.base import ServerPhase
from aserve.messages.requests import Cancel
from tests.fakes.echo_engine import EchoEngine

MESSAGES = [{"role": "user", "content": "a"}]
PROMPT: dict[str, Any] = {"prompt": "hello world", "max_tokens": 50}


async def error_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    body = await answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("phase", "status", "code"),
    [
        ("starting", 503, "server_starting"),
        ("draining", 503, "server_draining"),
        ("dead", 503, "engine_dead"),
    ],
)
async def test_health_and_refusals_follow_the_phase(
    echo: EchoEngine, web: aiohttp.ClientSession, phase: ServerPhase, status: int, code: str
) -> None:
    async with web.get("/health") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ready"})
    echo.state.phase, echo.state.reason = phase, "because"
    async with web.get("/health") as answer:
        assert (answer.status, await answer.json()) == (503, {"status": phase, "reason": "because"})
    async with web.post("/v1/completions", json=PROMPT) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (status, code)
        assert ("Retry-After" in answer.headers) is (phase != "dead")


async def test_a_silent_engine_is_stuck_and_its_requests_still_wait(
    echo: EchoEngine, web: aiohttp.ClientSession
) -> None:
    echo.state.engine_age_s = lambda: STUCK_S + 2
    async with web.get("/health") as answer:
        body = {"status": "stuck", "reason": "the engine has sent nothing for 12 seconds"}
        assert (answer.status, await answer.json()) == (503, body)
    async with web.post("/v1/completions", json=PROMPT) as answer:
        assert answer.status == 200
    echo.state.engine_age_s = lambda: STUCK_S - 2
    async with web.get("/health") as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_and_methods_have_the_same_envelope(
    web: aiohttp.ClientSession, method: str, path: str, status: int, code: str
) -> None:
    async with web.request(method, path) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (status, code)
        assert ("Allow" in answer.headers) is (status == 405)


async def test_another_content_type_is_415(web: aiohttp.ClientSession) -> None:
    async with web.post("/v1/completions", data={"prompt": "a"}) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_that_is_too_large_is_413(is_chunked: bool) -> None:
    data = b'{"prompt": "' + b"a" * 5000 + b'"}'

    async def pieces() -> Any:
        yield data

    async with (
        EchoEngine(max_body_size=2048) as echo,
        aiohttp.ClientSession(echo.url) as session,
        session.post(
            "/v1/completions",
            data=pieces() if is_chunked else data,
            headers={"Content-Type": "application/json"},
        ) as answer,
    ):
        assert (answer.status, (await error_of(answer))["code"]) == (413, "request_too_large")


async def test_every_route_but_page_and_probes_needs_the_key() -> None:
    async with EchoEngine(api_key="se cret") as echo, aiohttp.ClientSession(echo.url) as session:
        for path in ("/", "/health"):
            async with session.get(path) as answer:
                assert answer.status == 200
        for given in (None, "Bearer wrong", "Basic se cret", "se cret", "Bearer "):
            headers = {} if given is None else {"Authorization": given}
            paths = ("/v1/models", "/v1/completions", "/v1/unknown", "/health/../v1/models")
            for path in (*paths, "/metrics"):
                async with session.get(path, headers=headers) as answer:
                    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                    assert (await error_of(answer))["code"] == "invalid_api_key"
        for path in ("/v1/models", "/metrics"):
            async with session.get(path, headers={"Authorization": "Bearer se cret"}) as answer:
                assert answer.status == 200


async def test_metrics_are_public_without_a_key_or_where_the_option_says_so() -> None:
    public: dict[str, Any] = {"api_key": "secret", "public_metrics": True}
    for options in ({}, public):
        async with EchoEngine(**options) as echo, aiohttp.ClientSession(echo.url) as session:
            async with session.get("/metrics") as answer:
                assert answer.status == 200
            async with session.get("/v1/models") as answer:
                assert answer.status == (401 if options else 200)


async def test_the_models_are_listed_with_their_context(client: openai.AsyncOpenAI) -> None:
    models = (await client.models.list()).data
    assert [model.id for model in models] == ["echo", "parrot"]
    assert models[0].model_dump()["max_model_len"] == 512


async def test_one_model_is_found_by_its_name(
    client: openai.AsyncOpenAI, web: aiohttp.ClientSession
) -> None:
    listed = (await client.models.list()).data
    assert [await client.models.retrieve(model.id) for model in listed] == listed
    async with web.get("/v1/models/other/name") as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_fields_without_effect_are_named_in_a_header(
    web: aiohttp.ClientSession, path: str, streams: bool
) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == "completions" else {"messages": MESSAGES}
    async with web.post(f"/v1/{path}", json=body | {"stream": streams}) as answer:
        assert answer.status == 200
        assert "X-Ignored-Params" not in answer.headers
    body |= {"user": "me", "store": False, "verbosity": None, "a\r\nb: ö" + "x" * 90: {"n": 1}}
    async with web.post(f"/v1/{path}", json=body | {"stream": streams}) as answer:
        assert answer.status == 200
        assert answer.headers["X-Ignored-Params"] == "user, store, a__b___" + "x" * 33


async def test_the_header_of_ignored_fields_is_bounded(web: aiohttp.ClientSession) -> None:
    body = {f"{i:x>1000}": 1 for i in range(200)}
    async with web.post("/v1/completions", json=body | {"prompt": "a"}) as answer:
        assert answer.status == 200
        assert answer.headers["X-Ignored-Params"] == ", ".join(["x" * 40] * 16 + ["..."])


async def test_every_answer_has_an_id_of_the_servers_making(web: aiohttp.ClientSession) -> None:
    """Trap 13: a client's id never becomes a key."""
    ids = set()
    for _ in range(2):
        headers = {"X-Request-Id": "mine"}
        async with web.post("/v1/completions", json=PROMPT, headers=headers) as answer:
            ids.add(answer.headers["X-Request-Id"])
            assert (await answer.json())["id"] == f"cmpl-{answer.headers['X-Request-Id']}"
    async with web.get("/nowhere") as answer:
        ids.add(answer.headers["X-Request-Id"])
    assert len(ids) == 3
    assert "mine" not in ids


async def test_the_page_streams_and_loads_nothing_from_elsewhere(
    web: aiohttp.ClientSession,
) -> None:
    async with web.get("/") as answer:
        page = await answer.text()
        assert answer.content_type == "text/html"
    assert len(page.splitlines()) < 80
    assert not re.search(r"https?://|src=|<link", page)
    assert "v1/completions" in page


async def test_a_full_queue_is_a_429_with_retry_after(
    echo: EchoEngine, web: aiohttp.ClientSession
) -> None:
    echo.scheduler.refusal = QueueFull("512 sequences wait", retry_after_s=1.2).info()
    for is_streaming in (False, True):
        async with web.post("/v1/completions", json=PROMPT | {"stream": is_streaming}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "2")
            assert (await error_of(answer))["code"] == "queue_full"


async def test_one_refused_prompt_cancels_the_other_prompts_of_its_call(
    echo: EchoEngine, web: aiohttp.ClientSession
) -> None:
    echo.scheduler.is_paused = True
    body = PROMPT | {"prompt": ["hello", "z" * 1000, "world"]}
    async with web.post("/v1/completions", json=body) as answer:
        assert (await error_of(answer))["code"] == "context_length_exceeded"
    await echo.until(lambda: len(echo.scheduler.cancels) == 2)
    assert not echo.scheduler.live
    assert echo.gateway.num_open == 0


async def test_the_official_client_sees_that_the_context_is_too_long(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as caught:
        await client.completions.create(model="echo", prompt="z" * 600)
    assert caught.value.code == "context_length_exceeded"


async def test_a_timeout_is_a_408_that_clients_do_not_retry(
    echo: EchoEngine, web: aiohttp.ClientSession
) -> None:
    echo.scheduler.is_paused = True
    post = asyncio.create_task(web.post("/v1/completions", json=PROMPT))
    await echo.until(lambda: bool(echo.scheduler.live))
    (request,) = echo.scheduler.admitted
    echo.scheduler.inbox.send(Cancel(request.request_id, None, 0, "deadline"))
    answer = await post
    assert (answer.status, answer.headers["X-Should-Retry"]) == (408, "false")
    assert (await error_of(answer))["code"] == "deadline_exceeded"


async def events_of(answer: aiohttp.ClientResponse) -> list[str]:
    return [event for event in (await answer.text()).split("\n\n") if event]


@pytest.mark.parametrize(
    ("kind", "code"),
    [("step", "step_failed"), ("death", "engine_dead"), ("drain", "server_draining")],
)
async def test_a_stream_that_fails_ends_with_an_error_event_and_done(
    echo: EchoEngine, web: aiohttp.ClientSession, kind: str, code: str
) -> None:
    echo.scheduler.is_paused = True
    body = PROMPT | {"stream": True, "stream_options": {"include_usage": True}}
    post = asyncio.create_task(web.post("/v1/completions", json=body))
    await echo.until(lambda: bool(echo.scheduler.live))
    echo.scheduler.step()
    answer = await post
    match kind:
        case "step":
            echo.scheduler.fail(StepError("it broke").info())
        case "death":
            echo.gateway.end_all(EngineDead("it died").info())
        case _:
            echo.gateway.end_all(ShuttingDown("closing").info())
    events = await events_of(answer)
    assert answer.status == 200
    assert code in events[-2]
    assert events[-2].startswith('data: {"error":{"message":')
    assert events[-1] == "data: [DONE]"


async def test_the_official_client_raises_the_error_of_a_stream(
    echo: EchoEngine, client: openai.AsyncOpenAI
) -> None:
    echo.scheduler.is_paused = True
    create = asyncio.create_task(client.completions.create(model="echo", stream=True, **PROMPT))
    await echo.until(lambda: bool(echo.scheduler.live))
    echo.scheduler.step()
    stream = await create
    echo.scheduler.fail(StepError("it broke").info())
    with pytest.raises(openai.APIError, match="it broke"):
        [chunk async for chunk in stream]


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("num_steps", [0, 2])
async def test_a_client_that_disconnects_cancels_its_requests(
    echo: EchoEngine, web: aiohttp.ClientSession, is_streaming: bool, num_steps: int
) -> None:
    """Queued or running, streaming or not."""
    echo.scheduler.is_paused = True
    body = PROMPT | {"stream": is_streaming, "n": 3}
    post = asyncio.create_task(web.post("/v1/completions", json=body))
    await echo.until(lambda: bool(echo.scheduler.live))
    for _ in range(num_steps):
        echo.scheduler.step()
    if is_streaming and num_steps:
        (await post).close()
    else:
        post.cancel()
    await echo.until(lambda: bool(echo.scheduler.cancels))
    (cancel,) = echo.scheduler.cancels
    assert (cancel.child, cancel.reason) == (None, "cancelled")
    assert (echo.gateway.num_open, echo.scheduler.live) == (0, {})


async def test_a_silent_stream_is_kept_alive_while_it_is_queued() -> None:
    async with EchoEngine(keep_alive_s=0.01) as echo, aiohttp.ClientSession(echo.url) as session:
        echo.scheduler.is_paused = True
        async with session.post("/v1/completions", json=PROMPT | {"stream": True}) as answer:
            assert answer.status == 200
            assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            echo.scheduler.is_paused = False
            echo.scheduler.resume()
            assert (await events_of(answer))[-1] == "data: [DONE]"
        async with openai.AsyncOpenAI(base_url=f"{echo.url}/v1", api_key="any") as client:
            stream = await client.completions.create(model="echo", stream=True, **PROMPT)
            assert "".join([c.choices[0].text async for c in stream]) == "hello world"


async def test_a_bug_is_an_opaque_500_that_names_the_request(
    echo: EchoEngine, web: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("/secret/path.py")

    monkeypatch.setattr(echo.gateway, "open", broken)
    async with web.post("/v1/completions", json=PROMPT) as answer:
        error = await error_of(answer)
        assert (answer.status, answer.headers["X-Should-Retry"]) == (500, "false")
        assert "secret" not in error["message"]
        assert answer.headers["X-Request-Id"] in error["message"]


async def test_a_bug_in_the_middle_of_a_stream_ends_it_with_an_error_event(
    echo: EchoEngine, web: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("/secret/path.py")

    monkeypatch.setattr(CompletionDialect, "usage", broken)
    body = PROMPT | {"stream": True, "stream_options": {"include_usage": True}}
    async with web.post("/v1/completions", json=body) as answer:
        events = await events_of(answer)
    assert '"code":"bug"' in events[-2]
    assert "secret" not in events[-2]
    assert events[-1] == "data: [DONE]"


async def test_unsupported_headers_are_refused(web: aiohttp.ClientSession) -> None:
    async with web.post("/v1/completions", json=PROMPT, headers={"Expect": "wonders"}) as answer:
        assert answer.status == 417
        assert answer.headers["X-Request-Id"]


async def test_a_busy_port_is_a_clear_error(echo: EchoEngine) -> None:
    port = int(echo.url.rpartition(":")[2])
    second = EchoEngine(port=port)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: "):
        await second.server.start()


@pytest.mark.slow
async def test_two_hundred_concurrent_streams_leave_no_state(
    echo: EchoEngine, client: openai.AsyncOpenAI
) -> None:
    async def one(i: int) -> str:
        text = f"stream {i} 한국어 🚀"
        stream = await client.completions.create(
            model="echo", prompt=text, max_tokens=60, stream=True, stop=["never"]
        )
        parts = []
        async for chunk in stream:
            parts.append(chunk.choices[0].text)
            if i % 4 == 0 and len(parts) == 3:
                await stream.close()
                return text
        return text if "".join(parts) == text else "".join(parts)

    texts = await asyncio.gather(*(one(i) for i in range(200)))
    assert texts == [f"stream {i} 한국어 🚀" for i in range(200)]
    await echo.until(lambda: not (echo.scheduler.live or echo.detokenizer.num_requests))
    assert echo.gateway.num_open == 0


async def test_a_body_that_is_not_encoded_as_it_says_is_a_400(web: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with web.post("/v1/completions", data=b'{"prompt": "a"}', headers=headers) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (400, "bad_request")


async def test_a_stop_waits_neither_for_idle_connections_nor_for_slow_readers() -> None:
    async with EchoEngine() as echo, aiohttp.ClientSession(echo.url) as session:
        async with session.get("/health") as answer:
            assert answer.status == 200
        echo.scheduler.is_paused = True
        post = asyncio.create_task(session.post("/v1/completions", json=PROMPT | {"stream": True}))
        await echo.until(lambda: bool(echo.scheduler.live))
        echo.scheduler.step()
        stream = await post
        echo.gateway.end_all(ShuttingDown("closing").info())
        async with asyncio.timeout(3):
            await echo.server.stop()
        assert (await events_of(stream))[-1] == "data: [DONE]"
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get("/health")
