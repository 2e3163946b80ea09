"""The formats of xgrammar's structural tags, as JSON: texts, schemas and tags around them.

A structural tag says where in an output which format must hold; the formats are described in
xgrammar's documentation of structural tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from aserve.parsers.events import JsonSchema

Format: TypeAlias = dict[str, Any]


def text_format(text: str) -> Format:
    return {"type": "const_string", "value": text}


def any_text(*, excludes: Sequence[str] = ()) -> Format:
    return {"type": "any_text", "excludes": list(excludes)}


def regex_format(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def schema_format(schema: JsonSchema, *, style: str = "json") -> Format:
    """JSON that matches a schema, or arguments in the XML of a family of models."""
    return {"type": "json_schema", "json_schema": schema, "style": style}


def sequence(*formats: Format) -> Format:
    return {"type": "sequence", "elements": list(formats)}


def one_of(formats: Sequence[Format]) -> Format:
    return {"type": "or", "elements": list(formats)}


def optional(inner: Format) -> Format:
    return {"type": "optional", "content": inner}


def repeated(inner: Format) -> Format:
    return {"type": "star", "content": inner}


def tag_format(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags_format(tags: Sequence[Format], *, separator: str, is_single: bool) -> Format:
    """Returns the format of one tag, or of several with a separator."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def triggered_format(tags: Sequence[Format], *, trigger: str, is_single: bool) -> Format:
    """Any text, in which a tag follows wherever the trigger that it begins with stands."""
    return {
        "type": "triggered_tags",
        "tags": list(tags),
        "triggers": [trigger],
        "stop_after_first": is_single,
    }
