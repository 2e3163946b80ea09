"""Turns arguments that are written as text between tags into the JSON of an object.

The tool's schema says which texts are strings: these are streamed. Others are JSON once they are
complete, or Python's True, False and None; what is neither is a string after all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

import msgspec

from aserve.parsers.calls import CallWriter
from aserve.parsers.events import JsonSchema, ToolSpec
from aserve.parsers.reader import MAX_SPACE, CallError, Markers, Parsing, Reader

MAX_VALUE = 1 << 16  # characters of a value that is not a string
MAX_SCHEMAS = 64  # that are looked at to find the types of a value
PYTHON = {"True": "true", "False": "false", "None": "null"}
TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


class XmlArguments:
    """Writes the arguments of one call, key by key."""

    __slots__ = ("_call", "_num_keys", "_schema")

    def __init__(self, call: CallWriter, tool_specs: Sequence[ToolSpec]) -> None:
        self._call = call
        self._num_keys = 0
        schemas = {spec.name: spec.parameters for spec in tool_specs}
        self._schema = schemas.get(call.name) or {}
        call.write("{")

    def finish(self) -> None:
        self._call.write("}")

    def read_value(
        self, reader: Reader, key: str, *, ends: Markers, followers: Sequence[str]
    ) -> Parsing[str]:
        """Reads a value up to one of `ends` before one of `followers`, which is consumed and
        returned. An end before other text is part of the value.
        """
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        types = types_of(schema, self._schema)
        self._call.write(f"{', ' if self._num_keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_keys += 1
        is_string = types == {"string"}
        value = _StringValue(self._call) if is_string else _AnyValue(self._call, types)
        while True:
            end = yield from reader.until(ends, value.add, is_inside=True)
            follower = end.strip()
            if follower not in followers:
                follower = yield from reader.accept(*followers, space=MAX_SPACE, is_inside=True)
            if follower:
                value.finish()
                return follower
            value.add(end)


class _Value(Protocol):
    def add(self, text: str) -> None: ...
    def finish(self) -> None: ...


class _StringValue:
    __slots__ = ("_call",)

    def __init__(self, call: CallWriter) -> None:
        self._call = call
        call.write('"')

    def add(self, text: str) -> None:
        self._call.write(quoted(text)[1:-1])

    def finish(self) -> None:
        self._call.write('"')


class _AnyValue:
    __slots__ = ("_call", "_pieces", "_size", "_types")

    def __init__(self, call: CallWriter, types: frozenset[str]) -> None:
        self._call = call
        self._types = types
        self._pieces: list[str] = []
        self._size = 0

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._size += len(text)
        if self._size > MAX_VALUE:
            raise CallError(f"a value of more than {MAX_VALUE} characters that is not a string")

    def finish(self) -> None:
        self._call.write(json_of("".join(self._pieces), self._types))


def json_of(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of a value of one of `types`; any type where there are none."""
    source = PYTHON.get(text.strip(), text.strip())
    try:
        value = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError):
        return quoted(text)
    kinds = {TYPES[type(value)]} | ({"number"} if isinstance(value, int) else set())
    if "string" in types and not kinds & types:
        return quoted(text)
    return source


def types_of(schema: object, root: JsonSchema) -> frozenset[str]:
    """Returns the types that a schema allows; none if it does not say. Schemas come from clients,
    so a keyword may have any value.
    """
    types: set[str] = set()
    pending = [schema]
    for _ in range(MAX_SCHEMAS):
        current = pending.pop() if pending else None
        if isinstance(current, dict):
            types.update(_own_types(current))
            pending += (
                _items(current, "anyOf") + _items(current, "oneOf") + _referred(current, root)
            )
    return frozenset(types)


def _own_types(schema: JsonSchema) -> set[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    values = [*_items(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    return {name for name in _items(schema, "type") if isinstance(name, str)} | {
        TYPES[type(value)] for value in values
    }


def _referred(schema: JsonSchema, root: JsonSchema) -> list[object]:
    """Returns the schema behind a reference such as `#/$defs/Color`."""
    _, _, name = str(schema.get("$ref", "")).rpartition("/")
    definitions = root.get("$defs") or root.get("definitions")
    return [definitions[name]] if isinstance(definitions, dict) and name in definitions else []


def _items(schema: JsonSchema, keyword: str) -> list[object]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
