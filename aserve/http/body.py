"""Parses a JSON request body into a typed record, or answers 400 with the wrong field or byte.

Unknown fields are ignored, and named in a header of the answer, unless they would change the
output.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.decompress import decompress
from aserve.http.errors import refused
from aserve.http.intake import INTAKE, encoding_of
from aserve.http.json_bounds import check_json_bounds
from aserve.http.unknown_fields import ignored_fields

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)

IGNORED = web.RequestKey("ignored", str)  # the X-Ignored-Params header: unknown fields of the body

MAX_SHOWN = 200  # characters of input in a message: an error must not echo a whole body
MISSING = re.compile(r"Object missing required field `([^`]*)`")
PLACE = re.compile(r" - at (?:`key` in )?`\$([^`]*)`$")
BYTE = re.compile(r"\(byte (\d+)\)")


async def read_body(request: web.Request, kind: type[StructT]) -> StructT:
    if request.content_type != "application/json":
        raise refused(
            415, f"Content-Type must be application/json, not {request.content_type[:MAX_SHOWN]}."
        )
    intake = request.app[INTAKE]
    encoding = encoding_of(request)
    with intake.hold() as held:
        data = await intake.receive(request, held)

        def decode() -> tuple[StructT, str]:
            plain = decompress(data, encoding, max_size=intake.max_size) if encoding else data
            check_json_bounds(plain, max_values=intake.max_values)
            body, given = parse_body(plain, kind), parse_body(plain, dict[str, msgspec.Raw])
            return body, ignored_fields(given, kind)

        size = intake.max_size if encoding else len(data)
        body, request[IGNORED] = await intake.off_loop(decode, size=size)
    return body


def parse_query(request: web.Request, kind: type[T]) -> T:
    """Parses the query string into a record, and converts each text to its field's type."""
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), "") from None


def parse_body(data: bytes, kind: type[T], *, where: str = "") -> T:
    """Decodes JSON into a record, or raises InvalidRequest. `where` is the path of `data` in the
    request's body.
    """
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
    """Makes the error of a malformed body. A truncated body is reported at its end."""
    place = "" if BYTE.search(reason) else f" (byte {len(data)})"
    reason = reason.removeprefix("JSON is malformed: ")
    return InvalidRequest(
        f"The body is not valid JSON: {reason[:MAX_SHOWN]}{place}.", code="invalid_json"
    )


def wrong_field(reason: str, where: str) -> InvalidRequest:
    place = PLACE.search(reason)
    path = (where + (place[1] if place else "")).removeprefix(".")
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
