"""GET and PATCH /settings, for the administrator: see live_settings.py.

The version is also the entity tag, so that If-Match can name it (RFC 9110). SGLang's clients change
those of the logs by /configure_logging.
"""

from __future__ import annotations

import dataclasses

import msgspec
from aiohttp import hdrs, web

from aserve.errors import InvalidRequest
from aserve.http.delivery import json_response
from aserve.http.live_settings import LogLevel, Settings, SettingsBody
from aserve.http.openai.checks import unsupported
from aserve.http.route import get, post
from aserve.http.state import HttpContext

LOG_SETTINGS = ("log_level", "log_requests", "log_requests_level")
NO_DUMPS = "Prompts are written to no file but the log (log_requests_level 2) and that of --record."
OPTIONS_INSTEAD = {
    "log_requests_format": "The format is that of --log-format.",
    "log_requests_target": "The log goes to stderr.",
    "dump_requests_folder": NO_DUMPS,
    "dump_requests_threshold": NO_DUMPS,
    "crash_dump_folder": NO_DUMPS,
}


class LoggingBody(msgspec.Struct, kw_only=True):
    """The first three are settings; one that is null stays as it is. The others are SGLang's."""

    log_level: LogLevel | None = None
    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_requests_format: str | None = None
    log_requests_target: list[str] | None = None
    dump_requests_folder: str | None = None
    dump_requests_threshold: int | None = None
    crash_dump_folder: str | None = None


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


async def configure_logging(
    _: web.Request, context: HttpContext, body: LoggingBody
) -> web.Response:
    """Changes the settings of the logs, under SGLang's name."""
    for name, advice in OPTIONS_INSTEAD.items():
        if getattr(body, name):
            raise unsupported(name, advice)
    given = {name: getattr(body, name) for name in LOG_SETTINGS}
    change = {name: value for name, value in given.items() if value is not None}
    return _answer(context.state.settings.change(SettingsBody(**change)))


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
    post("/configure_logging", LoggingBody, configure_logging, admin=True),
)
