"""LlamaIndex: answers, streams, embeddings, tool calls and structured output, by its OpenAI-like
classes."""

from __future__ import annotations

import sys

from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: str


def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"rain in {city}"


def main(address: str, model: str) -> None:
    server = {"model": model, "api_base": f"{address}/v1", "api_key": "none"}
    llm = OpenAILike(
        **server, temperature=0, is_chat_model=True, is_function_calling_model=True, max_tokens=120
    )
    assert "42" in llm.complete("What is 27 plus 15?").text
    parts = [part.delta for part in llm.stream_complete("What is 27 plus 15?")]
    assert len(parts) > 1
    assert "42" in "".join(filter(None, parts))

    completions = OpenAILike(**server, temperature=0, is_chat_model=False, max_tokens=8)
    assert completions.complete("Once upon a time").text

    tool = FunctionTool.from_defaults(get_weather)
    answer = llm.predict_and_call([tool], "What is the weather in Paris?", tool_required=True)
    assert answer.response.startswith("rain in ")
    program = FunctionCallingProgram.from_defaults(
        Weather, prompt_template_str="What is the weather in {city}?", llm=llm, tool_required=True
    )
    assert isinstance(program(city="Paris"), Weather)

    embedder = OpenAILikeEmbedding(
        model_name=model, api_base=server["api_base"], api_key="none", embed_batch_size=2
    )
    vectors = embedder.get_text_embedding_batch(["one", "two", "three"])
    assert [len(vector) for vector in vectors] == [128] * 3


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
