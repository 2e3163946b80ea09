"""Converts a body's response format to a `Grammar` or None. The engine compiles it later."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.schema import ResponseFormat, StructuredOutputs
from aserve.messages.requests import Grammar

JsonSchema: TypeAlias = dict[str, Any]

MAX_DEPTH = 64  # levels of nested objects and lists in a schema


def grammar_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> Grammar | None:
    """Returns the grammar of OpenAI's `response_format` or of vLLM's `structured_outputs`. Raises
    if both have one.
    """
    by_format = None if response_format is None else _of_response_format(response_format)
    by_kind = None if structured_outputs is None else _of_structured_outputs(structured_outputs)
    if by_format is not None and by_kind is not None:
        raise InvalidRequest(
            "Invalid 'structured_outputs': 'response_format' already constrains the output. "
            "Send only one of them.",
            param="structured_outputs",
            code="invalid_value",
        )
    return by_format or by_kind


def format_grammar(kind: str, schema: JsonSchema | None, *, param: str) -> Grammar | None:
    """Returns the grammar of a format with the type `kind`, or None for `text`. `param` is the
    path of the format in the body.
    """
    match kind:
        case "text":
            return None
        case "json_object":
            return Grammar("json_object", param=param)
        case "json_schema":
            if schema is None:
                raise InvalidRequest(
                    f"Missing required parameter: '{param}' of type json_schema needs a schema.",
                    param=param,
                    code="missing_required_parameter",
                )
            return Grammar("json_schema", _schema_text(schema, param), param=param)
        case _:
            raise InvalidRequest(
                f"Invalid value for '{param}.type': '{kind[:40]}'. Supported values are text, "
                "json_object and json_schema.",
                param=f"{param}.type",
                code="invalid_value",
            )


def _of_response_format(response_format: ResponseFormat) -> Grammar | None:
    schema = None if response_format.json_schema is None else response_format.json_schema.schema
    return format_grammar(response_format.type, schema, param="response_format")


def _of_structured_outputs(outputs: StructuredOutputs) -> Grammar:
    given = [
        name for name in outputs.__struct_fields__ if getattr(outputs, name) not in (None, False)
    ]
    if len(given) != 1:
        found = f"got {' and '.join(given)}" if given else "got none"
        raise InvalidRequest(
            "Invalid 'structured_outputs': send exactly one of "
            f"{', '.join(outputs.__struct_fields__)}; {found}.",
            param="structured_outputs",
            code="invalid_value",
        )
    param = f"structured_outputs.{given[0]}"
    if outputs.json_object:
        return Grammar("json_object", param=param)
    if outputs.regex is not None:
        return Grammar("regex", _unicode(outputs.regex, param), param=param)
    if outputs.grammar is not None:
        return Grammar("ebnf", _unicode(outputs.grammar, param), param=param)
    if outputs.choice is not None:
        for choice in outputs.choice:
            _unicode(choice, param)
        return Grammar("choice", msgspec.json.encode(outputs.choice).decode(), param=param)
    if isinstance(outputs.json, str):
        return Grammar("json_schema", _unicode(outputs.json, param), param=param)
    assert outputs.json is not None, "one is given"
    return Grammar("json_schema", _schema_text(outputs.json, param), param=param)


def _schema_text(schema: JsonSchema, param: str) -> str:
    """Encodes a schema. NOTE: it keeps the order of properties, which outputs follow."""
    _check_depth(schema, param)
    try:
        return msgspec.json.encode(schema).decode()
    except UnicodeEncodeError as error:
        raise _not_unicode(error, param) from None


def _check_depth(schema: JsonSchema, param: str) -> None:
    """Raises if the schema is nested too deeply. WHY level by level: a recursive walk could exceed
    Python's own limit.
    """
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    raise InvalidRequest(
        f"Invalid '{param}': the schema is nested more than {MAX_DEPTH} levels deep. Make it "
        "flatter, for example with $defs and $ref.",
        param=param,
        code="schema_too_deep",
    )


def _inner(value: object) -> list[object]:
    """Returns the lists and objects directly inside a value."""
    if isinstance(value, dict):
        return [item for item in value.values() if isinstance(item, dict | list)]
    if isinstance(value, list):
        return [item for item in value if isinstance(item, dict | list)]
    return []


def _unicode(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _not_unicode(error, param) from None
    return text


def _not_unicode(error: UnicodeEncodeError, param: str) -> InvalidRequest:
    """Makes the error of a lone surrogate, which JSON can express and UTF-8 cannot."""
    return InvalidRequest(
        f"Invalid '{param}': character {error.start} is \\u{ord(error.object[error.start]):04x}, "
        "half of a surrogate pair. Send whole characters.",
        param=param,
        code="invalid_unicode",
    )
