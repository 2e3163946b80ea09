"""/v1/requests: the state of a running request and changes to it, each client its own requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import Answer, ask, bearer

PROMPT = "one two stop three four"


@pytest.fixture
async def paused() -> AsyncIterator[EchoEngine]:
    keys: dict[str, Any] = {"api_key": "ann,ben", "admin_api_key": "root"}
    async with EchoEngine(**keys, enable_priority_scheduling=True) as echo:
        echo.scheduler.is_paused = True
        yield echo


async def started(echo: EchoEngine, **fields: Any) -> tuple[str, asyncio.Task[Answer]]:
    """The id of a completion that has not begun, and its answer."""
    body = {"prompt": PROMPT, "max_tokens": 100, **fields}
    task = asyncio.ensure_future(ask(echo, "/v1/completions", body, headers=bearer("ann")))
    await echo.until(lambda: bool(echo.scheduler.live))
    return next(iter(echo.scheduler.live))[0].rpartition("-")[0], task


async def change(
    echo: EchoEngine, request_id: str, body: dict[str, Any] | None, *, key: str = "ann"
) -> Answer:
    return await ask(echo, f"/v1/requests/{request_id}", body, headers=bearer(key))


async def finish(echo: EchoEngine, task: asyncio.Task[Answer]) -> dict[str, Any]:
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    answer: dict[str, Any] = (await task).json
    return answer


async def test_the_state_is_told_by_every_id_of_the_request_to_its_client_and_the_administrator(
    paused: EchoEngine,
) -> None:
    request_id, task = await started(paused, n=2)
    for _ in range(3):
        paused.scheduler.step()
    for given, key in ((request_id, "ann"), (f"cmpl-{request_id}", "ann"), (request_id, "root")):
        answer = (await change(paused, given, None, key=key)).json
        assert answer["id"] == given
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        choice = answer["choices"][0]
        assert (choice["completion_tokens"], choice["max_tokens"]) == (3, 100)
    assert (await ask(paused, "/v1/requests", headers=bearer("ann"))).json["data"] == [request_id]
    assert (await ask(paused, "/v1/requests", headers=bearer("ben"))).json["data"] == []
    for given, key in ((request_id, "ben"), (request_id[:-1], "ann"), ("msg_", "ann")):
        answer = await change(paused, given, {"max_tokens": 1}, key=key)
        assert (answer.status, answer.error["code"]) == (404, "request_not_found")
    await finish(paused, task)
    assert (await change(paused, request_id, None)).status == 404


async def test_stop_strings_and_max_tokens_count_from_where_they_are_set(
    paused: EchoEngine,
) -> None:
    request_id, task = await started(paused, stop="never", logprobs=0)
    for _ in range(6):
        paused.scheduler.step()
    for stop in (["one"], "stop"):  # the first one has passed
        answer = await change(paused, request_id, {"stop": stop})
        assert answer.status == 200, answer.text
    assert paused.gateway.requests[f"{request_id}-0"].sampling.stop == ("never", "one", "stop")
    answer = await change(paused, request_id, {"max_tokens": 90, "priority": 3})
    [state] = answer.json["choices"]
    assert (state["max_tokens"], state["priority"]) == (90, 3)
    [choice] = (await finish(paused, task))["choices"]
    assert choice["text"] == "one two "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "stop")
    assert len(choice["logprobs"]["tokens"]) == len("one two ")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, None),
        ({"end_thinking": False}, 400, None),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 2001}, 400, "max_tokens"),
        ({"end_thinking": True}, 400, "max_tokens"),
        ({"priority": 2**31}, 400, "priority"),
        ({"stop": ["a", "b", "c", "d"]}, 400, "stop"),
        ({"stop": ""}, 400, "stop"),
        ({"stop": 5}, 400, "stop"),
    ],
)
async def test_a_change_that_is_refused_changes_nothing(
    paused: EchoEngine, body: dict[str, Any], status: int, param: str | None
) -> None:
    request_id, task = await started(paused, stop=["x"], max_tokens=9)
    before = paused.gateway.requests
    answer = await change(paused, request_id, body)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert paused.gateway.requests == before
    [choice] = (await finish(paused, task))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert choice["text"] == "one two stop "


async def test_only_who_may_set_a_priority_may_change_it() -> None:
    async with EchoEngine(admin_api_key="root", api_key="ann") as echo:
        echo.scheduler.is_paused = True
        request_id, task = await started(echo)
        assert (await change(echo, request_id, {"priority": 1})).status == 400
        assert (await change(echo, request_id, {"priority": 1}, key="root")).status == 200
        await finish(echo, task)


async def forked(echo: EchoEngine, request_id: str, **body: Any) -> Answer:
    return await ask(echo, f"/v1/requests/{request_id}/fork", body, headers=bearer("ann"))


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
async def test_a_fork_begins_with_the_tokens_that_it_keeps(paused: EchoEngine, path: str) -> None:
    """The echo says its prompt from the place behind the tokens that are known."""
    text = {"prompt": PROMPT, "input": PROMPT, "messages": [{"role": "user", "content": PROMPT}]}
    name = {"completions": "prompt", "responses": "input"}.get(path, "messages")
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    body = {name: text[name], limit: 30, "temperature": 0.5, "stream": True, "resumable": True}
    if "completions" in path:
        body["stream_options"] = {"include_usage": True}
    task = asyncio.ensure_future(ask(paused, f"/v1/{path}", body, headers=bearer("ann")))
    await paused.until(lambda: bool(paused.scheduler.live))
    request_id = next(iter(paused.scheduler.live))[0].rpartition("-")[0]
    for _ in range(9):
        paused.scheduler.step()
    await paused.until(lambda: len(paused.gateway.outputs_of(f"{request_id}-0", 0)) == 36)
    sent = paused.gateway.outputs_of(f"{request_id}-0", 0)
    new = {"temperature": 0.25, "max_tokens": 20, "stream": False}
    fork = asyncio.ensure_future(forked(paused, request_id, token=4, token_id=65, **new))
    await paused.until(lambda: len(paused.scheduler.live) == 2)
    asked = paused.scheduler.admitted[-1]
    assert asked.outputs == (sent[:16] + (65).to_bytes(4, "little"),)
    first = paused.scheduler.admitted[0].sampling
    assert (asked.sampling.temperature, asked.sampling.max_tokens) == (0.25, 20)
    assert asked.sampling.seed == first.seed
    paused.scheduler.is_paused = False
    paused.scheduler.resume()
    answer = await fork
    assert answer.status == 200, answer.text
    assert request_id not in answer.text, "the fork has the id of another answer"
    assert paused.tokenizer.decode([65]) in answer.text
    assert (await task).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token": 7}, "token"),
        ({"token": -1}, "token"),
        ({"token": 1, "index": 1}, "index"),
        ({"token": 6, "max_tokens": 5}, "max_tokens"),
        ({"token": 1, "token_id": 10**6}, "token_id"),
        ({"token": 1, "temperature": 9}, "temperature"),
    ],
)
async def test_a_fork_that_cannot_be_is_refused(
    paused: EchoEngine, fields: dict[str, Any], param: str
) -> None:
    request_id, task = await started(paused)
    for _ in range(6):
        paused.scheduler.step()
    await paused.until(lambda: len(paused.gateway.outputs_of(f"{request_id}-0", 0)) == 24)
    answer = await forked(paused, request_id, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert len(paused.scheduler.admitted) == 1
    await finish(paused, task)


async def test_a_fork_is_forked_and_its_text_is_whole(paused: EchoEngine) -> None:
    request_id, task = await started(paused, max_tokens=40, stop=["zz"])
    for _ in range(3):
        paused.scheduler.step()
    await paused.until(lambda: len(paused.gateway.outputs_of(f"{request_id}-0", 0)) == 12)
    forks = [asyncio.ensure_future(forked(paused, request_id, token=3))]
    await paused.until(lambda: len(paused.scheduler.live) == 2)
    paused.scheduler.step()
    second = list(paused.scheduler.live)[1][0]
    await paused.until(lambda: len(paused.gateway.outputs_of(second, 0)) == 16)
    forks.append(asyncio.ensure_future(forked(paused, second.rpartition("-")[0], token=4)))
    await paused.until(lambda: len(paused.scheduler.live) == 3)
    expected = (await finish(paused, task))["choices"][0]["text"]
    for fork in forks:
        choice = (await fork).json["choices"][0]
        assert choice["text"].startswith(expected[:3]), (await fork).text
