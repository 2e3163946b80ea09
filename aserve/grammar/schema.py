"""Finds the keywords of JSON Schema that the compiler would ignore, to refuse them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

# The compiler ignores these silently. It warns of others, and the worker refuses those, too.
IGNORED = frozenset(
    {
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
        *("multipleOf", "dependentSchemas", "unevaluatedItems", "$dynamicRef"),
    }
)
WITH_SCHEMA = ("json_schema", "qwen_xml_parameter")  # the types of structural formats
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # subschemas by name
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "additionalItems", "propertyNames")


def ignored_keyword(schema: object) -> str | None:
    """Returns a JSON pointer to an ignored keyword; property names and data do not count."""
    pending: list[tuple[str, object]] = [("#", schema)]
    while pending:
        where, current = pending.pop()
        if not isinstance(current, dict):
            continue
        for keyword in sorted(IGNORED & current.keys()):
            if current[keyword] is not False:
                return f"{where}/{keyword}"
        pending.extend(_subschemas(current, where))
    return None


def without_ignored(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a schema without the keywords that `ignored_keyword` finds. It allows more
    than the schema.
    """
    copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schema))
    pending: list[object] = [copied]
    while pending:
        current = pending.pop()
        if isinstance(current, dict):
            for keyword in IGNORED & current.keys():
                del current[keyword]
            pending.extend(inner for _, inner in _subschemas(current, ""))
    return copied


def _subschemas(schema: dict[str, Any], where: str) -> Iterator[tuple[str, object]]:
    for keyword in NAMED:
        named = schema.get(keyword)
        if isinstance(named, dict):
            yield from ((f"{where}/{keyword}/{name}", value) for name, value in named.items())
    for keyword in (*LISTED, *SINGLE):
        value = schema.get(keyword)
        if isinstance(value, list):
            yield from ((f"{where}/{keyword}/{i}", item) for i, item in enumerate(value))
        else:
            yield f"{where}/{keyword}", value


def schema_formats(tag: object) -> Iterator[dict[str, Any]]:
    """Yields the formats with a schema that a structural tag contains, at any depth."""
    pending = [tag]
    while pending:
        current = pending.pop()
        if isinstance(current, list):
            pending.extend(current)
        elif isinstance(current, dict) and current.get("type") in WITH_SCHEMA:
            if "json_schema" in current:
                yield current
        elif isinstance(current, dict):
            pending.extend(current.values())
