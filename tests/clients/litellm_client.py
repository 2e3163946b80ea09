"""LiteLLM: answers, streams, and tool calls through its OpenAI provider."""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches one when it is imported

import litellm

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def main(address: str, model: str) -> None:
    server = {
        "model": f"openai/{model}",
        "api_base": f"{address}/v1",
        "api_key": "none",
        "temperature": 0,
    }
    question = [{"role": "user", "content": "What is 27 plus 15?"}]
    message = litellm.completion(messages=question, **server).choices[0].message
    assert "42" in message.content
    assert message.reasoning_content, "the bundled model thinks before it adds"
    stream = litellm.completion(messages=question, stream=True, **server)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == message.content, text

    weather = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = litellm.completion(messages=weather, tools=[WEATHER], tool_choice="required", **server)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
