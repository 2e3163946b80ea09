"""Inspect: an evaluation of two questions through its OpenAI-compatible provider, and one with a
tool."""

from __future__ import annotations

import os
import sys
import tempfile

from inspect_ai import Task, eval_set
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """Returns the weather of a city.

        Args:
            city: The city.
        """
        return '{"weather": "sunny", "celsius": 21}'

    return execute


def main(address: str, model: str) -> None:
    os.environ |= {"ASERVE_BASE_URL": f"{address}/v1", "ASERVE_API_KEY": "none"}
    sums = [
        Sample(input="What is 27 plus 15?", target="42"),
        Sample(input="What is 31 plus 12?", target="43"),
    ]
    weather = [Sample(input="What is the weather in Rome?", target="21 degrees")]
    tasks = [
        Task(dataset=sums, solver=generate(), scorer=includes(), name="sums"),
        Task(dataset=weather, solver=[use_tools(get_weather()), generate()], scorer=includes()),
    ]
    with tempfile.TemporaryDirectory() as logs:
        _, results = eval_set(
            tasks,
            model=f"openai-api/aserve/{model}",
            log_dir=logs,
            display="none",
            **GenerateConfig(temperature=0, max_tokens=120).model_dump(exclude_none=True),
        )
    for result in results:
        assert result.status == "success", result.error
        accuracy = result.results.scores[0].metrics["accuracy"].value
        assert accuracy == 1.0, (result.eval.task, accuracy)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
