"""How busy a server says that it is."""

from __future__ import annotations

import asyncio
import json

from aserve.http.control.loads import EngineLoad, engine_load
from aserve.observability.metrics import Metrics
from aserve.observability.reports import TickReport
from tests.fakes.echo_engine import EchoEngine
from tests.fakes.executor import SPEC
from tests.http.asking import ask


async def test_open_requests_are_counted(echo: EchoEngine) -> None:
    echo.scheduler.is_paused = True
    prompt = {"prompt": ["a", "b"], "max_tokens": 3}
    asked = asyncio.ensure_future(ask(echo, "/v1/completions", prompt))
    await echo.until(lambda: len(echo.scheduler.live) == 2)
    assert (await ask(echo, "/load")).json == {"server_load": 2}
    asked.cancel()
    assert (await ask(echo, "/v1/loads")).json["loads"][0]["num_total_reqs"] == 0
    gauges = await ask(echo, "/v1/loads?format=prometheus")
    assert (
        '# TYPE sglang_num_total_reqs gauge\nsglang_num_total_reqs{dp_rank="0"} 0\n' in gauges.text
    )
    assert (await ask(echo, "/v1/loads?format=xml")).status == 400


async def test_an_answer_reports_the_load_to_a_router_that_asks(echo: EchoEngine) -> None:
    async def header(kind: str) -> str | None:
        answer = await ask(echo, "/version", headers={"endpoint-load-metrics-format": kind})
        return answer.headers.get("endpoint-load-metrics")

    report = "named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0"
    assert await header("TEXT") == f"TEXT {report}"
    named = {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0}
    text = await header("json")
    assert text is not None
    assert json.loads(text.removeprefix("JSON ")) == {"named_metrics": named}
    assert await header("BIN") is None


def test_the_load_is_that_of_the_metrics() -> None:
    metrics = Metrics()
    metrics.on_report(TickReport(num_running=2, num_waiting=4, used_pages=3))
    page_size, num_pages = SPEC.page_size, SPEC.groups[0].num_pages - 1
    load = engine_load(metrics.registry, SPEC)
    expected = (2, 4, 6, 3 * page_size, num_pages * page_size, 3 / num_pages, SPEC.max_rows)
    assert load == EngineLoad(*expected)
