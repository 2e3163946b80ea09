"""The handlers of /health and /metrics, and of the start page."""

from __future__ import annotations

from pathlib import Path

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from aserve.http.state import HttpContext, ServerState

STUCK_S = 10.0  # a running engine sends a message every second
START_PAGE = (Path(__file__).parent / "static" / "index.html").read_bytes()


async def health(_: web.Request, context: HttpContext) -> web.Response:
    return health_response(context.state)


class HealthBody(msgspec.Struct, omit_defaults=True):
    status: str
    reason: str = ""


def health_response(state: ServerState) -> web.Response:
    body = health_of(state)
    return web.Response(
        body=msgspec.json.encode(body),
        status=200 if body.status == "ready" else 503,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def health_of(state: ServerState) -> HealthBody:
    """Reports an engine that sends nothing as stuck. Its requests wait, because it may go on."""
    if state.phase != "ready":
        return HealthBody(state.phase, state.reason)
    age_s = state.engine_age_s()
    if age_s > STUCK_S:
        return HealthBody("stuck", f"the engine has sent nothing for {age_s:.0f} seconds")
    return HealthBody("ready")


async def metrics(_: web.Request, context: HttpContext) -> web.Response:
    return metrics_response(context.registry)


def metrics_response(registry: CollectorRegistry) -> web.Response:
    return web.Response(
        body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )


async def index(_: web.Request, __: HttpContext) -> web.Response:
    return web.Response(body=START_PAGE, content_type="text/html", charset="utf-8")
