"""The handlers of the health probes and /metrics.

A probe reads what the server knows already and asks the engine nothing, so it takes the same short
time under any load. It waits for the event loop, so its answer shows that the loop turns.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from aserve.http.route import METRICS, get
from aserve.http.state import HttpContext, ServerState
from aserve.observability.engine_watch import percent_of

GOOD = frozenset({"ready", "alive", "started"})
STUCK_S = 10.0  # a running engine sends a message every second


async def health(_: web.Request, context: HttpContext) -> web.Response:
    """Answers 200 if the server accepts requests and the engine works on them."""
    return health_response(context.state, context.options.watchdog_timeout)


async def livez(_: web.Request, context: HttpContext) -> web.Response:
    """Answers 200 unless only a restart would help: the engine is dead or stuck."""
    return probe_response(liveness_of(context.state, context.options.watchdog_timeout))


async def startupz(_: web.Request, context: HttpContext) -> web.Response:
    """Answers 503 with the stage and its progress until the server has started."""
    return probe_response(startup_of(context.state))


class HealthBody(msgspec.Struct, omit_defaults=True):
    """The answer of a probe. `is_good` decides the status code and is not sent."""

    status: str
    reason: str = ""

    @property
    def is_good(self) -> bool:
        return self.status in GOOD


class StartupBody(HealthBody):
    """`done` of `total` are bytes of weights or numbers of graphs; percent is that of the stage."""

    stage: str = ""
    percent: int | None = None
    done: int | None = None
    total: int | None = None
    elapsed_s: float = 0.0


def probe_response(body: HealthBody) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=200 if body.is_good else 503,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def health_response(state: ServerState, watchdog_s: float) -> web.Response:
    return probe_response(health_of(state, watchdog_s))


def health_of(state: ServerState, watchdog_s: float) -> HealthBody:
    if state.phase != "ready":
        return HealthBody(state.phase, state.reason)
    if state.is_asleep:
        return HealthBody("sleeping", "the administrator has put the engine to sleep")
    if state.watch.is_asleep:
        return HealthBody("ready", "the engine sleeps, and a request wakes it")
    if state.watch.waits_for_grammars:
        return HealthBody("starting", "the first structured request would wait for its worker")
    if state.watch.down_reason:
        return HealthBody("restarting", f"the engine is restarting: {state.watch.down_reason}")
    return stuck_of(state, watchdog_s) or HealthBody("ready")


def liveness_of(state: ServerState, watchdog_s: float) -> HealthBody:
    if state.phase == "dead":
        return HealthBody("dead", state.reason)
    return stuck_of(state, watchdog_s) or HealthBody("alive")


def stuck_of(state: ServerState, watchdog_s: float) -> HealthBody | None:
    """Reports an engine that sends nothing, or whose step does not come back, as stuck. Its
    requests wait, because it may go on. A long prefill is not stuck: its chunks come back.
    """
    silent_s = state.engine_age_s()
    if silent_s > STUCK_S:
        return HealthBody("stuck", f"the engine has sent nothing for {silent_s:.0f} seconds")
    step_s = state.watch.step_age_s()
    if step_s > watchdog_s:
        return HealthBody("stuck", f"no step of the engine has ended for {step_s:.0f} seconds")
    return None


def startup_of(state: ServerState) -> HealthBody:
    if state.phase != "starting" and not state.watch.waits_for_grammars:
        return HealthBody("started")
    stage = state.watch.stage
    body = StartupBody("starting", stage=stage.stage)
    if stage.total:
        body.percent = percent_of(stage.done, stage.total)
        body.done, body.total = stage.done, stage.total
    body.elapsed_s = round(state.watch.startup_age_s(), 3)
    return body


async def metrics(_: web.Request, context: HttpContext) -> web.Response:
    return metrics_response(context.registry)


def metrics_response(registry: CollectorRegistry) -> web.Response:
    return web.Response(
        body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )


ROUTES = (
    get("/health", health, public=True),
    get("/livez", livez, public=True),
    get("/readyz", health, public=True),
    get("/startupz", startupz, public=True),
    get(METRICS, metrics),
)
