"""The limits of a grammar's source, and of the grammars that wait to be compiled."""

from __future__ import annotations

import re

from aserve.errors import InvalidRequest
from aserve.messages.requests import Grammar

MAX_SOURCE = 200_000  # characters
MAX_DEPTH = 64  # of brackets in a schema
MAX_PENDING = 64  # grammars that are being compiled or wait for it
MAX_PER_CLIENT = 32  # the same for one client
STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


def check_size(grammar: Grammar) -> None:
    """Raises InvalidRequest for a source that is too long or nested too deep."""
    size = len(grammar.source)
    if size > MAX_SOURCE:
        raise InvalidRequest(
            f"Invalid '{grammar.param}': it has {size} characters, more than {MAX_SOURCE}.",
            param=grammar.param,
            code="string_above_max_length",
        )
    is_json = grammar.kind in ("json_schema", "structural_tag")
    depth = nesting(grammar.source) if is_json else 0
    if depth > MAX_DEPTH:
        raise InvalidRequest(
            f"Invalid '{grammar.param}': the schema is nested {depth} levels deep, "
            f"more than {MAX_DEPTH}.",
            param=grammar.param,
            code="schema_too_deep",
        )


def nesting(text: str) -> int:
    """Returns the deepest level of brackets in JSON, which need not be valid."""
    depth = deepest = 0
    for found in STRING_OR_BRACKET.finditer(text):
        bracket = found[0]
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest
