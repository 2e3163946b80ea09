"""Every wrong body gets OpenAI's error shape, with the code and the field; nothing is a 5xx."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from aserve.errors import AserveError, ErrorInfo
from aserve.http.body import MAX_SHOWN, parse_body
from aserve.http.openai.call import Call, Origin
from aserve.http.openai.chat import chat_dialect
from aserve.http.openai.completions import completion_call
from aserve.http.openai.schema import ChatBody, CompletionBody
from aserve.http.responses.body import ResponseBody
from aserve.http.responses.call import ResponseCall, response_call
from tests.fakes.echo_engine import EchoEngine
from tests.fakes.history import FakeHistory
from tests.http.asking import ask
from tests.http.body_fields import BODIES, PATHS, Place, alternatives, places, right_body

ORIGIN = Origin("id", 0, ("echo",))
RIGHT_BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "responses": {"input": "a"},
}


def asked(path: str, data: bytes) -> Call | ResponseCall:
    if path == "responses":
        return response_call(parse_body(data, ResponseBody), ORIGIN, FakeHistory())
    if path == "completions":
        return completion_call(parse_body(data, CompletionBody), ORIGIN)
    return chat_dialect(parse_body(data, ChatBody), ORIGIN).call


def refusal_of(path: str, data: bytes) -> ErrorInfo | None:
    """What a client is told; None for a body that makes a call."""
    try:
        asked(path, data)
    except AserveError as error:
        return error.info()
    return None


# Each is put into a right body; a field that must be there is taken out by None. test_limits.py has
# the other bounds of lists and texts.
COMPLETION_ERRORS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": None}, "missing_required_parameter", "prompt"),
    ({"prompt": []}, "empty_array", "prompt"),
    ({"prompt": ["a", 1]}, "invalid_type", "prompt"),
    ({"prompt": ["a", [1]]}, "invalid_type", "prompt"),
    ({"prompt": [[1], ["a"]]}, "invalid_type", "prompt[1][0]"),
    ({"prompt": ["a"] * 5, "n": 128}, "too_many_sequences", "n"),
    ({"model": "gpt"}, "model_not_found", "model"),
    ({"n": 0}, "integer_below_min_value", "n"),
    ({"n": 129}, "integer_above_max_value", "n"),
    ({"temperature": 2.1}, "decimal_above_max_value", "temperature"),
    ({"temperature": -0.1}, "decimal_below_min_value", "temperature"),
    ({"top_p": 1.1}, "decimal_above_max_value", "top_p"),
    ({"max_tokens": -1}, "integer_below_min_value", "max_tokens"),
    ({"max_tokens": 2**31}, "integer_above_max_value", "max_tokens"),
    ({"seed": 2**63}, "integer_above_max_value", "seed"),
    ({"timeout": 0}, "decimal_below_min_value", "timeout"),
    ({"logprobs": 21}, "integer_above_max_value", "logprobs"),
    ({"logit_bias": {"5": 101}}, "decimal_above_max_value", "logit_bias.5"),
    ({"logit_bias": {"x": 1}}, "invalid_type", "logit_bias"),
    ({"stop": ["a"] * 5}, "array_above_max_length", "stop"),
    ({"stop": ["a", ""]}, "string_below_min_length", "stop"),
    ({"stop": "x" * 2000}, "string_above_max_length", "stop"),
    ({"stream_options": {}}, "invalid_value", "stream_options"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "integer_above_max_value", "prompt_logprobs"),
    ({"suffix": "b"}, "unsupported_value", "suffix"),
    ({"best_of": 2, "n": 3}, "integer_below_min_value", "best_of"),
    ({"best_of": 129}, "integer_above_max_value", "best_of"),
    ({"best_of": 2, "stream": True}, "invalid_value", "best_of"),
    ({"prompt": ["a"] * 5, "best_of": 128}, "too_many_sequences", "n"),
    ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "integer_below_min_value", "truncate_prompt_tokens"),
    ({"allowed_token_ids": []}, "empty_array", "allowed_token_ids"),
    ({"rid": "x" * 129}, "string_above_max_length", "rid"),
    ({"truncation_side": "middle"}, "invalid_type", "truncation_side"),
    ({"guided_json": {}, "guided_regex": "a"}, "invalid_value", "guided_json"),
]


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CHAT_ERRORS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "empty_array", "messages"),
    ({"messages": [{"content": "a"}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "king", "content": "a"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
    ({"logprobs": 2}, "invalid_type", "logprobs"),
    ({"tools": []}, "empty_array", "tools"),
    ({"tools": [{}]}, "missing_required_parameter", "tools[0].type"),
    (
        {"tools": [{"type": "custom", "function": {"name": "f"}}]},
        "unsupported_value",
        "tools[0].type",
    ),
    ({"tools": [tool("f g")]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [tool("f"), tool("f")]}, "invalid_value", "tools[1].function.name"),
    (
        {"tools": [tool("f", {"type": "array"})]},
        "invalid_function_parameters",
        "tools[0].function.parameters",
    ),
    ({"tools": [tool("f", 5)]}, "invalid_type", "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tools": [tool("f")], "tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
    ({"tools": [tool("f")], "tool_choice": tool("g")}, "invalid_value", "tool_choice"),
    (
        {"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}},
        "invalid_value",
        "tool_choice",
    ),
    ({"tools": [tool("f")], "functions": [{"name": "f"}]}, "invalid_value", "functions"),
    ({"functions": [{"name": ""}]}, "invalid_value", "functions[0].function.name"),
    ({"functions": [{"name": "f"}], "function_call": "all"}, "invalid_value", "function_call"),
    ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "invalid_value",
        "continue_final_message",
    ),
    ({"max_thinking_tokens": 5}, "unsupported_value", "thinking_token_budget"),
    ({"thinking_budget": 5, "reasoning_budget": 6}, "invalid_value", "thinking_budget"),
    ({"reasoning": {"max_tokens": -2}}, "integer_below_min_value", "reasoning.max_tokens"),
    ({"reasoning_effort": "huge"}, "invalid_type", "reasoning_effort"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
]
FILE = {"type": "input_file", "file_id": "file-1"}
COMPUTER = {"type": "computer_call_output", "call_id": "c", "output": "sunny"}
FUNCTION = {"type": "function", "name": "f"}
RESPONSE_ERRORS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": None}, "missing_required_parameter", "input"),
    ({"input": []}, "empty_array", "input"),
    ({"input": [{"content": "a"}]}, "missing_required_parameter", "input[0].role"),
    ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
    ({"input": [{"role": "king", "content": "a"}]}, "invalid_type", "input[0].role"),
    ({"input": [COMPUTER]}, "unsupported_value", "input[0].type"),
    (
        {"input": [{"type": "function_call_output", "output": "a"}]},
        "missing_required_parameter",
        "input[0].call_id",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
        "missing_required_parameter",
        "input[0].name",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, FILE]}]},
        "unsupported_content_type",
        "input[0].content[1]",
    ),
    ({"max_output_tokens": 0}, "integer_below_min_value", "max_output_tokens"),
    ({"max_tokens": 5}, "unsupported_parameter", "max_tokens"),
    ({"top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
    ({"include": ["all"]}, "invalid_type", "include[0]"),
    ({"background": True, "store": False}, "unsupported_parameter", "background"),
    (
        {"conversation": "conv_1", "previous_response_id": "resp_1"},
        "mutually_exclusive_parameters",
        "conversation",
    ),
    ({"tools": [{"type": "web_search"}]}, "unsupported_value", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
        "invalid_value",
        "tool_choice",
    ),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "mcp"}},
        "unsupported_parameter",
        "tool_choice",
    ),
    ({"truncation": "middle"}, "invalid_type", "truncation"),
    ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        "missing_required_parameter",
        "text.format",
    ),
    (
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        "missing_required_parameter",
        "text.format.name",
    ),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "invalid_value",
        "structured_outputs",
    ),
    ({"response_format": {"type": "text"}}, "unsupported_parameter", "response_format"),
    ({"return_token_ids": True}, "unsupported_parameter", "return_token_ids"),
    ({"metadata": {"a": 1}}, "invalid_type", "metadata[...]"),
    ({"metadata": {"k" * 65: "v"}}, "string_above_max_length", "metadata"),
]
TABLE = [
    (path, *row)
    for path, rows in zip(
        RIGHT_BODIES, (COMPLETION_ERRORS, CHAT_ERRORS, RESPONSE_ERRORS), strict=True
    )
    for row in rows
]


@pytest.mark.parametrize(("path", "body", "code", "param"), TABLE)
def test_a_wrong_body_is_refused_with_its_code_and_field(
    path: str, body: dict[str, Any], code: str, param: str | None
) -> None:
    info = refusal_of(path, msgspec.json.encode(RIGHT_BODIES[path] | body))
    assert info is not None
    assert (info.code, info.param) == (code, param)
    assert info.status == (404 if code == "model_not_found" else 400)
    assert info.type == "invalid_request_error"


@pytest.mark.parametrize("path", PATHS)
async def test_a_wrong_type_at_any_place_of_any_body_is_a_400_that_names_it(
    echo: EchoEngine, path: str
) -> None:
    """Generated from the types, so that a new field or a new route is in it by itself."""
    for place in places(BODIES[path]):
        for value in place.wrong_values():
            data = json.dumps(place.wrap(value))
            answer = await ask(echo, path, data)
            assert (answer.status, answer.error["code"]) == (400, "invalid_type"), data[:200]
            assert answer.error["param"] == place.path, data[:200]


def is_numeric(place: Place) -> bool:
    kinds = alternatives(place.kind)
    return any(isinstance(each, inspect.IntType | inspect.FloatType) for each in kinds)


HUGE = [10**400, -(10**400), 2**63, -(2**63) - 1, 1e308, -1e308]


@pytest.mark.parametrize("path", PATHS)
async def test_a_huge_number_at_any_place_is_a_400_that_names_its_field(
    echo: EchoEngine, path: str
) -> None:
    for place in filter(is_numeric, places(BODIES[path])):
        for number in HUGE:
            data = json.dumps(right_body(path) | place.wrap(number))
            answer = await ask(echo, path, data)
            assert answer.status == 400, data[:200]
            param = answer.error["param"]
            assert place.path.startswith(param.partition(".")[0]), (param, data[:200])


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted({name for body in BODIES.values() for name in body.__struct_encode_fields__})
ANY_BODY = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6) | JSON


@given(st.sampled_from(["completions", "chat", "responses"]), ANY_BODY)
def test_any_json_is_a_call_or_a_refusal_of_bounded_size(path: str, body: Any) -> None:
    info = refusal_of(path, msgspec.json.encode(body))
    if info is not None:
        assert 400 <= info.status < 500
        assert len(info.message) < 3 * MAX_SHOWN


@given(st.binary(max_size=30))
def test_any_bytes_are_a_call_or_a_refusal(data: bytes) -> None:
    info = refusal_of("completions", data)
    assert info is None or info.status == 400


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b'{"prompt": "a", "top_p": NaN}', "byte 25"),
        (b'{"prompt": "a", "top_p": Infinity}', "byte 25"),
        (b'{"prompt": "a",}', "byte 15"),
        (b'{"prompt": "a"', "byte 14"),
        (b'{"prompt": "\xff"}', "byte 1"),
        (b'{"prompt": "\\ud800"}', "byte"),
        (b'{"messages": ' + b"[" * 100_000, "nested too deeply"),
        (b"", "byte 0"),
    ],
)
def test_malformed_json_is_a_400_that_says_where(data: bytes, place: str) -> None:
    info = refusal_of("completions", data)
    assert info is not None
    assert info.code == "invalid_json"
    assert place in info.message
