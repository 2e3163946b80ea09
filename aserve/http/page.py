"""The web page of the server: a chat, completions, a comparison and a live view.

Its files are read once. Nothing in them comes from outside, and the policy that each answer carries
forbids it to a browser. The files need no key: what they show, they ask of the API.
"""

from __future__ import annotations

import math
import mimetypes
from pathlib import Path

import msgspec
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.route import get
from aserve.http.state import HttpContext

FOLDER = Path(__file__).parent / "static"
FILES = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.is_file()}
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def live(request: web.Request, context: HttpContext) -> web.Response:
    """Returns the last requests and steps for the live view: their lengths and times, and nothing
    of their text. With `since`, a `now_s` of an earlier answer, it leaves out what had ended by
    then.
    """
    given = request.query.get("since", "0")
    try:
        since_s = float(given)
    except ValueError:
        since_s = math.nan
    if not math.isfinite(since_s):
        raise InvalidRequest(
            f"Invalid 'since': a number of seconds is expected, got '{given[:40]}'.",
            param="since",
            code="invalid_value",
        )
    return web.Response(
        body=msgspec.json.encode(context.recent.snapshot(since_s)),
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


async def index(_: web.Request, __: HttpContext) -> web.Response:
    return file_response("index.html")


async def icon(_: web.Request, __: HttpContext) -> web.Response:
    """Browsers ask for /favicon.ico before they have read the page."""
    return file_response("icon.svg")


async def page_file(request: web.Request, _: HttpContext) -> web.Response:
    name = request.match_info["name"]
    if name not in FILES:
        raise web.HTTPNotFound
    return file_response(name)


def file_response(name: str) -> web.Response:
    content_type = TYPES.get(Path(name).suffix) or mimetypes.guess_type(name)[0]
    response = web.Response(body=FILES[name], content_type=content_type, headers=HEADERS)
    if response.content_type != "image/svg+xml":
        response.charset = "utf-8"
    return response


ROUTES = (
    get("/live", live),
    get("/", index, public=True),
    get("/ui/{name}", page_file, public=True),
    get("/favicon.ico", icon, public=True),
)
