"""The administrator changes a running server: all of a change or nothing, and in known versions."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aserve.actors.replay import replay
from aserve.http.live_settings import LiveSettings
from aserve.messages.changes import ChangeSettings
from aserve.messages.step import ScheduleBatch
from aserve.observability.request_log import RequestLog
from aserve.request_stream import Capacity, Gateway
from tests.fakes.executor import SPEC, FakeExecutor
from tests.http.asking import bearer
from tests.http.whole_server import WholeServer, whole_server

ROOT = bearer("root")
START = {
    "version": 1,
    "max_queue": SPEC.max_waiting,
    "max_num_batched_tokens": SPEC.max_batched_tokens,
    "max_mixed_prefill_tokens": None,
    "log_level": "warning",
    "log_requests": False,
    "log_requests_level": 1,
}
PROMPT = {"prompt": "a" * 40, "max_tokens": 2}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[WholeServer]:
    record = str(tmp_path / "r")
    async with whole_server(FakeExecutor(), admin_api_key="root", record=record) as server:
        yield server


async def settings(
    server: WholeServer, body: dict[str, Any] | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    method = "GET" if body is None else "PATCH"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with server.client.request(
        method, "/settings", json=body, headers=ROOT | named
    ) as answer:
        found: dict[str, Any] = await answer.json()
        if answer.status == 200:
            assert answer.headers["ETag"] == f'"{found["version"]}"'
    return answer.status, found


async def test_a_change_makes_the_next_version_and_the_scheduler_follows_it(
    tmp_path: Path,
) -> None:
    executor, path = FakeExecutor(), tmp_path / "r"
    async with whole_server(executor, admin_api_key="root", record=str(path)) as server:
        assert await settings(server) == (200, START)
        async with server.client.post("/v1/completions", json=PROMPT) as answer:
            assert answer.status == 200
        num_before = len(executor.commands)
        change = {"max_num_batched_tokens": 8, "max_queue": 7, "log_level": "error"}
        changed = START | change | {"version": 2}
        assert await settings(server, change) == (200, changed)
        assert await settings(server) == (200, changed)
        async with server.client.get("/server_info") as answer:
            info = await answer.json()
        found = (info["settings"], info["max_queued_requests"], info["dp_size"])
        assert found == (changed, 7, 1)
        assert logging.getLogger().level == logging.ERROR
        other = PROMPT | {"prompt": "b" * 40}  # of which nothing is cached
        async with server.client.post("/v1/completions", json=other) as answer:
            assert answer.status == 200
        after = executor.commands[num_before:]
    sizes = [
        [batch.stats.num_prefill_tokens for batch in each if isinstance(batch, ScheduleBatch)]
        for each in (executor.commands[:num_before], after)
    ]
    assert max(sizes[0]) == SPEC.max_batched_tokens
    assert max(sizes[1]) == 8
    assert sum(sizes[1]) == 40
    assert any("replayed" in line for line in replay(path))


@pytest.mark.parametrize(
    ("body", "headers", "status", "param"),
    [
        ({"max_queue": 0}, {}, 400, "max_queue"),
        (
            {"max_num_batched_tokens": SPEC.max_batched_tokens + 1},
            {},
            400,
            "max_num_batched_tokens",
        ),
        ({"max_queue": 9, "max_mixed_prefill_tokens": 0}, {}, 400, "max_mixed_prefill_tokens"),
        ({"max_queue": "many"}, {}, 400, "max_queue"),
        ({"max_queue": None}, {}, 400, "max_queue"),
        ({"log_level": "loud"}, {}, 400, "log_level"),
        ({"max_queue": 9, "page_size": 8}, {}, 400, None),
        ({"max_queue": 9, "version": 2}, {}, 409, None),
        ({"max_queue": 9}, {"If_Match": '"7"'}, 409, None),
        ({"max_queue": 9}, {"If_Match": "seven"}, 400, "If-Match"),
        ({"max_queue": 9, "version": 1}, {"If_Match": '"2"'}, 400, "version"),
    ],
)
async def test_a_change_that_is_refused_changes_nothing_and_says_why(
    server: WholeServer,
    body: dict[str, Any],
    headers: dict[str, str],
    status: int,
    param: str | None,
) -> None:
    found, error = await settings(server, body, **headers)
    assert (found, error["error"]["param"]) == (status, param), error
    if status == 400 and param in set(START) - {"version"} and isinstance(body[param], int):
        bound = 1 if body[param] < 1 else SPEC.max_batched_tokens
        assert f" {bound}" in error["error"]["message"]
    assert await settings(server) == (200, START)


async def test_of_two_changes_of_one_version_the_second_is_a_conflict(server: WholeServer) -> None:
    assert (await settings(server, {"max_queue": 9, "version": 1}))[0] == 200
    status, error = await settings(server, {"max_queue": 10, "version": 1})
    assert (status, error["error"]["code"]) == (409, "version_conflict")
    status, found = await settings(server, {"max_mixed_prefill_tokens": 6}, If_Match='"2"')
    assert (status, found["version"], found["max_queue"]) == (200, 3, 9)
    status, found = await settings(server, {"max_mixed_prefill_tokens": None}, If_Match="*")
    assert (found["version"], found["max_mixed_prefill_tokens"]) == (4, None)


async def test_only_the_administrator_has_settings(server: WholeServer) -> None:
    for method in ("GET", "PATCH"):
        async with server.client.request(method, "/settings", json={}) as answer:
            assert answer.status == 401
    async with (
        whole_server(FakeExecutor()) as plain,
        plain.client.get("/settings", headers=ROOT) as answer,
    ):
        assert answer.status == 404


async def test_the_log_of_requests_changes_while_requests_run(
    server: WholeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """By SGLang's route: what it does not name stays as it is. A line that begins has an end."""

    async def changed(**change: object) -> dict[str, Any]:
        path = "/configure_logging"
        async with server.client.post(path, json=change, headers=ROOT) as answer:
            found: dict[str, Any] = await answer.json()
        assert (answer.status, found) == (200, (await settings(server))[1])
        return {name: found[name] for name in START if found[name] != START[name]}

    async def lines(*, between: dict[str, object] | None = None) -> list[str]:
        caplog.clear()
        async with server.client.post("/v1/completions", json=PROMPT | {"stream": True}) as answer:
            if between is not None:
                await changed(**between)
            await answer.read()
        await server.until_idle()
        found = (each for each in caplog.records if each.name.endswith("request_log"))
        return [each.getMessage() for each in found]

    assert await changed(log_level="info") == {"version": 2, "log_level": "info"}
    assert await lines(between={"log_requests": True}) == []
    received, ended = await lines(between={"log_requests": False, "dump_requests_folder": ""})
    assert ("a" * 40 not in received, "outcome=length" in ended) == (True, True)
    assert await lines() == []
    await changed(log_requests=True, log_requests_level=2)
    received, _ = await lines()
    assert "a" * 40 in received
    before = await settings(server)
    for wrong in ({"log_requests_level": 4}, {"crash_dump_folder": "/tmp"}, {"log_level": "loud"}):
        async with server.client.post("/configure_logging", json=wrong, headers=ROOT) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, *wrong)
    assert await settings(server) == before


async def test_sglangs_name_changes_all_of_the_settings_or_none(server: WholeServer) -> None:
    async def changed(**change: object) -> tuple[int, dict[str, Any]]:
        body = {"server_args": change}
        async with server.client.post("/set_internal_state", json=body, headers=ROOT) as answer:
            return answer.status, await answer.json()

    change = {"chunked_prefill_size": 8, "max_queued_requests": 7, "log_level": "error"}
    ours = {"max_num_batched_tokens": 8, "max_queue": 7, "log_level": "error", "version": 2}
    assert await changed(**change) == (200, {"updated": True, "server_args": START | ours})
    assert await settings(server) == (200, START | ours)
    for wrong in ({"pp_max_micro_batch_size": 8}, {"max_queued_requests": 0}, {"version": 1}):
        status, error = await changed(**{"chunked_prefill_size": 4} | wrong)
        assert status in (400, 409), error
    assert await settings(server) == (200, START | ours)


def test_a_frontend_follows_the_change_of_another_one() -> None:
    gateway = Gateway(submit=lambda _: None, cancel=lambda _: None)
    settings, log = LiveSettings(), RequestLog(is_on=False)
    settings.open(SPEC, lambda _: None, gateway, log)
    settings.follow(ChangeSettings(SPEC.max_waiting + 5, 8, None, "error", log_requests=True))
    assert (log.is_on, log.level) == (True, 1)
    assert gateway.capacity == Capacity(SPEC.max_rows, SPEC.max_waiting + 5)
    assert logging.getLogger().level == logging.ERROR
