"""Small languages of every kind, each with a judge that knows nothing of grammars or masks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aserve.messages.requests import Grammar

Schema = Mapping[str, Any]
TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class Language:
    grammar: Grammar
    has: Callable[[str], bool]


def regex(pattern: str) -> Language:
    """`.` is any character, line ends as well."""
    compiled = re.compile(pattern, re.DOTALL)
    return Language(Grammar("regex", pattern), lambda text: compiled.fullmatch(text) is not None)


def choice(*texts: str) -> Language:
    return Language(Grammar("choice", json.dumps(texts)), lambda text: text in texts)


def schema(wanted: Schema) -> Language:
    def has(text: str) -> bool:
        try:
            return conforms(json.loads(text), wanted)
        except ValueError:
            return False

    return Language(Grammar("json_schema", json.dumps(wanted)), has)


def any_object() -> Language:
    return Language(Grammar("json_object"), schema({"type": "object"}).has)


def nested_pairs() -> Language:
    """a^n b^n, which no regex knows."""

    def has(text: str) -> bool:
        half = len(text) // 2
        return half > 0 and text == "a" * half + "b" * half

    return Language(Grammar("ebnf", 'root ::= "a" root? "b"'), has)


def conforms(value: Any, wanted: Schema) -> bool:
    """JSON Schema, as much of it as the tests need."""
    if "enum" in wanted and value not in wanted["enum"]:
        return False
    if "anyOf" in wanted and not any(conforms(value, option) for option in wanted["anyOf"]):
        return False
    if "type" in wanted and not _is_of(value, wanted["type"]):
        return False
    if isinstance(value, dict):
        return _object_conforms(value, wanted)
    if isinstance(value, list):
        low, high = wanted.get("minItems", 0), wanted.get("maxItems", len(value))
        return low <= len(value) <= high and all(
            conforms(item, wanted.get("items", {})) for item in value
        )
    if isinstance(value, str):
        return wanted.get("minLength", 0) <= len(value) <= wanted.get("maxLength", len(value))
    if isinstance(value, int):
        return bool(wanted.get("minimum", value) <= value <= wanted.get("maximum", value))
    return True


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _object_conforms(value: Mapping[str, Any], wanted: Schema) -> bool:
    properties = wanted.get("properties", {})
    if not set(wanted.get("required", ())) <= value.keys():
        return False
    if wanted.get("additionalProperties") is False and not value.keys() <= properties.keys():
        return False
    return all(conforms(item, properties.get(name, {})) for name, item in value.items())


PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SIXTEEN = (
    regex(r"\d{3}-\d{4}"),
    regex("[a-z]{2,6}( [a-z]{2,6}){0,3}"),
    regex("(yes|no), (because|although) .{3,20}"),
    regex("한국어|[가-힣]{2,4}"),
    regex(r"\w+@\w+\.(com|org)"),
    choice("red", "green", "blue"),
    choice("a", "ab", "abc"),
    choice('say "hi"\n', "tab\t", "한국😀"),
    nested_pairs(),
    Language(Grammar("ebnf", 'root ::= [0-9]{1,4} "."'), regex(r"\d{1,4}\.").has),
    any_object(),
    schema(PERSON),
    schema({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}),
    schema({"type": "string", "minLength": 2, "maxLength": 8}),
    schema({"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 7}]}),
    schema({"type": "object", "properties": {"it": PERSON}, "required": ["it"]}),
)
