"""The grammars of tool calls: what `tool_choice` demands, in the syntax of a family of models.

They are structural tags of xgrammar, so that the arguments of each call match the schema of its
tool, and reasoning before a call or an answer stays free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from aserve.grammar.schema import without_ignored
from aserve.messages.requests import Grammar
from aserve.parsers.base import CallSyntax, ReasoningFamily
from aserve.parsers.events import JsonSchema, ToolSpec
from aserve.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, parser_name
from aserve.parsers.structural_tag import (
    Format,
    any_text,
    one_of,
    optional,
    regex_format,
    repeated,
    schema_format,
    sequence,
    tag_format,
    tags_format,
    text_format,
    triggered_format,
)

ANY_ARGUMENTS: JsonSchema = {"type": "object"}
ANY_VALUE: JsonSchema = {}
KEYWORD = re.compile(r"[A-Za-z_]\w*")
ANY_KEYWORD = sequence(regex_format(r"[A-Za-z_]\w{0,63}="), schema_format(ANY_VALUE))
ANY_KEYWORDS = optional(sequence(ANY_KEYWORD, repeated(sequence(text_format(", "), ANY_KEYWORD))))


def tool_grammar(
    tools: str,
    tool_specs: Sequence[ToolSpec],
    choice: str,
    *,
    parallel: bool = True,
    reasoning: str | None = None,
    starts_in_reasoning: bool = False,
) -> Grammar | None:
    """Returns the grammar of an answer. `choice` is auto, required or the name of a tool.

    With auto the answer is free, and where a call begins it matches; a tool that is not strict
    takes any object. None means that nothing is constrained: no tool is strict. Required and named
    calls stand alone, behind reasoning if there is a parser of it. Keywords of a schema that the
    compiler does not know are refused for a strict tool, and left out for another one.
    """
    syntax = TOOL_PARSERS[parser_name(tools)].syntax
    is_single = not parallel or syntax.is_last
    if choice == "auto":
        if not any(spec.strict for spec in tool_specs):
            return None
        answer = _triggered(syntax, tool_specs, is_single=is_single)
    else:
        named = [spec for spec in tool_specs if choice in ("required", spec.name)]
        is_single = is_single or choice != "required"
        answer = _section(syntax, [_call(syntax, spec) for spec in named], is_single=is_single)
    if reasoning is not None:
        answer = _with_reasoning(answer, reasoning, is_inside=starts_in_reasoning)
    return _grammar(answer, "tool_choice")


def answer_grammar(grammar: Grammar, reasoning: str, *, starts_in_reasoning: bool) -> Grammar:
    """Returns the grammar of an answer whose content matches `grammar` and whose reasoning, before
    it, is free.
    """
    content = _content_of(grammar, reasoning)
    answer = _with_reasoning(content, reasoning, is_inside=starts_in_reasoning)
    return _grammar(answer, grammar.param)


def calls_or_answer_grammar(
    grammar: Grammar,
    tools: str,
    tool_specs: Sequence[ToolSpec],
    *,
    parallel: bool = True,
    reasoning: str | None = None,
    starts_in_reasoning: bool = False,
) -> Grammar:
    """Returns the grammar of an answer that is either tool calls or content that matches `grammar`,
    behind reasoning if there is a parser of it.
    """
    syntax = TOOL_PARSERS[parser_name(tools)].syntax
    calls = [_call(syntax, spec) for spec in tool_specs]
    section = _section(syntax, calls, is_single=not parallel or syntax.is_last)
    answer = one_of([section, _content_of(grammar, reasoning)])
    if reasoning is not None:
        answer = _with_reasoning(answer, reasoning, is_inside=starts_in_reasoning)
    return _grammar(answer, grammar.param)


def _content_of(grammar: Grammar, reasoning: str | None) -> Format:
    """Returns the format of content, behind the header that some families write before it."""
    content = _format_of(grammar)
    header = "" if reasoning is None else REASONING_PARSERS[parser_name(reasoning)].before_content
    return sequence(text_format(header), content) if header else content


def _with_reasoning(answer: Format, reasoning: str, *, is_inside: bool) -> Format:
    family = REASONING_PARSERS[parser_name(reasoning)]
    then = text_format(family.before_call) if family.before_call else None
    return _behind_reasoning(family, answer, then=then, is_inside=is_inside)


def _grammar(answer: Format, param: str) -> Grammar:
    tag = {"type": "structural_tag", "format": answer}
    return Grammar("structural_tag", msgspec.json.encode(tag).decode(), param=param)


def _triggered(syntax: CallSyntax, specs: Sequence[ToolSpec], *, is_single: bool) -> Format:
    strict = [spec if spec.strict else ToolSpec(spec.name) for spec in specs]
    tags = [_call(syntax, spec) for spec in strict]
    if syntax.section[0]:
        tags = [_section(syntax, tags, is_single=is_single)]
    return triggered_format(tags, trigger=syntax.trigger, is_single=is_single)


def _section(syntax: CallSyntax, calls: Sequence[Format], *, is_single: bool) -> Format:
    begin, end = syntax.section
    inner = tags_format(calls, separator=syntax.separator, is_single=is_single)
    return tag_format(begin, inner, end) if begin else inner


def _call(syntax: CallSyntax, spec: ToolSpec) -> Format:
    schema = ANY_ARGUMENTS | (spec.parameters or {})
    schema = schema if spec.strict else without_ignored(schema)
    name = json.dumps(spec.name)[1:-1]
    if syntax.style == "python":
        content = ANY_KEYWORDS if spec.parameters is None else _keywords(schema)
    else:
        content = schema_format(schema, style=syntax.style)
    if syntax.behind_number:
        number = (regex_format(r"\d{1,3}"), text_format(syntax.behind_number))
        content = sequence(*number, content)
    return tag_format(syntax.begin.replace("{name}", name), content, syntax.end)


def _keywords(schema: JsonSchema) -> Format:
    """Returns the format of keyword arguments: those that are required, then any of the others."""
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    required = required if isinstance(required, list) else []
    names = [name for name in properties if KEYWORD.fullmatch(name)]
    first = [_keyword(name, schema) for name in names if name in required]
    others = [_keyword(name, schema) for name in names if name not in required]
    if first:
        return sequence(first[0], *map(_behind_comma, first[1:]), *_rest(others))
    rows = [sequence(item, *_rest(others[place + 1 :])) for place, item in enumerate(others)]
    return optional(one_of(rows)) if rows else text_format("")


def _keyword(name: str, schema: JsonSchema) -> Format:
    definitions = {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
    value = schema["properties"][name]
    value = definitions | value if isinstance(value, dict) else ANY_VALUE
    return sequence(text_format(f"{name}="), schema_format(value))


def _behind_comma(item: Format) -> Format:
    return sequence(text_format(", "), item)


def _rest(others: Sequence[Format]) -> list[Format]:
    return [optional(_behind_comma(item)) for item in others]


def _behind_reasoning(
    family: ReasoningFamily, answer: Format, *, then: Format | None, is_inside: bool
) -> Format:
    """Returns the format of an answer behind its reasoning, which `is_inside` of it begins in."""
    begin = "" if is_inside else family.opens[0]
    thought = tag_format(begin, any_text(), family.closes[0])
    space = regex_format(r"\n{0,2}") if then is None else then
    thought = sequence(thought, space)
    return sequence(thought if is_inside else optional(thought), answer)


def _format_of(grammar: Grammar) -> Format:
    match grammar.kind:
        case "json_schema":
            return schema_format(json.loads(grammar.source))
        case "json_object":
            return schema_format(ANY_ARGUMENTS)
        case "regex":
            return regex_format(grammar.source)
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.source}
        case "choice":
            return one_of([text_format(text) for text in json.loads(grammar.source)])
        case "structural_tag":
            content: Format = json.loads(grammar.source)["format"]
            return content
