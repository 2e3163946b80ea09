"""Requests that are about all replicas: their answers are added up, or joined to one list."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import hdrs, web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from aserve.errors import UNDECODABLE, EngineDead
from aserve.http.all_frontends import merged
from aserve.http.frontend_requests import ANSWER_S, end_to_end, probing
from aserve.observability.metric_sums import summed
from aserve.router.metrics import RouterMetrics
from aserve.router.upstream import GONE, PROBE_S, Call, Upstream, Whole

LISTS = frozenset({"/v1/models", "/v1/files", "/v1/batches", "/v1/requests"})
# Weights and caches, which all replicas have: every one of them is told.
TO_ALL = frozenset(
    {
        *("/abort_request", "/abort_requests", "/freeze_gc", "/set_trace_level"),
        *("/pause_generation", "/continue_generation", "/pause", "/resume"),
        *("/flush_cache", "/reset_prefix_cache", "/sleep", "/wake_up", "/is_paused", "/load"),
        *("/release_memory_occupation", "/resume_memory_occupation"),
        *("/start_profile", "/stop_profile", "/weights_checker"),
        *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weight_version"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/load_lora_adapter", "/unload_lora_adapter"),
    }
)
# The rest of these leaves something behind, so it must reach every replica.
WITHOUT_TRACE = frozenset({"/abort_request", "/abort_requests", "/is_paused", "/load"})
# Behind these a 404 is that of a replica with nothing left to unload.
UNLOADS = frozenset({"/v1/unload_lora_adapter", "/unload_lora_adapter"})
# Changes of settings, whose numbers are not added up.
SETTINGS = frozenset({"/settings", "/configure_logging", "/set_internal_state"})


def is_for_all(method: str, path: str) -> bool:
    return path in TO_ALL or path in (LISTS if method == hdrs.METH_GET else SETTINGS)


def is_change(method: str, path: str) -> bool:
    """Returns whether a request is for all replicas, also for those that do not serve now."""
    return is_for_all(method, path) and path not in WITHOUT_TRACE | LISTS


async def ask_all(
    call: Call, upstreams: Sequence[Upstream], *, needs_all: bool = False
) -> list[Whole]:
    """Returns the answers of the replicas that answer. Raises EngineDead if none does, or, with
    `needs_all`, if one does not and no other one has refused: it would go on with its old state.
    """

    async def ask(upstream: Upstream) -> Whole | None:
        try:
            if not needs_all:
                return await _asked(upstream, call)
            await upstream.reach()
            async with probing(upstream.keep_reaching()):
                return await upstream.ask_whole(call)
        except GONE:
            return None

    answers = await asyncio.gather(*map(ask, upstreams))
    found = [answer for answer in answers if answer is not None]
    if not found:
        raise EngineDead("No replica is ready.", retry_after_s=2, code="no_replica")
    missing = [each.name for each, answer in zip(upstreams, answers, strict=True) if not answer]
    if needs_all and missing and not any(_refuses(answer, call) for answer in found):
        raise EngineDead(
            f"Replicas {missing} do not answer; the others have done what they were asked for. "
            "Send the request again when all of them answer, or remove these.",
            retry_after_s=PROBE_S,
            code="replicas_missing",
        )
    return found


async def ask_everyone(
    call: Call, upstreams: Sequence[Upstream], path: str, *, needs_all: bool
) -> web.Response:
    """Joins the answers. The answer is an error if one of them refuses, and the first one if that
    is no JSON, or of settings.
    """
    answers = await ask_all(call, upstreams, needs_all=needs_all)
    refusing = (answer for answer in answers if _refuses(answer, call))
    first = next(refusing, min(answers, key=lambda answer: answer.status))
    if first.status >= 400 or json_in(first) is None or path in SETTINGS:
        return _response(first)
    decoded = [json_in(answer) for answer in answers if answer.status < 400]
    whole = msgspec.json.encode(joined([each for each in decoded if each is not None]))
    return web.Response(body=whole, status=first.status, content_type=first.content_type)


def _refuses(answer: Whole, call: Call) -> bool:
    is_unloaded = call.path.partition("?")[0] in UNLOADS and answer.status == 404
    return answer.status >= 400 and not is_unloaded


def json_in(answer: Whole) -> Any:
    """Returns None if the answer is no JSON."""
    if answer.content_type != "application/json":
        return None
    try:
        return msgspec.json.decode(answer.body)
    except UNDECODABLE:
        return None


def joined(answers: list[Any]) -> Any:
    """Adds up objects as several frontends of a server do. In lists an id occurs once."""
    if not all(isinstance(answer, dict) for answer in answers):
        return answers[0]
    whole = merged(answers)
    if isinstance(whole.get("data"), list):
        by_id = {_id_of(number, item): item for number, item in enumerate(whole["data"])}
        whole["data"] = list(by_id.values())
        if "created" in answers[0]:
            whole["created"] = answers[0]["created"]
    return whole


async def first_known(call: Call, upstreams: Sequence[Upstream]) -> tuple[str, Whole]:
    """Asks for an id that may be any replica's: the answer is that of the first one to know it."""
    for upstream in upstreams:
        try:
            whole = await _asked(upstream, call)
        except GONE:
            continue
        if whole.status != web.HTTPNotFound.status_code or upstream is upstreams[-1]:
            return upstream.name, whole
    raise EngineDead("No replica is ready.", retry_after_s=2, code="no_replica")


async def metrics_of_all(
    call: Call, upstreams: Sequence[Upstream], metrics: RouterMetrics
) -> web.Response:
    """Adds up the metrics of the replicas, and appends the router's own."""
    own = generate_latest(metrics.registry)
    answers = [each for each in await ask_all(call, upstreams) if each.status == 200]
    body = summed(each.body for each in answers) + own
    return web.Response(body=body, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_LATEST})


async def _asked(upstream: Upstream, call: Call) -> Whole:
    """Asks for what a replica does at once. Raises one of GONE, also if it takes longer."""
    async with asyncio.timeout(ANSWER_S):
        return await upstream.ask_whole(call)


def _id_of(number: int, item: Any) -> str | int:
    name = item.get("id") if isinstance(item, dict) else None
    return name if isinstance(name, str) else number


def _response(whole: Whole) -> web.Response:
    headers = end_to_end(whole.headers)
    return web.Response(body=whole.body, status=whole.status, headers=headers)
