"""Converts a body's response format to a `Grammar` or None. The engine compiles it later."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.checks import check_unsupported
from aserve.http.openai.schema import GenerationBody, ResponseFormat, StructuredOutputs
from aserve.messages.requests import Grammar
from aserve.parsers.structural_tag import schema_format, tag_format

JsonSchema: TypeAlias = dict[str, Any]

MAX_DEPTH = 64  # levels of nested objects and lists in a schema
NEUTRAL: dict[str, tuple[object, ...]] = {
    "whitespace_pattern": ("",),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}
CONSTRAINTS = ("structured_outputs", "response_format")


# Fields of the body that are other names of fields of `structured_outputs`.
ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}


def grammar_of(body: GenerationBody) -> Grammar | None:
    """Returns the grammar of the one field that constrains the output: OpenAI's `response_format`,
    vLLM's `structured_outputs`, or another name of one of its fields.
    """
    given = [name for name in ALIASES if getattr(body, name) not in (None, False)]
    given += [name for name in CONSTRAINTS if getattr(body, name) is not None]
    grammars = {name: _of_field(body, name) for name in given}
    found = {name: grammar for name, grammar in grammars.items() if grammar is not None}
    if len(found) > 1:
        name, *_, other = found
        raise InvalidRequest(
            f"Invalid '{name}': '{other}' already constrains the output. Send only one of them.",
            param=name,
            code="invalid_value",
        )
    return next(iter(found.values()), None)


def _of_field(body: GenerationBody, name: str) -> Grammar | None:
    match name:
        case "response_format":
            assert body.response_format is not None
            return _of_response_format(body.response_format)
        case "structured_outputs":
            assert body.structured_outputs is not None
            return _of_structured_outputs(body.structured_outputs)
        case _:
            return _of_constraint(ALIASES[name], getattr(body, name), param=name)


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
                "json_object, json_schema and, in a chat or completion, structural_tag.",
                param=f"{param}.type",
                code="invalid_value",
            )


def _of_response_format(response_format: ResponseFormat) -> Grammar | None:
    if response_format.type == "structural_tag":
        return _structural_tag(response_format)
    schema = None if response_format.json_schema is None else response_format.json_schema.schema
    return format_grammar(response_format.type, schema, param="response_format")


def _structural_tag(given: ResponseFormat) -> Grammar:
    """Returns the grammar of a tag in xgrammar's form, or in the older one of begins and ends."""
    tag = given.format
    if tag is None and given.structures is not None and given.triggers is not None:
        structures = [
            tag_format(item.begin, schema_format(item.schema), item.end)
            for item in given.structures
        ]
        tag = {"type": "triggered_tags", "triggers": given.triggers, "tags": structures}
    if tag is None:
        raise InvalidRequest(
            "Missing required parameter: 'response_format' of type structural_tag needs a format, "
            "or structures and triggers.",
            param="response_format",
            code="missing_required_parameter",
        )
    source = _schema_text({"type": "structural_tag", "format": tag}, "response_format")
    return Grammar("structural_tag", source, param="response_format")


def _of_structured_outputs(outputs: StructuredOutputs) -> Grammar:
    check_unsupported(outputs, NEUTRAL, where="structured_outputs.")
    names = [name for name in outputs.__struct_fields__ if name not in NEUTRAL]
    given = [name for name in names if getattr(outputs, name) not in (None, False)]
    if len(given) != 1:
        found = f"got {' and '.join(given)}" if given else "got none"
        raise InvalidRequest(
            f"Invalid 'structured_outputs': send exactly one of {', '.join(names)}; {found}.",
            param="structured_outputs",
            code="invalid_value",
        )
    (name,) = given
    return _of_constraint(name, getattr(outputs, name), param=f"structured_outputs.{name}")


def _of_constraint(kind: str, value: Any, *, param: str) -> Grammar:
    """Returns the grammar of a field of `structured_outputs`, whose types are checked."""
    match kind:
        case "json_object":
            return Grammar("json_object", param=param)
        case "regex":
            return Grammar("regex", _unicode(value, param), param=param)
        case "grammar":
            return Grammar("ebnf", _unicode(value, param), param=param)
        case "choice":
            for choice in value:
                _unicode(choice, param)
            return Grammar("choice", msgspec.json.encode(value).decode(), param=param)
        case _:
            source = (
                _unicode(value, param) if isinstance(value, str) else _schema_text(value, param)
            )
            is_tag = kind == "structural_tag"
            return Grammar("structural_tag" if is_tag else "json_schema", source, param=param)


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
