"""A request's JSON body as a typed record, or a 400 that names the field or the byte.

Must not know what the fields mean.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.errors import refused

T = TypeVar("T")

MAX_SHOWN = 200  # characters of a message: an error must not send a client's body back
MISSING = re.compile(r"Object missing required field `([^`]*)`")
PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
BYTE = re.compile(r"\(byte (\d+)\)")


async def read_body(request: web.Request, kind: type[T]) -> T:
    if request.content_type != "application/json":
        raise refused(
            415, f"Content-Type must be application/json, not {request.content_type[:MAX_SHOWN]}."
        )
    return parse_body(await request.read(), kind)


def parse_body(data: bytes, kind: type[T], *, where: str = "") -> T:
    """`where` is the place of `data` in the whole body."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), where) from None
    except msgspec.DecodeError as error:
        raise invalid_json(str(error), data) from None
    except UnicodeDecodeError as error:
        raise invalid_json(f"it is not UTF-8 ({error.reason})", data) from None
    except RecursionError:
        raise invalid_json("it is nested too deeply", data) from None


def invalid_json(reason: str, data: bytes) -> InvalidRequest:
    """A truncated body is wrong where it ends."""
    place = "" if BYTE.search(reason) else f" (byte {len(data)})"
    reason = reason.removeprefix("JSON is malformed: ")
    return InvalidRequest(
        f"The body is not valid JSON: {reason[:MAX_SHOWN]}{place}.", code="invalid_json"
    )


def wrong_field(reason: str, where: str) -> InvalidRequest:
    place = PLACE.search(reason)
    path = where + (place[1] if place else "")
    missing = MISSING.match(reason)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    what = PLACE.sub("", reason).replace("`", "")[:MAX_SHOWN]
    target = f" for '{path[:MAX_SHOWN]}'" if path else ""
    return InvalidRequest(
        f"Invalid value{target}: {what}.", param=path[:MAX_SHOWN] or None, code="invalid_type"
    )
