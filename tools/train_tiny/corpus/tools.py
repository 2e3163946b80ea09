"""Questions that need a tool, the call of that tool, and the answer from its result."""

import json

from tools.train_tiny.corpus.document import PLAIN, PROMPT, RANDOM, RECALLED, Document, Draw
from tools.train_tiny.corpus.names import any_city
from tools.train_tiny.corpus.split import drawn

WEATHER_QUESTIONS = (
    "What is the weather in ",
    "What is the weather in ",
    "What is the weather like in ",
    "How is the weather in ",
)
TIME_QUESTION = "What time is it in "
TOOLS = ("get_weather", "get_time")
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")


def weather_city(draw: Draw) -> str:
    def candidate() -> tuple[str]:
        return (any_city(draw.rng),)

    return drawn(draw.split, "weather", candidate)[0]


def weather_question(draw: Draw, city: str) -> Document:
    asked = Document().add(draw.rng.choice(WEATHER_QUESTIONS), PROMPT)
    return asked.add(city, RANDOM).add("?", PROMPT)


def time_question(city: str) -> Document:
    return Document().add(TIME_QUESTION, PROMPT).add(city, RANDOM).add("?", PROMPT)


def tool_call(name: str, city: str) -> Document:
    call = Document().add(f'<|tool_call|>{{"name": "{name}", "arguments": {{"city": "')
    return call.add(city, RECALLED).add('"}}<|/tool_call|>', PLAIN)


def weather_result(draw: Draw, city: str) -> tuple[Document, Document]:
    """The result of the tool, and the sentence made of it."""
    sky = draw.rng.choice(SKIES)
    degrees = draw.rng.randint(0, 39)
    result = json.dumps({"weather": sky, "celsius": degrees})
    answer = Document().add("It is ").add(sky, RECALLED).add(" in ").add(city, RECALLED)
    return (
        Document().add(result, PROMPT / 2),
        answer.add(" and ").add(str(degrees), RECALLED).add(" degrees."),
    )


def time_result(draw: Draw, city: str) -> tuple[Document, Document]:
    clock = f"{draw.rng.randint(0, 23):02}:{draw.rng.randint(0, 59):02}"
    result = Document().add(json.dumps({"time": clock}), PROMPT / 2)
    answer = Document().add("It is ").add(clock, RECALLED).add(" in ").add(city, RECALLED)
    return result, answer.add(".")
