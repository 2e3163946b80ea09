"""LangChain's OpenAI chat model: answers, streams, tools, and structured output."""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"rain in {city}"


def main(address: str, model: str) -> None:
    chat = ChatOpenAI(base_url=f"{address}/v1", api_key="none", model=model, temperature=0)
    assert "42" in chat.invoke("What is 27 plus 15?").content
    pieces = [chunk.content for chunk in chat.stream("What is 27 plus 15?")]
    assert len(pieces) > 2, pieces
    assert "42" in "".join(pieces)

    asked = [HumanMessage("What is the weather in Paris?")]
    answer = chat.bind_tools([get_weather], tool_choice="any").invoke(asked)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather", call
    assert set(call["args"]) == {"city"}, call
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat.bind_tools([get_weather]).invoke([*asked, answer, result]).content

    for method in ("function_calling", "json_schema"):
        person = chat.with_structured_output(Person, method=method).invoke("Return JSON for Sam.")
        assert isinstance(person, Person), (method, person)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
