"""The parsers by the names that vLLM and SGLang give them, and which one a chat template needs."""

from __future__ import annotations

from collections.abc import Sequence

from aserve.parsers.base import (
    OutputParser,
    ReasoningFamily,
    StreamParser,
    ToolFamily,
    parse_answer,
)
from aserve.parsers.events import Content, Malformed, ParsedEvent, Reasoning, ToolSpec, joined
from aserve.parsers.families.tagged import ASERVE_TINY, HERMES
from aserve.parsers.reader import Reader

THINK = ReasoningFamily(("<think>",), ("</think>",))
REASONING_PARSERS: dict[str, ReasoningFamily] = {
    "deepseek_r1": ReasoningFamily(("<think>",), ("</think>",), is_implied=True),
    "qwen3": THINK,
    "aserve_tiny": ReasoningFamily(("<|think|>",), ("<|/think|>",)),
}
TOOL_PARSERS: dict[str, ToolFamily] = {
    "hermes": HERMES,
    "qwen25": HERMES,
    "aserve_tiny": ASERVE_TINY,
}
# The names of the parsers for a template that contains all of the texts; the first row that fits.
TOOLS_OF_TEMPLATES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|/tool_call|>",), "aserve_tiny"),
    (("<tool_call>",), "hermes"),
)
REASONING_OF_TEMPLATES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|/tool_call|>",), "aserve_tiny"),
    (("<think>",), "qwen3"),
)


def make_parser(
    reasoning: str | None,
    tools: str | None,
    *,
    tool_specs: Sequence[ToolSpec] = (),
    starts_in_reasoning: bool = False,
) -> OutputParser:
    """Makes the parser of one answer. None leaves reasoning or calls in the content.
    `starts_in_reasoning` is what `opens_reasoning` says of the prompt.
    """
    reader = Reader()
    parsing = parse_answer(
        reader,
        None if reasoning is None else REASONING_PARSERS[reasoning],
        None if tools is None else TOOL_PARSERS[tools],
        tool_specs=tool_specs,
        starts_in_reasoning=starts_in_reasoning,
    )
    return StreamParser(reader, parsing)


def families_of(chat_template: str) -> tuple[str | None, str | None]:
    """Returns the names of the reasoning parser and of the tool parser for a template's models."""
    return (
        _first_row(chat_template, REASONING_OF_TEMPLATES),
        _first_row(chat_template, TOOLS_OF_TEMPLATES),
    )


def opens_reasoning(prompt_tail: str, reasoning: str | None) -> bool:
    """Returns whether an answer begins with reasoning whose tag is not part of the answer.
    `prompt_tail` is the end of the prompt's text.
    """
    if reasoning is None:
        return False
    family = REASONING_PARSERS[reasoning]
    tail = prompt_tail.rstrip()
    return tail.endswith(family.opens) or (family.is_implied and not tail.endswith(family.closes))


def kept_tokens(reasoning: str | None, tools: str | None) -> frozenset[str]:
    """Returns the special tokens that the detokenizer must not drop from the parsers' text."""
    kept: set[str] = set()
    if reasoning is not None:
        kept.update(REASONING_PARSERS[reasoning].markers)
    if tools is not None:
        kept.update(TOOL_PARSERS[tools].markers)
    return frozenset(kept)


def parse_function_call(text: str, tools: str, tool_specs: Sequence[ToolSpec]) -> list[ParsedEvent]:
    """Parses a whole text without reasoning."""
    parser = make_parser(None, tools, tool_specs=tool_specs)
    return joined([*parser.push(text), *parser.finish()])


def separate_reasoning(
    text: str, reasoning: str, *, starts_in_reasoning: bool = False
) -> tuple[str, str]:
    """Splits a whole text, and returns its reasoning and its content."""
    parser = make_parser(reasoning, None, starts_in_reasoning=starts_in_reasoning)
    events = [*parser.push(text), *parser.finish()]
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    return thought, "".join(e.text for e in events if isinstance(e, Content | Malformed))


def _first_row(template: str, rows: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    return next((name for texts, name in rows if all(text in template for text in texts)), None)
