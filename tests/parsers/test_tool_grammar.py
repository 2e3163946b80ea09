"""What the grammars of calls allow: random outputs under their masks are read as calls of the right
tools, and whatever is read so is allowed.
"""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest
import xgrammar

from aserve.grammar.compile import Compiler, Done, Failed, Vocabulary
from aserve.messages.base import num_mask_words
from aserve.messages.requests import Grammar
from aserve.parsers.events import ToolSpec
from aserve.parsers.registry import TOOL_PARSERS, make_parser
from aserve.parsers.tool_grammar import answer_grammar, calls_or_answer_grammar, tool_grammar
from tests.grammar.languages import conforms
from tests.parsers.family_transcripts import FAMILIES
from tests.parsers.tagged_transcripts import TAGGED
from tests.parsers.transcripts import Story, story_of

END = 0
# One token for each character, and end tokens.
CHARS = sorted({*map(chr, range(32, 127)), "\n", "é", "\uff5c", "\u2581"})
VOCABULARY = Vocabulary((b"", *(char.encode() for char in CHARS)), len(CHARS) + 1, (END,))
WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"$ref": "#/$defs/Unit"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Unit": {"enum": ["C", "F"]}},
    },
    strict=True,
)
TIME = ToolSpec(
    "get_time",
    {
        "type": "object",
        "properties": {"zone": {"type": "string", "maxLength": 4}, "exact": {"type": "boolean"}},
        "additionalProperties": False,
    },
    strict=True,
)
TOOLS = (WEATHER, TIME)
SCHEMAS = {spec.name: spec.parameters or {} for spec in TOOLS}
XML = ("glm45", "qwen3_coder")
FAMILY = pytest.mark.parametrize("tools", TOOL_PARSERS)


@functools.cache
def compiler() -> Compiler:
    return Compiler(VOCABULARY)


@functools.cache
def compiled(grammar: Grammar) -> xgrammar.CompiledGrammar:
    result = compiler().try_out(grammar)
    assert isinstance(result, Done), result
    return compiler().compile(grammar)


def required(tools: str, choice: str = "required", *, parallel: bool = True) -> Grammar:
    grammar = tool_grammar(tools, TOOLS, choice, parallel=parallel)
    assert grammar is not None
    return grammar


def walk(grammar: Grammar, seed: int, prefix: str = "", max_chars: int = 1500) -> str:
    """A random output. Each step takes a token that the mask allows, often one that leads to an
    end.
    """
    chance = random.Random(seed)
    matcher = xgrammar.GrammarMatcher(compiled(grammar))
    assert matcher.accept_string(prefix)
    mask = np.zeros((1, num_mask_words(VOCABULARY.vocab_size)), np.int32)
    text = prefix
    for _ in range(max_chars):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: VOCABULARY.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        closing = [i for i in allowed if i == END or CHARS[i - 1] in '"<,}]']
        token = chance.choice(closing if closing and chance.random() < 0.5 else allowed)
        matcher.accept_token(token)
        if token == END:
            return text
        text += CHARS[token - 1]
    raise AssertionError(f"no end: {text}")


def is_allowed(grammar: Grammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled(grammar))
    return matcher.accept_string(text) and matcher.is_completed()


def read(
    tools: str | None, text: str, reasoning: str | None = None, *, inside: bool = False
) -> Story:
    parser = make_parser(reasoning, tools, tool_specs=TOOLS, starts_in_reasoning=inside)
    return story_of([*parser.push(text), *parser.finish()])


def assert_calls(story: Story, *, is_xml: bool = False) -> None:
    for kind, name, arguments, *_ in story:
        assert kind == "call"
        values = json.loads(arguments)
        if is_xml:  # whitespace around a text does not count for its length
            values = {key: v.strip() if isinstance(v, str) else v for key, v in values.items()}
        assert conforms(values, {"type": "object", **SCHEMAS[name]}), arguments


@FAMILY
def test_an_output_under_the_masks_is_calls_of_the_tools(tools: str) -> None:
    stories = [read(tools, walk(required(tools), seed)) for seed in range(12)]
    for story in stories:
        assert_calls(story, is_xml=tools in XML)
    assert {call[1] for story in stories for call in story} == {"get_weather", "get_time"}
    assert TOOL_PARSERS[tools].syntax.is_last or max(map(len, stories)) > 1


@FAMILY
def test_a_named_call_and_one_without_parallel_ones_are_alone(tools: str) -> None:
    for seed in range(4):
        for grammar in (required(tools, "get_time"), required(tools, parallel=False)):
            story = read(tools, walk(grammar, seed))
            assert_calls(story, is_xml=tools in XML)
            assert len(story) == 1
        assert read(tools, walk(required(tools, "get_time"), seed))[0][1] == "get_time"


@FAMILY
def test_free_text_and_other_tools_are_no_required_calls(tools: str) -> None:
    call = walk(required(tools, "get_time"), 0)
    assert is_allowed(required(tools), call)
    for text in ("", "Hello", f"a{call}", f"{call}a", call.replace("get_time", "get_tim")):
        assert not is_allowed(required(tools), text), text
    assert not is_allowed(required(tools, "get_weather"), call)


@FAMILY
def test_a_free_answer_has_calls_of_the_tools_only_where_it_has_calls(tools: str) -> None:
    grammar = tool_grammar(tools, TOOLS, "auto")
    assert grammar is not None
    assert is_allowed(grammar, "Hello, 1 < 2.")
    call = walk(required(tools, "get_weather"), 1)
    assert is_allowed(grammar, call)
    assert is_allowed(grammar, f"Look: {call}")
    assert not is_allowed(grammar, call.replace("get_weather", "get_weathe"))
    assert not is_allowed(grammar, call.replace("city", "town"))


@FAMILY
def test_a_free_answer_without_strict_tools_needs_no_grammar(tools: str) -> None:
    assert tool_grammar(tools, (ToolSpec("f"),), "auto") is None
    mixed = tool_grammar(tools, (ToolSpec("get_time"), WEATHER), "auto")
    assert mixed is not None
    assert is_allowed(mixed, walk(required(tools, "get_time"), 0))


THINKING = [
    ("hermes", "qwen3", "<think>\nHm.\n</think>\n\n", "Hm.\n</think>\n\n"),
    ("aserve_tiny", "aserve_tiny", "<|think|>Hm.<|/think|>", "Hm.<|/think|>"),
    (
        "gpt_oss",
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        "Hm.<|end|><|start|>assistant",
    ),
]


@pytest.mark.parametrize(("tools", "reasoning", "thought", "inside"), THINKING)
def test_reasoning_may_come_before_a_required_call(
    tools: str, reasoning: str, thought: str, inside: str
) -> None:
    grammar = tool_grammar(tools, TOOLS, "required", reasoning=reasoning)
    assert grammar is not None
    story = read(tools, walk(grammar, 1, prefix=thought), reasoning)
    assert story[0][0] == "think"
    assert_calls(story[1:])
    begun = tool_grammar(tools, TOOLS, "required", reasoning=reasoning, starts_in_reasoning=True)
    assert begun is not None
    call = walk(required(tools), 1)
    assert is_allowed(grammar, call)
    assert is_allowed(begun, inside + call)
    assert not is_allowed(begun, call)


@pytest.mark.parametrize(("tools", "reasoning", "thought", "inside"), THINKING)
@pytest.mark.parametrize(
    ("grammar", "fits", "differs"),
    [
        (Grammar("json_schema", '{"type": "integer"}'), "5", "a"),
        (Grammar("json_object"), "{}", "[]"),
        (Grammar("regex", "a+"), "aa", "b"),
        (Grammar("ebnf", 'root ::= "a" root?'), "aa", "b"),
        (Grammar("choice", '["a\\"", "b"]'), 'a"', "c"),
        (
            Grammar("structural_tag", '{"format": {"type": "const_string", "value": "a"}}'),
            "a",
            "b",
        ),
    ],
    ids=lambda item: item.kind if isinstance(item, Grammar) else "",
)
def test_the_content_behind_reasoning_matches_the_grammar(
    tools: str, reasoning: str, thought: str, inside: str, grammar: Grammar, fits: str, differs: str
) -> None:
    header = "<|channel|>final<|message|>" if reasoning == "gpt_oss" else ""
    free = answer_grammar(grammar, reasoning, starts_in_reasoning=False)
    begun = answer_grammar(grammar, reasoning, starts_in_reasoning=True)
    assert is_allowed(free, f"{thought}{header}{fits}")
    assert is_allowed(free, f"{header}{fits}")
    assert is_allowed(begun, f"{inside}{header}{fits}")
    assert not is_allowed(free, f"{thought}{header}{differs}")
    assert not is_allowed(begun, f"{header}{fits}")
    assert read(None, f"{thought}{header}{fits}", reasoning) == [("think", "Hm."), ("say", fits)]


@FAMILY
def test_an_answer_is_calls_or_content_of_its_own_grammar(tools: str) -> None:
    """The calls are those that a grammar of required calls allows."""
    schema = Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}')
    either = calls_or_answer_grammar(schema, tools, TOOLS)
    for seed in range(3):
        assert is_allowed(either, walk(required(tools), seed))
    assert is_allowed(either, '{"a": 1}')
    assert not is_allowed(either, '{"a": "x"}')
    assert not is_allowed(either, "hello")
    behind = calls_or_answer_grammar(
        schema, tools, TOOLS, reasoning="qwen3", starts_in_reasoning=True
    )
    assert is_allowed(behind, 'Hm.</think>{"a": 1}')
    assert not is_allowed(behind, '{"a": 1}')


def test_the_recorded_calls_in_the_form_of_a_family_are_allowed() -> None:
    """The forms that the models of a family were seen to write, so that a mask does not push them
    into another one.
    """
    names = {
        "hermes: one call",
        "hermes: parallel",
        "llama3_json: one call",
        "mistral: a list",
        "pythonic: two calls",
        "qwen3_coder: one call",
        "glm45: one call",
        "kimi_k2: one call",
        "gpt_oss: a call without end token",
    }
    rows = {f"{row.tools}: {row.name}": row for row in (*TAGGED, *FAMILIES)}
    for name in names:
        row = rows[name]
        assert row.tools is not None
        reasoning = "gpt_oss" if row.tools == "gpt_oss" else None
        grammar = tool_grammar(row.tools, row.specs, "required", reasoning=reasoning)
        assert grammar is not None
        text = row.text.removesuffix("\n").replace('"Rome", ', '"Rome", ')
        assert is_allowed(grammar, text), name


@FAMILY
def test_arguments_are_an_object_although_the_schema_does_not_say_so(tools: str) -> None:
    spec = ToolSpec(
        "get_time", {"properties": {"exact": {"type": "boolean"}}, "required": ["exact"]}
    )
    grammar = tool_grammar(tools, (spec,), "required", parallel=False)
    assert grammar is not None
    for seed in range(3):
        [(kind, _, arguments, *_)] = read(tools, walk(grammar, seed))
        assert kind == "call"
        assert isinstance(json.loads(arguments)["exact"], bool)


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_a_schema_beyond_the_compiler_is_refused_only_for_a_strict_tool() -> None:
    for tools in ("hermes", "pythonic"):
        loose = tool_grammar(tools, (ToolSpec("f", UNIQUE),), "required")
        strict = tool_grammar(tools, (ToolSpec("f", UNIQUE, strict=True),), "required")
        assert loose is not None
        assert strict is not None
        assert isinstance(compiler().try_out(loose), Done)
        refused = compiler().try_out(strict)
        assert isinstance(refused, Failed)
        assert "uniqueItems is not supported" in refused.message


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"a": 5, "b": None, "c": True}},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"type": [1, None]}}},
        {"properties": {"a": {"enum": 5, "anyOf": {}, "oneOf": "x"}}},
        {"properties": {"a": {"enum": [[], {}, None, 1.5]}}},
        {"properties": {"a": {"$ref": 5}}, "$defs": []},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"properties": {"a": {}}, "required": 5},
    ],
)
@FAMILY
def test_a_schema_may_be_any_json(tools: str, schema: dict[str, object]) -> None:
    """A wrong one is an error of the compiler, for the client, and nothing else."""
    for strict in (False, True):
        spec = ToolSpec("f", schema, strict=strict)
        for choice in ("auto", "required"):
            tool_grammar(tools, (spec,), choice)
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    if tools == "qwen3_coder":
        text = "<function=f><parameter=a>1</parameter></function>"
    parser = make_parser(None, tools, tool_specs=(ToolSpec("f", schema),))
    events = parser.push(text) + parser.finish()
    assert tools not in XML or story_of(events) in (
        [("call", "f", '{"a": 1}')],
        [("call", "f", '{"a": "1"}')],
    )
