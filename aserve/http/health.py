"""GET /health and /metrics: what probes and monitors read, in constant time.

Must not know the engine: the phase is what the supervisor says, never guessed from tokens.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from aserve.http.state import ServerState


class HealthBody(msgspec.Struct, omit_defaults=True):
    status: str
    reason: str = ""


def health_response(state: ServerState) -> web.Response:
    is_ready = state.phase == "ready"
    body = HealthBody(state.phase, "" if is_ready else state.reason)
    return web.Response(
        body=msgspec.json.encode(body),
        status=200 if is_ready else 503,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def metrics_response(registry: CollectorRegistry) -> web.Response:
    return web.Response(
        body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )
