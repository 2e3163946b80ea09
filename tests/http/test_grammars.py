"""What a client may ask of the form of its output, and what is refused before any work."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aserve.errors import InvalidRequest
from aserve.http.openai.grammars import format_grammar, grammar_of
from aserve.http.openai.schema import GenerationBody
from aserve.messages.requests import Grammar
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, complete

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{},"a":{"type":"integer"}}}'


def asked(**body: Any) -> Grammar | None:
    return grammar_of(msgspec.json.decode(msgspec.json.encode(body), type=GenerationBody))


SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


TAG = '{"type":"structural_tag","format":{"a":1}}'
LEGACY_TAG = (
    '{"type":"structural_tag","format":{"type":"triggered_tags","triggers":["<f"],"tags":'
    '[{"type":"tag","begin":"<f>","content":{"type":"json_schema","json_schema":'
    f'{SCHEMA_TEXT},"style":"json"}},"end":"</f>"}}]}}}}'
)


@pytest.mark.parametrize(
    ("name", "value", "kind", "source"),
    [
        ("response_format", {"type": "json_object"}, "json_object", ""),
        ("response_format", SCHEMA_FORMAT, "json_schema", SCHEMA_TEXT),
        ("response_format", {"type": "structural_tag", "format": {"a": 1}}, "structural_tag", TAG),
        (
            "response_format",
            {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
                "triggers": ["<f"],
            },
            "structural_tag",
            LEGACY_TAG,
        ),
        ("structural_tag", {"type": "structural_tag", "format": {"a": 1}}, "structural_tag", TAG),
        ("structural_tag", "{ }", "structural_tag", "{ }"),
        ("json", SCHEMA, "json_schema", SCHEMA_TEXT),
        ("json", '{"a": 1 }', "json_schema", '{"a": 1 }'),
        ("regex", "a+", "regex", "a+"),
        ("choice", ['a"', "한"], "choice", '["a\\"","한"]'),
        ("grammar", 'root ::= "a"', "ebnf", 'root ::= "a"'),
        ("json_object", True, "json_object", ""),
    ],
)
def test_each_output_format_is_a_grammar_that_names_its_field(
    name: str, value: object, kind: Any, source: str
) -> None:
    if name == "response_format":
        assert asked(response_format=value) == Grammar(kind, source, param=name)
    else:
        outputs = {name: value, "disable_any_whitespace": False}
        grammar = asked(structured_outputs=outputs, response_format={"type": "text"})
        assert grammar == Grammar(kind, source, param=f"structured_outputs.{name}")


@pytest.mark.parametrize(
    ("name", "value", "kind", "source"),
    [
        ("guided_json", SCHEMA, "json_schema", SCHEMA_TEXT),
        ("guided_regex", "a+", "regex", "a+"),
        ("guided_choice", ["a"], "choice", '["a"]'),
        ("guided_grammar", 'root ::= "a"', "ebnf", 'root ::= "a"'),
        ("guided_json_object", True, "json_object", ""),
        ("regex", "a+", "regex", "a+"),
        ("ebnf", 'root ::= "a"', "ebnf", 'root ::= "a"'),
        ("grammar", 'root ::= "a"', "ebnf", 'root ::= "a"'),
        ("json_schema", '{"a": 1 }', "json_schema", '{"a": 1 }'),
    ],
)
def test_other_names_of_a_constraint_mean_the_same(
    name: str, value: object, kind: Any, source: str
) -> None:
    assert asked(**{name: value}) == Grammar(kind, source, param=name)


def test_a_text_format_needs_no_grammar() -> None:
    assert asked() is None
    assert asked(response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"structured_outputs": {}}, "exactly one of", "structured_outputs"),
        *(
            (
                {"structured_outputs": {"regex": "a", name: value}},
                "would change the output",
                f"structured_outputs.{name}",
            )
            for name, value in (
                ("whitespace_pattern", " ?"),
                ("disable_any_whitespace", True),
                ("disable_additional_properties", True),
            )
        ),
        (
            {"structured_outputs": {"regex": "a", "json_object": True}},
            "regex and json_object",
            "structured_outputs",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "Send only one of them",
            "structured_outputs",
        ),
        ({"response_format": {"type": "xml"}}, "Supported values are text", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "schema", "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "needs a format", "response_format"),
    ],
)
def test_conflicting_or_invalid_grammars_are_refused(
    body: dict[str, Any], words: str, param: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        asked(**body)
    assert caught.value.param == param


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("depth", [65, 20_000])
def test_a_schema_that_is_nested_too_deep_is_refused_with_the_limit(depth: int) -> None:
    with pytest.raises(InvalidRequest, match="more than 64 levels") as caught:
        format_grammar("json_schema", nested(depth), param="text.format")
    assert (caught.value.param, caught.value.error_code) == ("text.format", "schema_too_deep")
    grammar = format_grammar("json_schema", nested(64), param="text.format")
    assert grammar is not None
    assert grammar.source.count("{") == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regex", "a\ud800"),
        ("grammar", 'root ::= "\udfff"'),
        ("choice", ["fine", "\ud83d"]),
        ("json", '{"const": "\ud800"}'),
        ("json", {"const": "\ud800"}),
        ("json", {"\ud800": {}}),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(name: str, value: Any) -> None:
    """Also as the embedded engine gets it, which no decoder has looked at."""
    with pytest.raises(InvalidRequest, match="surrogate pair") as caught:
        grammar_of(msgspec.convert({"structured_outputs": {name: value}}, GenerationBody))
    assert caught.value.param == f"structured_outputs.{name}"


async def test_a_lone_surrogate_in_a_regex_is_a_400_over_http(echo: EchoEngine) -> None:
    body = '{"prompt":"a","structured_outputs":{"regex":"\\ud800"}}'
    answer = await ask(echo, "/v1/completions", body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


async def test_both_endpoints_pass_the_grammar_on_to_the_engine(echo: EchoEngine) -> None:
    response_format: Any = SCHEMA_FORMAT
    messages: Any = [{"role": "user", "content": "a"}]
    await echo.client.chat.completions.create(
        model="echo", messages=messages, response_format=response_format
    )
    await complete(echo, "a", extra_body={"structured_outputs": {"regex": "a+"}})
    assert [request.sampling.grammar for request in echo.scheduler.admitted] == [
        Grammar("json_schema", SCHEMA_TEXT, param="response_format"),
        Grammar("regex", "a+", param="structured_outputs.regex"),
    ]
