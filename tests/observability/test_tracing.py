"""Spans are made of timelines. What the SDK makes of them is shown by tests/clients/otel_sdk.py."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from aserve import server
from aserve.config import Facts, Raw, resolve
from aserve.errors import ConfigError
from aserve.frontend import Frontend
from aserve.messages.output import OutputChunk
from aserve.observability.latency import Timeline
from aserve.observability.tracing import Tracing, open_tracing
from aserve.server import connect_tracing
from tests.fakes.executor import FakeExecutor
from tests.http.asking import bearer
from tests.http.whole_server import WholeServer, whole_server

ROOT = bearer("root")
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PROMPT = {"prompt": "a" * 50, "max_tokens": 4, "ignore_eos": True}


def test_without_the_package_the_start_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    given = {"otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces"}
    with pytest.raises(ConfigError, match=r"pip install 'aserve\[otel\]'"):
        connect_tracing(Frontend(resolve(Raw(command_line=given), Facts(default_model="none"))))
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        open_tracing("anything", model_name="m")


async def test_a_collector_that_hangs_holds_the_end_of_the_server_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was held for up to 50 seconds: an export has no limit but its own."""
    monkeypatch.setattr(server, "LAST_SPANS_S", 0.05)
    ended, is_asked = threading.Event(), threading.Event()

    class Hanging:
        def get_tracer(self, _: str) -> None:
            pass

        def shutdown(self) -> None:
            is_asked.set()
            ended.wait()

    async with asyncio.timeout(5):
        await server.end_tracing(Tracing(Hanging(), model_name="m"))
        await server.end_tracing(None)
    assert is_asked.is_set()
    ended.set()


async def trace_at(server: WholeServer, level: int) -> None:
    """Changes the level, and asks something."""
    async with server.client.get(f"/set_trace_level?level={level}", headers=ROOT) as answer:
        assert answer.status == 200
    async with server.client.post("/v1/completions", json=PROMPT) as answer:
        assert answer.status == 200


async def test_the_level_of_traces_is_refused_where_none_are_exported() -> None:
    async with whole_server(FakeExecutor(), admin_api_key="root") as server:
        for level, words in (("2", "--otlp-traces-endpoint"), ("4", "level"), ("", "level")):
            query = {"level": level} if level else {}
            asked = server.client.post("/set_trace_level", params=query, headers=ROOT)
            async with asked as answer:
                assert answer.status == 400
                assert words in (await answer.json())["error"]["message"]


async def test_with_tracing_the_timeline_of_every_request_is_passed_on_when_it_ends() -> None:
    ended: list[tuple[Timeline, OutputChunk]] = []
    async with whole_server(FakeExecutor(), admin_api_key="root") as server:
        server.latency.on_end = lambda timeline, chunk: ended.append((timeline, chunk))
        for headers in ({"traceparent": TRACEPARENT}, {"traceparent": "x" * 1000}, {}):
            async with server.client.post(
                "/v1/completions", json=PROMPT, headers=headers
            ) as answer:
                assert answer.status == 200
                await answer.read()
        await trace_at(server, 1)
        assert ended.pop()[0].phases == [], "level 1 has no spans of phases"
        await trace_at(server, 0)
    assert [timeline.traceparent for timeline, _ in ended] == [TRACEPARENT, "x" * 55, ""]
    for timeline, chunk in ended:
        assert chunk.is_last
        assert (timeline.operation, timeline.num_tokens) == ("text_completion", 4)
        names = [phase.name for phase in timeline.phases]
        assert names[:2] == ["receive", "tokenize"]
        assert {"prefill", "decode"} < set(names)
        starts = [phase.start_s for phase in timeline.phases]
        ends = [phase.end_s for phase in timeline.phases]
        assert starts == [timeline.started_s, *ends[:-1]]
        assert ends[-1] == timeline.since_s
