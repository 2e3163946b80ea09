"""Checks of tool calls and of outputs that follow a schema or a grammar."""

from __future__ import annotations

import json
import re
from typing import Any

from aserve.selftest.target import Json, Missing, Target, expect, streamed_text, text_of

SCHEMA: Json = {
    "type": "object",
    "properties": {"name": {"enum": ["Sam", "Mia"]}, "age": {"enum": [5, 6]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "child", "schema": SCHEMA}}
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Json = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
NAMED: Json = {"type": "function", "function": {"name": "get_time"}}
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]
UNICODE = "한국어 🦊🦊 naïve Ωμέγα"


def _arguments_of(call: Json) -> Json:
    try:
        found = json.loads(call["function"]["arguments"])
    except ValueError:
        found = None
    expect(isinstance(found, dict), call)
    assert isinstance(found, dict)
    return found


def _check_call(call: Json) -> None:
    expect(call["function"]["name"] == "get_weather" and call.get("id"), call)
    expect(_arguments_of(call).get("city") in ("Oslo", "Rome"), call)


async def calls_a_required_tool(server: Target) -> str:
    body = server.chat_body(messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=80)
    [choice] = (await server.post("/v1/chat/completions", body)).json["choices"]
    calls = choice["message"].get("tool_calls") or []
    expect(calls, choice)
    _check_call(calls[0])
    expect(choice["finish_reason"] in ("tool_calls", "stop"), choice["finish_reason"])
    return str(calls[0]["function"]["arguments"])


async def calls_a_named_tool(server: Target) -> str:
    answer = await server.chat(tools=[WEATHER, CLOCK], tool_choice=NAMED, max_tokens=80)
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    expect(calls and calls[0]["function"]["name"] == "get_time", answer["choices"][0])
    return "get_time"


async def calls_no_tool_if_told_so(server: Target) -> str:
    message = (await server.chat(tools=[WEATHER], tool_choice="none"))["choices"][0]["message"]
    expect(not message.get("tool_calls"), message)
    return "no call"


async def may_call_a_tool(server: Target) -> str:
    [choice] = (await server.chat(messages=ASK, tools=[WEATHER], max_tokens=80))["choices"]
    calls = choice["message"].get("tool_calls") or []
    for call in calls:
        _arguments_of(call)
    expect(calls or choice["message"].get("content") is not None, choice)
    return "a call" if calls else "text: the model decides"


async def streams_a_tool_call(server: Target) -> str:
    events = await server.chat_events(
        messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=80
    )
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    parts = [part for delta in deltas for part in delta.get("tool_calls") or []]
    parts = [part for part in parts if part["index"] == 0]
    expect(parts and parts[0].get("id") and parts[0]["function"].get("name"), deltas[:3])
    arguments = "".join(part["function"].get("arguments") or "" for part in parts)
    function = {"name": parts[0]["function"]["name"], "arguments": arguments}
    _check_call({"id": "streamed", "function": function})
    return f"{len(parts)} parts"


async def reads_the_result_of_a_tool(server: Target) -> str:
    call = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    messages: list[Json] = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = await server.chat(messages=messages, tools=[WEATHER])
    expect(answer["choices"][0]["message"]["role"] == "assistant", answer)
    return "an answer"


async def writes_json(server: Target) -> str:
    [choice] = (await server.chat(response_format={"type": "json_object"}, max_tokens=200))[
        "choices"
    ]
    text = str(choice["message"]["content"])
    if choice["finish_reason"] == "length":
        expect(text.lstrip().startswith("{"), text)
        return "the beginning of an object: the model does not end it"
    expect(isinstance(_json_of(text), dict), text)
    return text[:40]


async def follows_a_schema(server: Target) -> str:
    text = text_of(await server.chat(response_format=FORMAT, max_tokens=80, temperature=1))
    _check_child(text)
    return text[:60]


async def streams_by_a_schema(server: Target) -> str:
    text = streamed_text(await server.chat_events(response_format=FORMAT, max_tokens=80))
    _check_child(text)
    return text[:60]


def _check_child(text: str) -> None:
    found = _json_of(text)
    expect(isinstance(found, dict) and set(found) == {"name", "age"}, text)
    expect(found["name"] in ("Sam", "Mia") and found["age"] in (5, 6), text)


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


async def _constrained(server: Target, kind: str, value: object, **body: Any) -> str:
    """Uses vLLM's name of a constraint: the new one, and the old one if that changes nothing."""
    reasons = []
    for fields in ({"structured_outputs": {kind: value}}, {f"guided_{kind}": value}):
        try:
            return text_of(await server.chat(**fields, **body))
        except Missing as error:
            reasons.append(str(error))
    raise Missing(reasons[0])


async def follows_a_regex(server: Target) -> str:
    text = await _constrained(server, "regex", "[0-9]{3}-[a-f]{4}", temperature=1)
    expect(re.fullmatch("[0-9]{3}-[a-f]{4}", text), text)
    return text


async def takes_one_of_the_choices(server: Target) -> str:
    text = await _constrained(server, "choice", ["red fox", "blue cat"])
    expect(text in ("red fox", "blue cat"), text)
    return text


async def follows_a_grammar(server: Target) -> str:
    text = await _constrained(server, "grammar", 'root ::= "ab" ("c" | "d") "e"')
    expect(text in ("abce", "abde"), text)
    return text


async def streams_characters_whole(server: Target) -> str:
    fields = {"structured_outputs": {"choice": [UNICODE]}, "max_tokens": 100}
    parts = [
        choice["delta"].get("content") or ""
        for event in await server.chat_events(**fields)
        for choice in event["choices"]
    ]
    expect("".join(parts) == UNICODE, "".join(parts))
    expect(not any("\ufffd" in part for part in parts), parts)
    return f"{len(parts)} parts"
