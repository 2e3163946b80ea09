"""Which texts a compiled grammar lets pass, and what is refused with a reason."""

from __future__ import annotations

import functools
import json

import pytest
import xgrammar

from aserve.grammar.compile import Compiler, Done, Failed, Vocabulary
from aserve.messages.requests import Grammar
from tests.grammar.libraries import vocabulary


@functools.cache
def compiler() -> Compiler:
    return Compiler(vocabulary())


def accepts(grammar: Grammar, text: str) -> bool:
    result = compiler().try_out(grammar)
    assert isinstance(result, Done), result
    matcher = xgrammar.GrammarMatcher(compiler().compile(grammar))
    return matcher.accept_string(text) and matcher.is_completed()


def reason(grammar: Grammar) -> str:
    result = compiler().try_out(grammar)
    assert isinstance(result, Failed), "it compiled"
    assert result.code == "invalid_grammar"
    return result.message


@pytest.mark.parametrize("choice", ['a"b', "x\ny\t\\n", "한국😀", "", "ab|c", "root ::= a", "\x00"])
def test_a_choice_is_taken_letter_by_letter(choice: str) -> None:
    grammar = Grammar("choice", json.dumps([choice, "other"]))
    assert accepts(grammar, choice)
    assert accepts(grammar, "other")
    assert not accepts(grammar, f"{choice}!")


ANY_OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}
ONE_TAG = {"type": "tag", "begin": "<f>", "content": ANY_OBJECT, "end": "</f>"}
ONE_FIELD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        (Grammar("json_object"), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{"]),
        (
            Grammar("json_schema", json.dumps(ONE_FIELD)),
            ['{"a": -3}', '{\n "a": 3\n}'],
            ["{}", '{"a": "3"}', '{"a": 3, "b": 4}'],
        ),
        # JSON never goes on with blanks for ever.
        (Grammar("json_object"), ['{"a":  1}'], ['{"a":   1}']),
        (Grammar("json_schema", '{"items": {"type": "integer"}}'), ["[  1]"], ["[   1]"]),
        (Grammar("regex", r"\d{2}-[a-f]+"), ["12-beef"], ["12-beef ", " 12-beef"]),
        (Grammar("regex", "^a|bc$"), ["bc"], ["bc "]),
        (
            Grammar("structural_tag", json.dumps({"format": ONE_TAG})),
            ["<f>{}</f>", '<f>{"a":  1}</f>'],
            ["<f>[]</f>", '<f>{"a":   1}</f>', "<f>{}", "a<f>{}</f>"],
        ),
        (Grammar("ebnf", 'root ::= pair+\npair ::= "a" pair? "b"'), ["aabbab"], ["aab"]),
    ],
)
def test_a_grammar_takes_its_texts_and_no_others(
    grammar: Grammar, taken: list[str], refused: list[str]
) -> None:
    assert [text for text in (*taken, *refused) if accepts(grammar, text)] == taken


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("regex", "(("), "parenthesis is not closed"),
        (Grammar("regex", r"\bword"), "not supported"),
        (Grammar("ebnf", "root ::= missing"), '"missing" is not defined'),
        (Grammar("ebnf", "root ::= root"), "no text of this model's tokens"),
        (Grammar("json_schema", '{"type":'), "not valid JSON"),
        (Grammar("json_schema", "[]"), "a JSON object"),
        (Grammar("json_schema", '{"type": "text"}'), 'Unsupported type "text"'),
        (Grammar("json_schema", '{"uniqueItems": true}'), "#/uniqueItems is not supported"),
        (Grammar("choice", "[]"), "empty"),
        (Grammar("structural_tag", "<f>"), "structural tag is not valid JSON"),
        (Grammar("structural_tag", '["a"]'), "a structural tag is a JSON object"),
        (Grammar("structural_tag", '{"format": {"type": "page"}}'), "page"),
        (
            Grammar("structural_tag", json.dumps({"format": ONE_TAG}).replace("object", "text")),
            "Unsupported type",
        ),
        (
            Grammar(
                "structural_tag",
                json.dumps({"format": ONE_TAG}).replace('{"type": "object"}', '{"not": {}}'),
            ),
            "#/not is not supported",
        ),
        (Grammar("choice", "[1]"), "not a list of texts"),
    ],
)
def test_a_source_that_makes_no_sense_is_refused_with_the_reason(
    grammar: Grammar, words: str
) -> None:
    message = reason(grammar)
    assert words in message
    assert ".cc:" not in message, "the compiler's own source is nobody's business"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 3},
        {"allOf": [{"type": "integer"}, {"minimum": 3}]},
        {"type": "string", "pattern": "a+", "minLength": 2},
        {"$ref": "http://elsewhere/schema"},
    ],
)
def test_what_the_compiler_warns_that_it_ignores_is_refused(schema: dict[str, object]) -> None:
    assert reason(Grammar("json_schema", json.dumps(schema)))


def test_a_language_that_the_vocabulary_cannot_spell_is_refused() -> None:
    letters = Vocabulary((b"a", b"b", b""), vocab_size=3, end_ids=(2,))
    result = Compiler(letters).try_out(Grammar("regex", "c"))
    assert isinstance(result, Failed)
    assert "no text of this model's tokens" in result.message


@pytest.mark.parametrize(
    ("grammar", "is_slow"),
    [
        (Grammar("json_object"), False),
        (Grammar("regex", "[a-z]{1,40}"), False),
        (Grammar("ebnf", "root ::= s\ns ::= s s | [a-z ]"), True),
        (Grammar("regex", "(.?){60}a{60}"), True),
    ],
)
def test_a_grammar_whose_masks_take_long_is_known_before_its_first_mask(
    grammar: Grammar, is_slow: bool
) -> None:
    assert compiler().try_out(grammar) == Done(is_slow)
