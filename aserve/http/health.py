"""GET /health and /metrics: what probes and monitors read, in constant time.

Must not know the engine: the phase is what the supervisor says, never guessed from tokens.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from aserve.http.state import ServerState

LATE_S = 10.0  # an engine says something every second, unless its loop is stuck


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
    """A stuck engine may go on, so its requests still wait."""
    if state.phase != "ready":
        return HealthBody(state.phase, state.reason)
    age_s = state.engine_age_s()
    if age_s > LATE_S:
        return HealthBody("stuck", f"the engine has said nothing for {age_s:.0f} seconds")
    return HealthBody("ready")


def metrics_response(registry: CollectorRegistry) -> web.Response:
    return web.Response(
        body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )
