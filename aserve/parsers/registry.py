"""The parsers by the names that vLLM and SGLang give them, and which one a chat template needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aserve.parsers.base import (
    OutputParser,
    ReasoningFamily,
    StreamParser,
    ToolFamily,
    parse_answer,
)
from aserve.parsers.events import Content, Malformed, ParsedEvent, Reasoning, ToolSpec, joined
from aserve.parsers.families.harmony import GPT_OSS, HARMONY
from aserve.parsers.families.llama import LLAMA3
from aserve.parsers.families.mistral import MISTRAL, MISTRAL_V11
from aserve.parsers.families.pythonic import PYTHONIC
from aserve.parsers.families.sectioned import DEEPSEEK_TOKENS, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from aserve.parsers.families.tagged import ASERVE_TINY, HERMES
from aserve.parsers.families.xml import GLM45, QWEN3_CODER
from aserve.parsers.reader import Reader

THINK = ReasoningFamily(("<think>",), ("</think>",))
IMPLIED = ReasoningFamily(("<think>",), ("</think>",), is_implied=True)
ENDED_BY_CALLS = ReasoningFamily(("<think>",), ("</think>",), ends_at_calls=True)
GRANITE = ReasoningFamily(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
REASONING_PARSERS: dict[str, ReasoningFamily] = {
    "aserve_tiny": ReasoningFamily(("<|think|>",), ("<|/think|>",)),
    "deepseek_r1": IMPLIED,
    "deepseek_v3": THINK,
    "glm45": ENDED_BY_CALLS,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "kimi": ReasoningFamily(("◁think▷",), ("◁/think▷",)),
    "kimi_k2": ENDED_BY_CALLS,
    "mistral": ReasoningFamily(("[THINK]",), ("[/THINK]",)),
    "qwen3": THINK,
    "qwen3_thinking": IMPLIED,
}
TOOL_PARSERS: dict[str, ToolFamily] = {
    "aserve_tiny": ASERVE_TINY,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "glm45": GLM45,
    "gpt_oss": HARMONY,
    "hermes": HERMES,
    "kimi_k2": KIMI_K2,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
}
# Other names that vLLM and SGLang give to the same parsers, with `_` for `-`.
ALIASES = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "glm": "glm45",
    "glm47": "glm45",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "openai": "gpt_oss",
    "openai_gptoss": "gpt_oss",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
}
# Which parsers a template's models need: the first row of which it contains all texts. The parts of
# a row are the texts, the reasoning parser and the tool parser.
TEMPLATES: tuple[tuple[tuple[str, ...], str | None, str | None], ...] = (
    (("<|/tool_call|>",), "aserve_tiny", "aserve_tiny"),
    (("<|channel|>", "<|message|>"), "gpt_oss", "gpt_oss"),
    (("<|tool_calls_section_begin|>", "<think>"), "kimi_k2", "kimi_k2"),
    (("<|tool_calls_section_begin|>",), None, "kimi_k2"),
    ((DEEPSEEK_TOKENS.begin, "```json", "<think>"), "deepseek_r1", "deepseek_v3"),
    ((DEEPSEEK_TOKENS.begin, "```json"), None, "deepseek_v3"),
    ((DEEPSEEK_TOKENS.begin,), "deepseek_v3", "deepseek_v31"),
    (("<arg_key>", "<think>"), "glm45", "glm45"),
    (("<arg_key>",), None, "glm45"),
    (("<function=", "<think>"), "qwen3", "qwen3_coder"),
    (("<function=",), None, "qwen3_coder"),
    (("[TOOL_CALLS]", "[ARGS]", "[THINK]"), "mistral", "mistral_v11"),
    (("[TOOL_CALLS]", "[ARGS]"), None, "mistral_v11"),
    (("[TOOL_CALLS]",), None, "mistral"),
    (("<tool_call>", "<think>"), "qwen3", "hermes"),
    (("<tool_call>",), None, "hermes"),
    (("<|python_start|>",), None, "pythonic"),
    (("[func_name1(",), None, "pythonic"),
    (("<|python_tag|>",), None, "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), None, "llama3_json"),
    (("◁think▷",), "kimi", None),
    (("Here is my thought process:",), "granite", None),
    (("<think>",), "qwen3", None),
)


def _no_prompt(_: Mapping[str, Any]) -> str:
    return ""


class ParserNames(NamedTuple):
    """The parsers of a server's outputs. None leaves reasoning or calls in the content.
    `prompt_end` returns the end of a prompt that is rendered with some variables of the template.
    """

    reasoning: str | None = None
    tools: str | None = None
    prompt_end: Callable[[Mapping[str, Any]], str] = _no_prompt


NO_PARSERS = ParserNames()


def parser_name(given: str) -> str:
    """Returns the name in REASONING_PARSERS or TOOL_PARSERS for a name that a user gives."""
    name = given.replace("-", "_")
    return ALIASES.get(name, name)


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
    thinking = None if reasoning is None else REASONING_PARSERS[parser_name(reasoning)]
    calling = None if tools is None else TOOL_PARSERS[parser_name(tools)]
    if calling is None and thinking is not None:
        calling = thinking.parsed_by
    if calling is not None and calling.has_reasoning:
        thinking = None
    reader = Reader()
    parsing = parse_answer(
        reader,
        thinking,
        calling,
        tool_specs=tool_specs,
        starts_in_reasoning=starts_in_reasoning,
    )
    return StreamParser(reader, parsing)


def families_of(chat_template: str) -> tuple[str | None, str | None]:
    """Returns the names of the reasoning parser and of the tool parser for a template's models."""
    for texts, reasoning, tools in TEMPLATES:
        if all(text in chat_template for text in texts):
            return reasoning, tools
    return None, None


def opens_reasoning(prompt_tail: str, reasoning: str | None) -> bool:
    """Returns whether an answer begins with reasoning whose tag is not part of the answer.
    `prompt_tail` is the end of the prompt's text.
    """
    if reasoning is None:
        return False
    family = REASONING_PARSERS[parser_name(reasoning)]
    tail = prompt_tail.rstrip()
    return tail.endswith(family.opens) or (family.is_implied and not tail.endswith(family.closes))


def reasoning_tags(reasoning: str, tools: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the texts that begin reasoning and those that end it."""
    family = REASONING_PARSERS[parser_name(reasoning)]
    calling = TOOL_PARSERS.get(parser_name(tools)) if tools is not None else None
    calls = calling.begins if calling is not None and family.ends_at_calls else ()
    return family.opens, family.closes + calls


def kept_tokens(reasoning: str | None, tools: str | None) -> frozenset[str]:
    """Returns the special tokens that the detokenizer must not drop from the parsers' text."""
    kept: set[str] = set()
    if reasoning is not None:
        kept.update(REASONING_PARSERS[parser_name(reasoning)].markers)
    if tools is not None:
        kept.update(TOOL_PARSERS[parser_name(tools)].markers)
    return frozenset(kept)


def every_marker() -> frozenset[str]:
    """Returns the special tokens that some parser reads."""
    of_reasoning = (kept_tokens(name, None) for name in REASONING_PARSERS)
    of_calls = (kept_tokens(None, name) for name in TOOL_PARSERS)
    return frozenset[str]().union(*of_reasoning, *of_calls)


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
