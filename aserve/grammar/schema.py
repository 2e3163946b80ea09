"""What of JSON Schema can be kept to: a keyword that would only be ignored is refused by name.

Must not know how schemas become grammars. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# The compiler passes over these without a word; of others it warns, which the worker refuses too.
IGNORED = frozenset(
    {
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
        *("multipleOf", "dependentSchemas", "unevaluatedItems", "$dynamicRef"),
    }
)
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # subschemas by name
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "additionalItems", "propertyNames")


def ignored_keyword(schema: object) -> str | None:
    """Where the first one stands, as a JSON pointer; names of properties and data don't count."""
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
