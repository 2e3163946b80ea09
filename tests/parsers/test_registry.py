"""The choice of parsers, and what they do with whole texts and with long ones."""

from __future__ import annotations

import time

import pytest

from aserve.parsers.events import Content, ToolArguments, ToolCallStart
from aserve.parsers.registry import (
    REASONING_PARSERS,
    TEMPLATES,
    TOOL_PARSERS,
    families_of,
    kept_tokens,
    make_parser,
    opens_reasoning,
    parse_function_call,
    parser_name,
    separate_reasoning,
)
from aserve.tiny import MODEL_DIR
from tests.parsers.transcripts import TOOLS


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        ("{{ messages }}", None, None),
        ('<tool_call>\n{"name": <function-name>', None, "hermes"),
        ("{{- '<think>\\n' }} ... <tool_call>", "qwen3", "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<think>", "qwen3", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{k}</arg_key> <think></think>", "glm45", "glm45"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c> <think>", "deepseek_v3", "deepseek_v31"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c> ```json <think>", "deepseek_r1", "deepseek_v3"),
        ("<|tool_calls_section_begin|>", None, "kimi_k2"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "gpt_oss", "gpt_oss"),
        ("[TOOL_CALLS] [ARGS] [THINK]", "mistral", "mistral_v11"),
        ("[TOOL_CALLS] [", None, "mistral"),
        ("<|start_header_id|> {\"name\": function name, \"parameters\": ...}", None, "llama3_json"),
        ("[func_name1(params_name1=params_value1)", None, "pythonic"),
        ("<think>", "qwen3", None),
    ],
)  # fmt: skip
def test_a_template_says_which_parsers_its_models_need(
    template: str, reasoning: str | None, tools: str | None
) -> None:
    assert families_of(template) == (reasoning, tools)


def test_the_bundled_model_has_its_own_parsers() -> None:
    template = (MODEL_DIR / "chat_template.jinja").read_text()
    assert families_of(template) == ("aserve_tiny", "aserve_tiny")


def test_templates_name_parsers_that_there_are() -> None:
    assert {row[1] for row in TEMPLATES} <= {None, *REASONING_PARSERS}
    assert {row[2] for row in TEMPLATES} <= {None, *TOOL_PARSERS}


@pytest.mark.parametrize(
    ("given", "name"),
    [("deepseek-r1", "deepseek_r1"), ("qwen25", "hermes"), ("gpt-oss", "gpt_oss"), ("x", "x")],
)
def test_names_of_other_servers_are_known(given: str, name: str) -> None:
    assert parser_name(given) == name


@pytest.mark.parametrize(
    ("tail", "reasoning", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", "qwen3", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3", False),
        ("<|im_start|>assistant\n", "qwen3", False),
        ("Write <think>!<|im_end|>\n<|im_start|>assistant\n", "qwen3", False),
        ("<Assistant>", "deepseek-r1", True),
        ("<Assistant></think>", "deepseek_r1", False),
        ("<think>", None, False),
    ],
)
def test_the_end_of_a_prompt_says_whether_reasoning_is_open(
    tail: str, reasoning: str | None, is_open: bool
) -> None:
    assert opens_reasoning(tail, reasoning) is is_open


def test_the_tokens_of_both_parsers_stay_in_the_text() -> None:
    assert kept_tokens("mistral", "mistral") == {
        *("[THINK]", "[/THINK]"),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    }
    assert "<|channel|>" in kept_tokens("gpt_oss", None)
    assert kept_tokens(None, None) == frozenset()


def test_whole_texts_are_parsed_by_the_same_machines() -> None:
    assert parse_function_call("a [get_time()]", "pythonic", TOOLS) == [
        Content("a"),
        ToolCallStart(0, "get_time"),
        ToolArguments(0, "{}"),
    ]
    assert separate_reasoning("Hm.</think>\n\n4", "qwen3", starts_in_reasoning=True) == ("Hm.", "4")


LONG = {
    "hermes": ("<tool_call>", '<tool_call>{"name": "f", "arguments": "' + "\\n" * 9, "<tool_call"),
    "llama3_json": ("{", '{"name": ', "   {"),
    "pythonic": ("[", "[get_time(a='" + "\\n" * 9, "[get_time(a=[1, ", "[get_time()]"),
    "qwen3_coder": ("<tool_call><function=f><parameter=a>", "\n</parameter>", "<function="),
    "gpt_oss": ("<|start|>", "<|channel|>final<|message|>", "<|call|>"),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS][{", "[TOOL_CALLS]f[ARGS]{"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>f"),
}


@pytest.mark.parametrize("tools", LONG)
def test_the_time_for_a_text_is_proportional_to_its_length(tools: str) -> None:
    for unit in LONG[tools]:
        short, long = unit * (2_500 // len(unit)), unit * (20_000 // len(unit))
        took_s = [min(seconds(tools, text) for _ in range(2)) for text in (short, long)]
        assert took_s[1] < 24 * took_s[0] + 0.05, (unit, took_s)  # 64 times if it were quadratic


def seconds(tools: str, text: str) -> float:
    began_s = time.process_time()
    parser = make_parser(None, tools, tool_specs=TOOLS)
    parser.push(text)
    parser.finish()
    return time.process_time() - began_s
