"""What a client says about its time, and what it is told when the server has too little of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from aserve.actors.wait_forecast import MIN_SAMPLES
from aserve.messages.step import ScheduleBatch
from tests.fakes.echo_engine import EchoEngine
from tests.fakes.executor import SPEC, FakeExecutor
from tests.http.asking import ask, bearer, opened_requests
from tests.http.whole_server import WholeServer, whole_server

MESSAGES = [{"role": "user", "content": "a"}]
LONG = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "a"},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 4}},
    "/completion": {"prompt": "a", "n_predict": 4},
}


Measured: TypeAlias = Callable[[WholeServer, FakeExecutor], Awaitable[None]]


async def until(server: WholeServer, name: str, least: int) -> None:
    for _ in range(2000):
        if server.metric(name) >= least:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"{name} is {server.metric(name)}, less than {least}")


@contextlib.asynccontextmanager
async def full_server(
    *, measured: Measured | None = None, **options: Any
) -> AsyncIterator[tuple[WholeServer, FakeExecutor]]:
    """All its rows run, and nothing moves unless the test runs a step. `measured` is called before
    that, so often that the server knows how long its steps take.
    """
    executor = FakeExecutor(is_manual=True)
    async with whole_server(executor, **options) as server:
        for _ in range(MIN_SAMPLES):
            if measured is not None:
                await measured(server, executor)
        headers = bearer("flood")
        flood = [
            asyncio.ensure_future(server.client.post("/v1/completions", json=LONG, headers=headers))
            for _ in range(SPEC.max_rows)
        ]
        if measured is not None:  # the first of them may have gone ahead alone
            await until(server, "aserve_requests_in_flight", SPEC.max_rows)
            executor.run_next()
        await until(server, "aserve_sequences_running", SPEC.max_rows)
        yield server, executor
        await dropped(flood)


async def dropped(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("is_header", [False, True])
async def test_a_wait_that_is_too_long_is_a_429_with_the_place_in_the_queue(
    is_header: bool,
) -> None:
    async with full_server() as (server, executor):
        for path, body in BODIES.items():
            limit = {"max_queue_ms": 30}
            headers = {"X-Max-Queue-Ms": "30"} if is_header else {}
            asked = body if is_header else body | limit
            async with server.client.post(path, json=asked, headers=headers) as answer:
                found = await answer.json()
            assert (answer.status, found["error"]["code"]) == (429, "queue_timeout"), path
            assert found["error"]["queue_position"] >= 1
            assert found["error"]["expected_wait_ms"] is None, "nothing was measured"
            assert (answer.headers["Retry-After"], answer.headers["Retry-After-Ms"]) == (
                "1",
                "1000",
            )
        assert all(len(batch.rows) == 4 * SPEC.max_rows for batch in batches(executor)[-1:])
        assert server.metric("aserve_requests_ended_total", outcome="refused") == len(BODIES)


STEP_S = 0.02


async def answered(server: WholeServer, executor: FakeExecutor) -> None:
    """Lets a request run alone, with steps of at least STEP_S each."""
    body = {"prompt": "abc", "max_tokens": 2, "ignore_eos": True}
    asked = asyncio.ensure_future(server.client.post("/v1/completions", json=body))
    while not asked.done() or executor.num_queued:
        await asyncio.sleep(STEP_S)
        if executor.num_queued:
            executor.run_next()
    assert asked.result().status == 200


async def test_a_deadline_that_cannot_be_kept_is_refused_before_any_other_step() -> None:
    """The flood's answers take 40 steps more, and nothing moves while the server refuses."""
    async with full_server(measured=answered) as (server, executor):
        num_before = len(executor.commands)
        asked = {"prompt": "a", "deadline_ms": 10 * STEP_S * 1000}
        async with server.client.post("/v1/completions", json=asked) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (429, "deadline_unreachable")
        assert (error["queue_position"], error["param"]) == (1, "deadline_ms")
        assert error["expected_wait_ms"] > asked["deadline_ms"]
        assert int(answer.headers["Retry-After-Ms"]) >= error["expected_wait_ms"]
        assert len(executor.commands) == num_before
        patient = server.client.post("/v1/completions", json=asked | {"deadline_ms": 3_600_000})
        waiting = asyncio.ensure_future(patient)
        await until(server, "aserve_sequences_waiting", 1)
        await dropped([waiting])


async def test_a_queue_that_was_made_shorter_refuses_with_the_place_in_it() -> None:
    async with full_server(admin_api_key="root") as (server, _):
        change = server.client.patch("/settings", json={"max_queue": 1}, headers=bearer("root"))
        async with change as answer:
            assert answer.status == 200
        waiting = asyncio.ensure_future(server.client.post("/v1/completions", json=LONG))
        await until(server, "aserve_sequences_waiting", 1)
        async with server.client.post("/v1/completions", json=LONG) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["queue_position"]) == (429, "queue_full", 2)
        assert "1 of at most 1" in error["message"]
        await dropped([waiting])


def batches(executor: FakeExecutor) -> list[ScheduleBatch]:
    return [command for command in executor.commands if isinstance(command, ScheduleBatch)]


@pytest.mark.parametrize(
    ("limits", "headers", "timeout_s", "strict_s", "max_queue_s"),
    [
        ({}, {}, None, None, None),
        ({"timeout": 2}, {}, 2.0, None, None),
        ({"deadline_ms": 2500, "max_queue_ms": 40}, {}, 2.5, 2.5, 0.04),
        ({"deadline_ms": 2500, "timeout": 2}, {}, 2.0, 2.5, None),
        ({"deadline_ms": 2500}, {"X-Deadline-Ms": "700.5"}, 0.7005, 0.7005, None),
        ({}, {"X-Deadline-Ms": "700.5", "X-Max-Queue-Ms": "9"}, 0.7005, 0.7005, 0.009),
        ({"timeout": 1}, {"x-deadline-ms": "3000", "x-max-queue-ms": "9"}, 1.0, 3.0, 0.009),
        ({"max_queue_ms": 5}, {"x-max-queue-ms": "9"}, None, None, 0.005),
    ],
)
async def test_the_shortest_of_all_times_counts(
    echo: EchoEngine,
    limits: dict[str, float],
    headers: dict[str, str],
    timeout_s: float | None,
    strict_s: float | None,
    max_queue_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = opened_requests(echo, monkeypatch)
    await ask(echo, "/v1/completions", {"prompt": "a"} | limits, headers=headers)
    found = (opened[0].timeout_s, opened[0].strict_timeout_s, opened[0].max_queue_s)
    assert found == (timeout_s, strict_s, max_queue_s)


@pytest.mark.parametrize("value", ["soon", "nan", "0", "-5", "1e300", ""])
async def test_a_header_that_is_no_time_is_a_400(echo: EchoEngine, value: str) -> None:
    for name in ("X-Deadline-Ms", "X-Max-Queue-Ms"):
        answer = await ask(echo, "/v1/completions", {"prompt": "a"}, headers={name: value})
        assert (answer.status, answer.error["param"]) == (400, name)


async def test_a_flood_of_one_key_delays_the_first_token_of_another_by_its_steps_in_flight() -> (
    None
):
    """The flood holds every row, and more of it waits. The light client's prompt is in the next
    step that is launched, and the flood's waiting requests stay behind it.
    """
    async with full_server(api_key="flood,light") as (server, executor):
        flood = [
            asyncio.ensure_future(
                server.client.post("/v1/completions", json=LONG, headers=bearer("flood"))
            )
            for _ in range(8)
        ]
        await until(server, "aserve_sequences_waiting", len(flood))
        light = asyncio.ensure_future(
            server.client.post(
                "/v1/completions", json=LONG | {"stream": True}, headers=bearer("light")
            )
        )
        await until(server, "aserve_sequences_waiting", len(flood) + 1)
        num_steps = 0
        while not light.done() and num_steps < 20:
            executor.run_next()
            num_steps += 1
            await asyncio.sleep(0.02)
        assert num_steps <= SPEC.depth + 1
        assert light.result().status == 200
        assert server.metric("aserve_sequences_waiting") >= len(flood)
        light.result().close()
        await dropped(flood)
