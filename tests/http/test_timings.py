"""A client that asks is told where the time of its request went, and the parts add up."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from aserve.messages.requests import SamplingParams
from aserve.observability.latency import STATES, Latency, Timeline
from tests.fakes.executor import SPEC, FakeExecutor
from tests.http.whole_server import WholeServer, whole_server

LONG = {"prompt": "a" * 50, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture
async def server() -> AsyncIterator[WholeServer]:
    async with whole_server(FakeExecutor(), access_log=True) as server:
        yield server


async def asked(
    server: WholeServer, path: str, body: dict[str, Any], headers: Mapping[str, str] = {}
) -> tuple[Any, dict[str, float]]:
    """Returns the answer, or the events of a stream, and the parts of its Server-Timing."""
    async with server.client.post(path, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        text = await answer.text()
        header = answer.headers.get("Server-Timing", "")
    parts = dict(each.split(";dur=") for each in header.split(", ")) if header else {}
    if body.get("stream"):
        events = [each.removeprefix("data: ") for each in text.split("\n\n") if "{" in each]
        return [json.loads(each) for each in events], {}
    return json.loads(text), {name: float(value) for name, value in parts.items()}


def check(timings: dict[str, Any]) -> None:
    """The parts add up to the whole, and there are no others."""
    states = timings["states"]
    assert set(states) <= set(STATES)
    assert min(states.values()) >= 0
    assert sum(states.values()) == pytest.approx(timings["total_ms"])
    assert timings["prompt_ms"] == pytest.approx(states["prefill"])
    assert timings["queue_ms"] + timings["predicted_ms"] <= timings["total_ms"]


async def test_the_parts_of_an_answer_add_up_to_the_whole(server: WholeServer) -> None:
    answer, parts = await asked(server, "/v1/completions", LONG | {"include_timings": True})
    timings = answer["usage"]["timings"]
    check(timings)
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total, abs=0.001 * len(parts))
    assert parts == pytest.approx(timings["states"], abs=0.001)
    assert {"receive", "tokenize", "prefill", "decode", "flush"} <= set(parts)
    assert timings["prefill_chunks"] == -(-50 // SPEC.max_batched_tokens)
    counts = [timings[name] for name in ("prompt_n", "cache_n", "predicted_n")]
    assert (counts, timings["num_retractions"]) == ([50, 0, 6], 0)


async def test_the_times_between_the_chunks_of_a_choice_are_told(server: WholeServer) -> None:
    answer, _ = await asked(server, "/v1/completions", LONG | {"include_timings": True, "n": 2})
    timings = answer["usage"]["timings"]
    middle, tail, longest = (timings[f"itl_{name}_ms"] for name in ("p50", "p99", "max"))
    assert 0 <= middle <= tail <= longest <= timings["total_ms"]
    one = LONG | {"include_timings": True, "max_tokens": 1}
    answer, _ = await asked(server, "/v1/completions", one)
    assert "itl_p50_ms" not in answer["usage"]["timings"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", LONG | {"n": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ],
)
async def test_the_last_event_of_a_stream_has_them(
    server: WholeServer, path: str, body: dict[str, Any]
) -> None:
    options = {"stream": True, "stream_options": {"include_timings": True}}
    *events, last = (await asked(server, path, body | options))[0]
    check(last["usage"]["timings"])
    assert last["choices"] == []
    assert not any("timings" in json.dumps(event) for event in events)


async def test_any_endpoint_tells_them_in_a_header_to_those_who_ask_for_it(
    server: WholeServer,
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    for path in ("/v1/messages", "/v1/chat/completions", "/v1/completions"):
        fields = LONG if path == "/v1/completions" else body
        assert (await asked(server, path, fields))[1] == {}
        assert "decode" in (await asked(server, path, fields, {"X-Include-Timings": "1"}))[1]
    answer, _ = await asked(server, "/v1/completions", LONG)
    assert "timings" not in answer["usage"]


async def test_the_access_log_has_them(
    server: WholeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await asked(server, "/v1/completions", LONG | {"include_timings": True})
    await asked(server, "/v1/completions", LONG)
    timed, plain = [each.getMessage() for each in caplog.records if "request id=" in each.msg]
    assert " times=receive;dur=" in timed
    assert ",decode;dur=" in timed
    assert plain.endswith(" times=-")


def test_a_timeline_never_goes_back_and_loses_nothing() -> None:
    """The engine's clock is the same, but a report of an earlier time may come late."""
    timeline = Timeline(10.0, SamplingParams(seed=1))
    for state, at_s in [
        ("tokenize", 11.0),
        ("queue_rows", 10.5),
        ("prefill", 13.0),
        ("retracted", 14.0),
        ("prefill", 15.0),
        ("decode", 15.5),
        ("", 20.0),
    ]:
        timeline.enter(state, at_s)
    assert timeline.num_retractions == 1
    assert timeline.times == {
        "receive": 1.0,
        "tokenize": 0.0,
        "queue_rows": 2.0,
        "prefill": 1.5,
        "retracted": 1.0,
        "decode": 4.5,
    }
    assert sum(timeline.times.values()) == 10.0


def test_what_is_not_asked_for_is_not_kept() -> None:
    latency = Latency()
    assert latency.server_timing("r-0") is None
