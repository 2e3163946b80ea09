"""Tells routers how busy the server is, in vLLM's and SGLang's forms.

There are GET /load, GET /v1/loads, and a header in the form of ORCA (Open Request Cost
Aggregation).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from aserve.http.body import parse_query
from aserve.http.control.info import version
from aserve.http.delivery import json_response
from aserve.http.route import get
from aserve.http.state import HttpContext
from aserve.messages.executor import EngineSpec

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineLoad(msgspec.Struct):
    """The load of the one engine. Tokens are those of the KV pages in use, whose last ones may be
    partly free."""

    num_running_reqs: int  # sequences
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float  # of 1
    max_running_requests: int
    dp_rank: int = 0


class Loads(msgspec.Struct):
    timestamp: float  # seconds since 1970
    version: str
    loads: list[EngineLoad]
    dp_rank_count: int = 1


class LoadsQuery(msgspec.Struct, kw_only=True):
    """SGLang's parameters. The one engine has one section, `core`."""

    format: Literal["json", "prometheus"] = "json"
    include: str | None = None
    dp_rank: int | None = None


async def read_load(_: web.Request, context: HttpContext) -> web.Response:
    """Answers as vLLM does: the number of open requests."""
    return json_response({"server_load": context.gateway.num_open})


async def read_loads(request: web.Request, context: HttpContext) -> web.Response:
    query = parse_query(request, LoadsQuery)
    load = engine_load(context.registry, context.state.spec)
    if query.format == "prometheus":
        return web.Response(text=_gauges(load), headers={"Content-Type": TEXT_TYPE})
    return json_response(Loads(time.time(), version(), [load]))


def _gauges(load: EngineLoad) -> str:
    """Returns the load as gauges with SGLang's names."""
    fields = msgspec.structs.asdict(load)
    rank = fields.pop("dp_rank")
    return "".join(
        f'# TYPE sglang_{name} gauge\nsglang_{name}{{dp_rank="{rank}"}} {value}\n'
        for name, value in fields.items()
    )


def engine_load(registry: CollectorRegistry, spec: EngineSpec | None) -> EngineLoad:
    """Returns the load from the server's own metrics."""

    def gauge(name: str) -> int:
        return int(registry.get_sample_value(name) or 0)

    page_size = 0 if spec is None else spec.page_size
    running, waiting = gauge("aserve_sequences_running"), gauge("aserve_sequences_waiting")
    used = gauge("aserve_kv_pages_used")
    total = 0 if spec is None else spec.total_pages
    return EngineLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=used * page_size,
        max_total_num_tokens=total * page_size,
        token_usage=used / total if total else 0.0,
        max_running_requests=0 if spec is None else spec.max_rows,
    )


def load_reporter(
    context: HttpContext,
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Returns the function that adds the header to the answers of requests that ask for it."""

    async def add_header(request: web.Request, response: web.StreamResponse) -> None:
        kind = request.headers.get("Endpoint-Load-Metrics-Format", "").upper()
        if kind not in ("TEXT", "JSON"):
            return
        load = engine_load(context.registry, context.state.spec)
        named = {
            "kv_cache_usage_perc": load.token_usage,
            "num_requests_waiting": load.num_waiting_reqs,
        }
        report = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        if kind == "JSON":
            report = msgspec.json.encode({"named_metrics": named}).decode()
        response.headers["Endpoint-Load-Metrics"] = f"{kind} {report}"

    return add_header


ROUTES = (
    get("/load", read_load),
    get("/v1/loads", read_loads),
)
