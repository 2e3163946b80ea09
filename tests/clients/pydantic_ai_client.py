"""PydanticAI: an agent with a tool, and outputs as tool calls and as JSON schemas."""

from __future__ import annotations

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


def main(address: str, model: str) -> None:
    provider = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
    chat = OpenAIChatModel(model, provider=provider)
    assert "42" in Agent(chat).run_sync("What is 27 plus 15?").output
    for output in (ToolOutput(Person), NativeOutput(Person)):
        agent = Agent(chat, output_type=output, retries=0)
        person = agent.run_sync("Return JSON for Sam.", model_settings={"temperature": 0}).output
        assert isinstance(person, Person), (output, person)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
