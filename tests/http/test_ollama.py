"""Ollama's API: lines of JSON, options, tools, thinking, and what its clients ask about models."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from aserve.errors import StepError
from aserve.messages.requests import Grammar
from aserve.parsers.registry import ParserNames
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, prompts, told

PARSERS = ParserNames("qwen3", "hermes")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
FUNCTION = {"function": {"index": 0, "name": "f", "arguments": {"a": 1}}}
TIMES = ("created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture
async def echo() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(template=TEMPLATE, parsers=PARSERS) as engine:
        yield engine


def chat_of(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "stream": False, **fields}


async def lines_of(echo: EchoEngine, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await ask(echo, path, body)
    assert answer.status == 200, answer.text
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_chat_has_its_thinking_calls_counts_and_durations(echo: EchoEngine) -> None:
    text = f"<think>so</think>hi{CALL}"
    answer = await told(echo, "/api/chat", chat_of(text, tools=TOOLS, model="echo:latest"))
    assert answer["message"] == {
        "role": "assistant",
        "content": "hi",
        "thinking": "so",
        "tool_calls": [FUNCTION],
    }
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("echo", True, "stop")
    num_tokens = len(echo.tokenizer.encode(text, with_special=False))
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (num_tokens, num_tokens + 1)
    assert all(isinstance(answer[name], int) for name in TIMES[1:])
    assert answer["total_duration"] >= answer["eval_duration"] > 0
    assert answer["created_at"].endswith("Z")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_stream_adds_up_to_the_whole_answer_wherever_it_is_cut(
    echo: EchoEngine, path: str
) -> None:
    """Without `stream` the answer is a stream."""
    text = f"<think>s</think>é{CALL if path == '/api/chat' else ''}"
    body = chat_of(text, tools=TOOLS) if path == "/api/chat" else {"prompt": text, "stream": False}
    whole = await told(echo, path, body)
    del body["stream"]
    num_tokens = len(echo.tokenizer.encode(text, with_special=False)) + 1
    for first, second in itertools.combinations(range(1, num_tokens, 2), 2):
        echo.scheduler.runs = (first, second - first, num_tokens - second)
        lines = await lines_of(echo, path, body)
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        parts = [line["message"] if path == "/api/chat" else line for line in lines]
        expected = whole["message"] if path == "/api/chat" else whole
        for name in ("content", "response", "thinking"):
            joined = "".join(part.get(name, "") for part in parts)
            assert joined == expected.get(name, ""), (name, first, second)
        calls = [call for part in parts for call in part.get("tool_calls", [])]
        assert calls == expected.get("tool_calls", [])
        counts = ("prompt_eval_count", "eval_count", "done_reason")
        assert [lines[-1][name] for name in counts] == [whole[name] for name in counts]


async def test_raw_prompts_and_systems_reach_the_engine(echo: EchoEngine) -> None:
    body = {"prompt": "b", "system": "a", "stream": False}
    assert (await told(echo, "/api/generate", body))["response"] == "ab"
    assert (await told(echo, "/api/generate", body | {"raw": True}))["response"] == "b"
    assert prompts(echo) == ["ab", "b"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_request_without_a_prompt_says_that_the_model_is_loaded(
    echo: EchoEngine, path: str
) -> None:
    answer = await told(echo, path, {"model": "echo", "keep_alive": -1})
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert not echo.scheduler.admitted


@pytest.mark.parametrize(("think", "thinking"), [(None, "so"), (True, "so"), (False, None)])
async def test_thinking_is_shown_unless_it_is_switched_off(
    echo: EchoEngine, think: bool | None, thinking: str | None
) -> None:
    answer = await told(echo, "/api/chat", chat_of("<think>so</think>hi", think=think))
    assert (answer["message"]["content"], answer["message"].get("thinking")) == ("hi", thinking)


MAPPED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {
            "options": {
                "num_predict": 7,
                "temperature": 0.5,
                "top_k": 3,
                "top_p": 0.25,
                "min_p": 0.5,
                "seed": 9,
                "stop": ["x"],
                "repeat_penalty": 1.5,
                "presence_penalty": 1.0,
                "frequency_penalty": 0.5,
                "num_ctx": 4096,
            }
        },
        {
            "max_tokens": 7,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.25,
            "min_p": 0.5,
            "seed": 9,
            "stop": ("x",),
            "repetition_penalty": 1.5,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
        },
    ),
    ({"options": {"num_predict": -1}}, {"max_tokens": 511}),
    ({"format": "json"}, {"grammar": Grammar("json_object", param="format")}),
    (
        {"format": {"type": "object"}},
        {"grammar": Grammar("json_schema", '{"type":"object"}', "format")},
    ),
    ({"format": ""}, {"grammar": None}),
]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize(("fields", "expected"), MAPPED)
async def test_each_option_reaches_the_engine(
    echo: EchoEngine, path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    await told(echo, path, chat_of("a") | {"prompt": "a"} | fields)
    await told(echo, path, chat_of("a") | {"prompt": "a", "raw": True} | fields)
    for request in echo.scheduler.admitted:
        given = msgspec.structs.asdict(request.sampling)
        assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/api/chat", {"model": "other"}, 404, "model"),
        ("/api/show", {"model": "other:latest"}, 404, "model"),
        ("/api/chat", {"format": "xml"}, 400, "format"),
        ("/api/chat", {"options": {"mirostat": 1}}, 400, "options.mirostat"),
        ("/api/chat", {"options": {"temperature": 3}}, 400, "options.temperature"),
        ("/api/chat", {"options": {"num_predict": -5}}, 400, "options.num_predict"),
        ("/api/chat", {"messages": [], "options": {"temperature": 3}}, 400, "options.temperature"),
        ("/api/generate", {"options": {"temperature": 3}}, 400, "options.temperature"),
        ("/api/chat", {"logprobs": True}, 400, "logprobs"),
        ("/api/chat", {"tools": [{"type": "function"}]}, 400, "tools[0].function"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": ["x"]}]},
            *(400, "messages[0].images"),
        ),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "context"),
    ],
)
async def test_an_error_is_a_text_with_its_code_and_field(
    echo: EchoEngine, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = await ask(echo, path, (chat_of("a") if path == "/api/chat" else {}) | fields)
    assert (answer.status, answer.json["param"]) == (status, param), answer.text
    assert isinstance(answer.json["error"], str)


async def test_a_failing_stream_ends_with_a_line_that_has_the_error(echo: EchoEngine) -> None:
    echo.scheduler.is_paused = True
    body = chat_of("hi there") | {"stream": True}
    asked = asyncio.ensure_future(echo.web.post("/api/chat", json=body))
    await echo.until(lambda: bool(echo.scheduler.live))
    echo.scheduler.step()
    async with await asked as answer:
        echo.scheduler.fail(StepError("the step failed").info())
        *_, last = (await answer.text()).splitlines()
    assert "the step failed" in json.loads(last)["error"]


async def test_history_with_calls_and_results_is_rendered() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.name or '' }};{% endfor %}"
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_name": "f"},
    ]
    async with EchoEngine(template=template) as echo:
        await told(echo, "/api/chat", {"messages": messages, "stream": False})
        assert prompts(echo) == ["assistant:;tool:5f;"]


async def test_models_are_listed_with_a_tag_and_described(echo: EchoEngine) -> None:
    for path in ("/api/tags", "/api/ps"):
        models = (await ask(echo, path)).json["models"]
        assert [model["name"] for model in models] == ["echo:latest", "parrot:latest"]
    shown = await told(echo, "/api/show", {"model": "echo:latest"})
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["aserve.context_length"] == 512
    assert set((await ask(echo, "/api/version")).json) == {"version"}


async def test_texts_are_embedded_in_their_order(echo: EchoEngine) -> None:
    body = {"model": "echo:latest", "input": ["!b", "a"], "dimensions": 2}
    answer = await told(echo, "/api/embed", body)
    assert answer["embeddings"] == [pytest.approx([-0.6, -0.8]), pytest.approx([0.6, 0.8])]
    assert answer["prompt_eval_count"] == 3
