"""Checks JSON values that only the chat template reads: tools, and arguments of tool calls.

A value that passes can be encoded, decoded and rendered without an exception: its numbers, strings
and depth are within the limits of every JSON library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.body import MAX_SHOWN, wrong_field

T = TypeVar("T")

MAX_DEPTH = 100  # the filters of templates recurse within Python's limit


def decode_json(data: bytes, kind: type[T], *, param: str) -> T:
    """Decodes JSON to a type, or raises InvalidRequest."""
    try:
        value = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), param) from None
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8 ({error.reason})", param) from None
    except RecursionError:
        raise _too_deep(param) from None
    except ValueError as error:
        raise _invalid(str(error)[:MAX_SHOWN], param) from None
    check_depth(value, param=param)
    return value


def object_in(text: str) -> dict[str, Any]:
    """Returns the object in a JSON text that a model has written. It is empty if there is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}


def encode_json(value: object, *, param: str) -> bytes:
    """Encodes a value as JSON. Raises InvalidRequest if that is impossible, which can happen with
    values from a program that embeds the engine.
    """
    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"Invalid '{param}': a text has a lone surrogate.", param=param, code="invalid_unicode"
        ) from None
    except RecursionError:
        raise _too_deep(param) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"Invalid '{param}': {str(error)[:MAX_SHOWN]}.", param=param, code="invalid_type"
        ) from None
    check_depth(value, param=param)
    return data


def check_depth(value: object, *, param: str) -> None:
    if depth_of(value) > MAX_DEPTH:
        raise _too_deep(param)


def depth_of(value: object) -> int:
    """Returns the number of levels of nested lists and objects, at most MAX_DEPTH + 1."""
    level: list[Any] = [value]
    depth = 0
    while depth <= MAX_DEPTH:
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return depth
        depth += 1
    return depth


def _inside(value: object) -> Iterator[object]:
    """Yields the values directly inside a list, an object or a record."""
    match value:
        case dict():
            yield from value.values()
        case list() | tuple():
            yield from value
        case msgspec.Struct():
            yield from (getattr(value, name) for name in value.__struct_fields__)


def _too_deep(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{param}': lists and objects may be nested {MAX_DEPTH} deep at most.",
        param=param,
        code="nested_too_deeply",
    )


def _invalid(reason: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{param}': {reason}.", param=param, code="invalid_json")
