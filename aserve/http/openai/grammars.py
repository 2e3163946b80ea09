"""What a client asks of the form of its output, as one `Grammar` or none.

Must not know how a grammar is compiled: whether a schema makes sense is found out by the engine.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.schema import ResponseFormat, StructuredOutputs
from aserve.messages import Grammar

JsonSchema: TypeAlias = dict[str, Any]


def grammar_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> Grammar | None:
    """OpenAI's way to ask, or vLLM's; both at once only if one of them asks for nothing."""
    by_format = None if response_format is None else _of_response_format(response_format)
    by_kind = None if structured_outputs is None else _of_structured_outputs(structured_outputs)
    if by_format is not None and by_kind is not None:
        raise InvalidRequest(
            "Invalid 'structured_outputs': 'response_format' already says what the output must "
            "look like. Give one of them.",
            param="structured_outputs",
            code="invalid_value",
        )
    return by_format or by_kind


def format_grammar(kind: str, schema: JsonSchema | None, *, param: str) -> Grammar | None:
    """`kind` is the `type` of a response_format or of a text.format, which stands at `param`.

    text asks for nothing.
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
            return Grammar("json_schema", _schema_text(schema), param=param)
        case _:
            raise InvalidRequest(
                f"Invalid value for '{param}.type': '{kind[:40]}' is none of text, json_object, "
                "json_schema.",
                param=f"{param}.type",
                code="invalid_value",
            )


def _of_response_format(asked: ResponseFormat) -> Grammar | None:
    schema = None if asked.json_schema is None else asked.json_schema.schema
    return format_grammar(asked.type, schema, param="response_format")


def _of_structured_outputs(asked: StructuredOutputs) -> Grammar:
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) not in (None, False)]
    if len(given) != 1:
        found = f"got {' and '.join(given)}" if given else "got none"
        raise InvalidRequest(
            "Invalid 'structured_outputs': give exactly one of "
            f"{', '.join(asked.__struct_fields__)}; {found}.",
            param="structured_outputs",
            code="invalid_value",
        )
    param = f"structured_outputs.{given[0]}"
    if asked.json_object:
        return Grammar("json_object", param=param)
    if asked.regex is not None:
        return Grammar("regex", asked.regex, param=param)
    if asked.grammar is not None:
        return Grammar("ebnf", asked.grammar, param=param)
    if asked.choice is not None:
        return Grammar("choice", msgspec.json.encode(asked.choice).decode(), param=param)
    if isinstance(asked.json, str):
        return Grammar("json_schema", asked.json, param=param)
    assert asked.json is not None, "one is given"
    return Grammar("json_schema", _schema_text(asked.json), param=param)


def _schema_text(schema: JsonSchema) -> str:
    """The order of properties stays: outputs keep to it."""
    return msgspec.json.encode(schema).decode()
