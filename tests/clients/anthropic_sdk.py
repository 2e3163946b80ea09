"""Anthropic's SDK against a server: `python anthropic_sdk.py ADDRESS MODEL`."""

from __future__ import annotations

import sys

import anthropic

QUESTION = {"role": "user", "content": "Return JSON for Sam."}
WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main(address: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    greedy = {"temperature": 0}  # the SDK has no parameter for it any more
    asked = {"model": model, "max_tokens": 60, "messages": [QUESTION], "extra_body": greedy}

    whole = client.messages.create(**asked)
    assert whole.stop_reason == "end_turn", whole
    assert whole.content[0].type == "text", whole
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text, (text, whole)
    assert final.usage.output_tokens == whole.usage.output_tokens

    counted = client.messages.count_tokens(model=model, messages=[QUESTION])
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    call_a_tool(client, asked)
    see_errors(client, asked)


def call_a_tool(client: anthropic.Anthropic, asked: dict) -> None:
    """The model must call the tool, and answers after the tool's result."""
    with_tool = asked | {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}}
    message = client.messages.create(**with_tool)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use", message
    assert call.input["city"] in ("Oslo", "Rome"), call
    with client.messages.stream(**with_tool) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content if block.type == "tool_use"] == [call.input]
    history = [
        QUESTION,
        {"role": "assistant", "content": message.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}],
        },
    ]
    answer = client.messages.create(**asked | {"tools": [WEATHER], "messages": history})
    assert answer.usage.output_tokens > 0, answer


def see_errors(client: anthropic.Anthropic, asked: dict) -> None:
    for change, kind in (
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**asked | change)
        except kind:
            continue
        raise AssertionError(f"{change} was accepted")


if __name__ == "__main__":
    main(*sys.argv[1:])
