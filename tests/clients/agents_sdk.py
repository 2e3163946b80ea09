"""OpenAI's Agents SDK: an agent calls a tool, over chat completions and over Responses."""

from __future__ import annotations

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


def main(address: str, model: str) -> None:
    set_tracing_disabled(True)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        cities: list[str] = []

        @function_tool
        def get_weather(city: str) -> str:
            """Returns the weather of a city."""
            cities.append(city)  # noqa: B023 - the agent ends within this round
            return f"rain in {city}"

        client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none")
        agent = Agent(
            name="weather",
            model=kind(model=model, openai_client=client),
            tools=[get_weather],
            model_settings=ModelSettings(temperature=0, tool_choice="required", max_tokens=120),
        )
        result = Runner.run_sync(agent, "What is the weather in Paris?", max_turns=4)
        assert cities, kind
        assert result.final_output, kind


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
