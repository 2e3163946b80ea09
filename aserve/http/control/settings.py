"""GET and PATCH /settings, for the administrator: see live_settings.py.

The version is also the entity tag, so that If-Match can name it (RFC 9110).
"""

from __future__ import annotations

import dataclasses

import msgspec
from aiohttp import hdrs, web

from aserve.errors import InvalidRequest
from aserve.http.delivery import json_response
from aserve.http.live_settings import Settings, SettingsBody
from aserve.http.route import get, post
from aserve.http.state import HttpContext


async def read_settings(_: web.Request, context: HttpContext) -> web.Response:
    return _answer(context.state.settings.now)


async def change_settings(
    request: web.Request, context: HttpContext, body: SettingsBody
) -> web.Response:
    version = _version_in(request)
    if version is not None:
        if body.version not in (None, version):
            raise InvalidRequest(
                f"If-Match names version {version}, and the body {body.version}.", param="version"
            )
        body = msgspec.structs.replace(body, version=version)
    return _answer(context.state.settings.change(body))


def _answer(settings: Settings) -> web.Response:
    response = json_response(settings)
    response.headers[hdrs.ETAG] = f'"{settings.version}"'
    return response


def _version_in(request: web.Request) -> int | None:
    """Returns the version of If-Match, None without one or for `*`, which matches any."""
    tag = request.headers.get(hdrs.IF_MATCH, "*").strip()
    if tag == "*":
        return None
    number = tag.strip('"')
    if not (number.isascii() and number.isdigit() and len(number) < 10):
        raise InvalidRequest(
            f"Invalid 'If-Match': expected the ETag of the settings, but got {tag[:40]!r}.",
            param="If-Match",
            code="invalid_value",
        )
    return int(number)


ROUTES = (
    get("/settings", read_settings, admin=True),
    dataclasses.replace(
        post("/settings", SettingsBody, change_settings, admin=True), method="PATCH"
    ),
)
