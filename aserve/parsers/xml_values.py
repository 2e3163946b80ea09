"""Turns arguments that are written as text between tags into the JSON of an object.

The tool's schema says which texts are strings: these are streamed. Others are JSON once they are
complete, or Python's True, False and None; what is neither is a string after all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from aserve.parsers.calls import CallWriter
from aserve.parsers.events import JsonSchema, ToolSpec
from aserve.parsers.reader import MAX_SPACE, Markers, Parsing, Reader

MAX_VALUE = 1 << 16  # characters of a value that is not a string by its schema
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
        kind = kind_of(schema, self._schema)
        self._call.write(f"{', ' if self._num_keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_keys += 1
        is_text = kind.types == {"string"} and not kind.choices
        value: _Value = _StringValue(self._call) if is_text else _AnyValue(self._call, kind)
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
    """Collects a value until its end. One that is longer than MAX_VALUE is a string."""

    __slots__ = ("_call", "_kind", "_pieces", "_size", "_string")

    def __init__(self, call: CallWriter, kind: ValueKind) -> None:
        self._call = call
        self._kind = kind
        self._pieces: list[str] = []
        self._size = 0
        self._string: _StringValue | None = None

    def add(self, text: str) -> None:
        if self._string is not None:
            self._string.add(text)
            return
        self._pieces.append(text)
        self._size += len(text)
        if self._size > MAX_VALUE:
            self._string = _StringValue(self._call)
            self._string.add("".join(self._pieces))

    def finish(self) -> None:
        if self._string is not None:
            self._string.finish()
        else:
            self._call.write(json_of("".join(self._pieces), self._kind))


class ValueKind(NamedTuple):
    """The types and the texts that a schema allows for a value; empty if it does not say."""

    types: frozenset[str]
    choices: frozenset[str]


def json_of(text: str, kind: ValueKind) -> str:
    """Returns the JSON of a value. Whitespace around it counts only in a text of free choice."""
    if text.strip() in kind.choices:
        return quoted(text.strip())
    source = PYTHON.get(text.strip(), text.strip())
    try:
        value = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError):
        return quoted(text)
    found = {TYPES[type(value)]} | ({"number"} if isinstance(value, int) else set())
    if "string" in kind.types and not found & kind.types:
        return quoted(text)
    return source


def kind_of(schema: object, root: JsonSchema) -> ValueKind:
    """Reads a schema, which comes from a client, so that any keyword may have any value."""
    types: set[str] = set()
    choices: set[str] = set()
    pending = [schema]
    for _ in range(MAX_SCHEMAS):
        current = pending.pop() if pending else None
        if isinstance(current, dict):
            values = [*_items(current, "enum"), *([current["const"]] if "const" in current else [])]
            choices.update(value for value in values if isinstance(value, str))
            types.update(_named_types(current) or {TYPES[type(value)] for value in values})
            pending += [*_items(current, "anyOf"), *_items(current, "oneOf")]
            pending += _referred(current, root)
    return ValueKind(frozenset(types), frozenset(choices))


def _named_types(schema: JsonSchema) -> set[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    return {name for name in _items(schema, "type") if isinstance(name, str)}


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
