"""Ollama's client against a server: `python ollama_client.py ADDRESS MODEL`."""

from __future__ import annotations

import sys

import ollama

QUESTION = [{"role": "user", "content": "Return JSON for Sam."}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Tells the weather of a city.

    Args:
        city: the name of the city
    """
    return f"sunny in {city}"


def main(address: str, model: str) -> None:
    client = ollama.Client(host=address)
    options = {"temperature": 0, "num_predict": 60}
    whole = client.chat(model=f"{model}:latest", messages=QUESTION, options=options)
    assert whole.done_reason == "stop", whole
    assert whole.eval_count > 0, whole
    assert whole.total_duration >= whole.eval_duration, whole
    parts = client.chat(model=model, messages=QUESTION, options=options, stream=True)
    assert "".join(part.message.content for part in parts) == whole.message.content

    generated = client.generate(model=model, prompt="Count: 5 6 7 8", raw=True, options=options)
    assert generated.response.startswith(" 9"), generated
    shaped = client.chat(model=model, messages=QUESTION, options=options, format=SCHEMA)
    assert shaped.message.content.startswith('{"age"'), shaped
    client.chat(model=model, messages=QUESTION, options=options, tools=[get_weather])

    assert [each.model for each in client.list().models] == [f"{model}:latest"]
    assert "tools" in client.show(model).capabilities
    assert [each.model for each in client.ps().models] == [f"{model}:latest"]
    vectors = client.embed(model=model, input=["one", "two"]).embeddings
    assert len(vectors) == 2, vectors
    assert len(vectors[0]) == len(vectors[1]), vectors
    try:
        client.chat(model="nobody", messages=QUESTION)
    except ollama.ResponseError:
        return
    raise AssertionError("an unknown model was accepted")


if __name__ == "__main__":
    main(*sys.argv[1:])
