"""Who may use a route: every route with every key, and with names that an attacker would send."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from aiohttp import web

from aserve.http import server
from aserve.http.route import Route, get
from aserve.http.routes import ROUTES
from aserve.http.state import HttpContext
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, bearer

OPTIONS: dict[str, Any] = {"api_key": "se cret,other", "admin_api_key": "root"}
HOST, ORIGIN = {"Host": "evil.example"}, {"Origin": "https://evil.example"}
WRONG = ({}, *(bearer(key) for key in ("wrong", "", "se cre", "se cret,other")))
WRONG += ({"Authorization": "Basic se cret"}, {"Authorization": "se cret"}, {"X-Api-Key": "wrong"})
CLIENT = (bearer("se cret"), {"X-Api-Key": "other"}, bearer("other") | {"X-Api-Key": "other"})
ADMIN = (bearer("root"), {"X-Api-Key": "root"})
PUBLIC_PATHS = {
    "/openapi.json",
    "/docs",
    "/",
    "/ui/{name}",
    "/health",
    "/livez",
    "/readyz",
    "/startupz",
    "/ping",
    "/health_generate",
    "/favicon.ico",
}


async def secret(_: web.Request, __: HttpContext) -> web.Response:
    return web.Response(text="secret")


ALL_ROUTES = (*ROUTES, get("/admin/secret", secret, admin=True))
WITH_HEAD = (
    *ALL_ROUTES,
    *(dataclasses.replace(route, method="HEAD") for route in ALL_ROUTES if route.method == "GET"),
)


@pytest.fixture
async def locked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EchoEngine]:
    monkeypatch.setattr(server, "ROUTES", ALL_ROUTES)
    async with EchoEngine(**OPTIONS) as engine:
        yield engine
    gc.unfreeze()  # one of the routes freezes


async def status(echo: EchoEngine, route: Route, headers: Mapping[str, str]) -> int:
    path = re.sub(r"{id[^}]*}", "resp_1", re.sub(r"{name[^}]*}", "none", route.path))
    body = b"?" if route.method == "POST" else None
    answer = await ask(echo, path, body, method=route.method, headers=headers)
    if answer.status == 401:
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert route.method == "HEAD" or answer.error["code"] == "invalid_api_key"
    return answer.status


@pytest.mark.parametrize("route", WITH_HEAD, ids=lambda route: f"{route.method} {route.path}")
async def test_a_route_opens_to_its_keys_alone(locked: EchoEngine, route: Route) -> None:
    for headers in (*WRONG, *CLIENT, *ADMIN):
        assert await status(locked, route, {**headers, **HOST}) == 403, headers
    for headers in WRONG:
        given = await status(locked, route, headers)
        assert (given != 401) is (route.path in PUBLIC_PATHS and route.method != "POST"), headers
    for headers in CLIENT:
        given = await status(locked, route, headers)
        assert given != 401
        assert (given == 403) is route.admin, headers
    for headers in ADMIN:
        assert await status(locked, route, headers) not in (401, 403), headers
        assert await status(locked, route, {**headers, **ORIGIN}) != 401


@pytest.mark.parametrize("path", ["/v1/unknown", "/health/../v1/models", "/admin", "/health/"])
async def test_an_unknown_path_needs_a_key_too(locked: EchoEngine, path: str) -> None:
    assert (await ask(locked, path)).status == 401


@pytest.mark.parametrize("key", [None, "root", "any"])
async def test_without_an_admin_key_there_are_no_admin_routes(
    monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setattr(server, "ROUTES", ALL_ROUTES)
    headers = {} if key is None else bearer(key)
    async with EchoEngine() as echo:
        assert (await ask(echo, "/admin/secret", headers=headers)).status == 404
    async with EchoEngine(admin_api_key="root") as echo:
        expected = 200 if key == "root" else 401
        assert (await ask(echo, "/admin/secret", headers=headers)).status == expected


async def test_two_different_keys_are_refused(locked: EchoEngine) -> None:
    headers = bearer("se cret") | {"X-Api-Key": "other"}
    answer = await ask(locked, "/v1/models", headers=headers)
    assert (answer.status, answer.error["code"]) == (400, "duplicate_header")
