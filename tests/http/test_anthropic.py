"""POST /v1/messages: blocks, streamed and whole, tools, thinking, and Anthropic's errors."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from aserve.errors import StepError
from aserve.http.anthropic.body import MessagesBody, messages_of, plan_of
from aserve.http.body import parse_body
from aserve.parsers.registry import ParserNames
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, told

PARSERS = ParserNames("qwen3", "hermes")
# The engine answers with its prompt, which here is the last message.
TEMPLATE = "{{ messages[-1].content }}"
TOOLS = [{"name": "f", "description": "adds", "input_schema": {"type": "object"}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
async def echo() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(template=TEMPLATE, parsers=PARSERS) as engine:
        yield engine


def body_of(text: str, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 400, "messages": [{"role": "user", "content": text}], **fields}


async def message_of(echo: EchoEngine, text: str, **fields: Any) -> Any:
    return await told(echo, "/v1/messages", body_of(text, **fields))


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is the type of its data."""
    events = []
    for event in filter(None, text.split("\n\n")):
        name, data = event.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        events.append(fields)
    return events


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client has at the end of a stream, as Anthropic's SDK adds it up."""
    first, *middle, delta, last = [event for event in events if event["type"] != "ping"]
    assert (first["type"], delta["type"], last["type"]) == (
        *("message_start", "message_delta", "message_stop"),
    )
    message: dict[str, Any] = first["message"]
    partial = ""
    is_open = False
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                is_open, partial = True, ""
            case "content_block_delta":
                assert is_open
                block, change = message["content"][event["index"]], event["delta"]
                if change["type"] == "input_json_delta":
                    partial += change["partial_json"]
                    continue
                name = change["type"].removesuffix("_delta")
                block[name] += change[name]
            case "content_block_stop":
                if partial:
                    message["content"][event["index"]]["input"] = json.loads(partial)
                is_open = False
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


async def test_a_message_has_a_block_for_each_part_in_order(echo: EchoEngine) -> None:
    text = f"<think>so</think>hi{CALL}"
    message = await message_of(echo, text, tools=TOOLS, thinking=THINKING, model="parrot")
    thinking, words, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "so", "signature": ""}
    assert words == {"type": "text", "text": "hi"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})
    assert message["stop_reason"] == "tool_use"
    assert (message["type"], message["role"], message["model"]) == (
        "message",
        "assistant",
        "parrot",
    )
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] == 3
    count = await told(echo, "/v1/messages/count_tokens", body_of(text, tools=TOOLS))
    assert usage["input_tokens"] + 3 == count["input_tokens"]


async def test_reasoning_is_shown_only_to_clients_that_ask_for_it(echo: EchoEngine) -> None:
    message = await message_of(echo, "<think>so</think>hi")
    assert message["content"] == [{"type": "text", "text": "hi"}]


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        ("hi", {}, "end_turn", None),
        ("hi there", {"max_tokens": 2}, "max_tokens", None),
        ("hi there", {"stop_sequences": ["the"]}, "stop_sequence", "the"),
        (CALL, {"tools": TOOLS}, "tool_use", None),
        (CALL, {}, "end_turn", None),
    ],
)
async def test_the_stop_reason_says_why_the_message_ended(
    echo: EchoEngine, text: str, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    message = await message_of(echo, text, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("max_tokens", [400, 20])
async def test_a_stream_adds_up_to_the_whole_message_wherever_it_is_cut(
    echo: EchoEngine, max_tokens: int
) -> None:
    """Every two cuts are tried. With 20 tokens the output ends within the call."""
    text = f"<think>so</think>née{CALL}"
    fields: dict[str, Any] = {"tools": TOOLS, "thinking": THINKING, "max_tokens": max_tokens}
    whole = await message_of(echo, text, **fields)
    num_tokens = min(len(echo.tokenizer.encode(text, with_special=False)) + 1, max_tokens)
    for first, second in itertools.combinations(range(1, num_tokens, 2), 2):
        echo.scheduler.runs = (first, second - first, num_tokens - second)
        answer = await ask(echo, "/v1/messages", body_of(text, stream=True, **fields))
        message = accumulated(events_of(answer.text))
        for found in (message, whole):
            found["id"] = ""
            for block in found["content"]:
                block.pop("id", None)
        assert message == whole, (first, second)


CONVERTED: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (
        {"system": "be kind", "messages": [{"role": "user", "content": "hi"}]},
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
    ),
    (
        {
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        },
        [{"role": "system", "content": "a"}, {"role": "user", "content": "hi"}],
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "so", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "I ask"},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                        {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "5"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "t2",
                            "content": [{"type": "text", "text": "6"}],
                            "is_error": True,
                        },
                        {"type": "text", "text": "and "},
                        {"type": "text", "text": "now?"},
                    ],
                },
            ]
        },
        [
            {
                "role": "assistant",
                "content": "I ask",
                "reasoning_content": "so",
                "tool_calls": [
                    {
                        "function": {"name": "f", "arguments": {"a": 1}},
                        "id": "t1",
                        "type": "function",
                    },
                    {"function": {"name": "f", "arguments": {}}, "id": "t2", "type": "function"},
                ],
            },
            {"role": "tool", "content": "5", "tool_call_id": "t1"},
            {"role": "tool", "content": "6", "tool_call_id": "t2"},
            {"role": "user", "content": "and now?"},
        ],
    ),
]


@pytest.mark.parametrize(("given", "expected"), CONVERTED)
def test_blocks_become_the_messages_that_templates_know(
    given: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    body = parse_body(msgspec.json.encode({"max_tokens": 1} | given), MessagesBody)
    assert msgspec.to_builtins(messages_of(body)) == expected


@pytest.mark.parametrize(
    ("choice", "mode"),
    [(None, "auto"), ({"type": "auto"}, "auto"), ({"type": "none"}, "none")],
)
def test_tools_are_given_to_the_template_in_its_form(
    choice: dict[str, Any] | None, mode: str
) -> None:
    given = body_of("a", tools=TOOLS, tool_choice=choice)
    plan = plan_of(parse_body(msgspec.json.encode(given), MessagesBody), PARSERS)
    function = {"name": "f", "description": "adds", "parameters": {"type": "object"}}
    tools = None if mode == "none" else [{"type": "function", "function": function}]
    assert (plan.prompt.tools and json.loads(plan.prompt.tools)) == tools


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_a_call_that_must_come_is_constrained_by_a_grammar(choice: dict[str, Any]) -> None:
    given = body_of("a", tools=TOOLS, tool_choice=choice)
    plan = plan_of(parse_body(msgspec.json.encode(given), MessagesBody), PARSERS)
    assert plan.grammar is not None
    assert plan.grammar.kind == "structural_tag"


async def test_the_assistants_last_message_is_continued(echo: EchoEngine) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    message = await told(echo, "/v1/messages", {"max_tokens": 50, "messages": messages})
    assert message["content"] == [{"type": "text", "text": "I am"}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [IMAGE]},
        {"messages": [{"role": "assistant", "content": [IMAGE]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
    ],
)
async def test_a_picture_that_is_not_the_users_is_refused_in_words(
    echo: EchoEngine, fields: dict[str, Any]
) -> None:
    answer = await ask(echo, "/v1/messages", body_of("a") | fields)
    assert answer.status == 400
    assert answer.error["message"] == "Pictures can only be in messages of the user."


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "claude"}, 404, "not_found_error", "model"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            *(400, "invalid_request_error", "messages[0].content[0]"),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            *(400, "invalid_request_error", "messages[0].content[0].source"),
        ),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        (
            {"tools": [{"name": "web_search", "type": "web_search_20250305"}]},
            *(400, "invalid_request_error", "tools[0]"),
        ),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
        (
            {"output_config": {"format": {"type": "xml"}}},
            *(400, "invalid_request_error", "output_config.format.type"),
        ),
    ],
)
async def test_an_error_has_anthropics_envelope(
    echo: EchoEngine, fields: dict[str, Any], status: int, kind: str, param: str
) -> None:
    answer = await ask(echo, "/v1/messages", body_of("a") | fields)
    assert answer.status == status, answer.text
    assert answer.json["type"] == "error"
    assert (answer.json["error"]["type"], answer.json["error"]["param"]) == (kind, param)


async def test_keys_and_phases_are_refused_in_the_same_envelope() -> None:
    async with EchoEngine(template=TEMPLATE, api_key="sesame") as echo:
        for headers, kind in (
            ({}, "authentication_error"),
            ({"X-Api-Key": "x"}, "authentication_error"),
        ):
            answer = await ask(echo, "/v1/messages", body_of("a"), headers=headers)
            assert (answer.status, answer.json["error"]["type"]) == (401, kind)
        headers = {"X-Api-Key": "sesame", "anthropic-version": "2023-06-01"}
        assert (await ask(echo, "/v1/messages", body_of("a"), headers=headers)).status == 200
        echo.state.phase = "draining"
        answer = await ask(echo, "/v1/messages", body_of("a"), headers=headers)
        assert (answer.status, answer.json["error"]["type"]) == (503, "overloaded_error")


async def test_a_silent_stream_is_pinged_and_a_failing_one_ends_with_an_error() -> None:
    async with EchoEngine(template=TEMPLATE, keep_alive_s=0.01) as echo:
        echo.scheduler.is_paused = True
        async with echo.web.post("/v1/messages", json=body_of("hi", stream=True)) as answer:
            assert (await answer.content.readline()) == b"event: ping\n"
            await echo.until(lambda: bool(echo.scheduler.live))
            echo.scheduler.step()
            await asyncio.sleep(0)
            echo.scheduler.fail(StepError("the step failed").info())
            *_, last = events_of("event: ping\n" + (await answer.text()))
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "the step failed" in last["error"]["message"]
