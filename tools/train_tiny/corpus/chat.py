"""Chat documents: every kind of request, in the roles of the chat template.

The role tokens are exactly those of the tokenizer's chat template.
"""

from collections.abc import Callable

from tools.train_tiny.corpus.code import code_exchange
from tools.train_tiny.corpus.counting import counting_exchange
from tools.train_tiny.corpus.document import (
    NEWCOMER,
    PLAIN,
    PROMPT,
    RANDOM,
    RECALLED,
    Document,
    Draw,
)
from tools.train_tiny.corpus.names import ANIMALS, PLACES, with_article
from tools.train_tiny.corpus.recall import pairs, table_text
from tools.train_tiny.corpus.records import json_exchange
from tools.train_tiny.corpus.smalltalk import smalltalk_exchange
from tools.train_tiny.corpus.split import drawn
from tools.train_tiny.corpus.stories import Cast, cast, marked_story, story
from tools.train_tiny.corpus.sums import operands, sum_answer, sum_question
from tools.train_tiny.corpus.tools import (
    TOOLS,
    time_question,
    time_result,
    tool_call,
    weather_city,
    weather_question,
    weather_result,
)

Turn = tuple[str, Document]  # role and content
SYSTEM_LINES = ("You are a helpful assistant.", "You are helpful.", "Answer briefly.")
STORY_REQUESTS = ("Write a story about {a} {place}.", "Tell me a story about {a} {place}.")
SHORT_STORY_REQUESTS = (
    "Write a story about {a}.",
    "Tell me a story about {a} named {h}.",
    "Write a story about {a} named {h}.",
    "Tell me a story.",
    "Write a story.",
    "Write a story about {a} and {fa}.",
)

ANIMAL_REQUESTS = tuple(form for form in SHORT_STORY_REQUESTS if "{a}" in form)


def chat_document(draw: Draw, *turn_makers: Callable[[Draw], list[Turn]]) -> Document:
    document = Document()
    system = system_line(draw)
    if system:
        document.extend(turn("system", Document().add(system, PROMPT)))
    for make_turns in turn_makers:
        for role, content in make_turns(draw):
            document.extend(turn(role, content))
    return document


def turn(role: str, content: Document) -> Document:
    weight = PLAIN if role == "assistant" else PROMPT
    return Document().add(f"<|{role}|>", PROMPT).extend(content).add("<|eot|>", weight)


def system_line(draw: Draw) -> str:
    """Returns a line of advice, the names of tools, both, or in most cases nothing."""
    lines = [draw.rng.choice(SYSTEM_LINES)] if draw.chance(0.15) else []
    if draw.chance(0.15):
        count = draw.rng.randint(1, len(TOOLS))
        lines.append("Tools: " + ", ".join(draw.rng.sample(TOOLS, count)))
    return "\n".join(lines)


def exchange(question: Document, answer: Document) -> list[Turn]:
    return [("user", question), ("assistant", answer)]


def sum_turns(draw: Draw) -> list[Turn]:
    numbers = operands(draw)
    return exchange(sum_question(draw, numbers), sum_answer(numbers))


def json_turns(draw: Draw) -> list[Turn]:
    return exchange(*json_exchange(draw))


def counting_turns(draw: Draw) -> list[Turn]:
    return exchange(*counting_exchange(draw))


def code_turns(draw: Draw) -> list[Turn]:
    return exchange(*code_exchange(draw))


def smalltalk_turns(draw: Draw) -> list[Turn]:
    return exchange(*smalltalk_exchange(draw))


def tool_turns(draw: Draw) -> list[Turn]:
    """The tool call, and in half of the documents its result in a system turn."""
    city = weather_city(draw)
    if draw.chance(0.75):
        turns = exchange(weather_question(draw, city), tool_call("get_weather", city))
        result, answer = weather_result(draw, city)
    else:
        turns = exchange(time_question(city), tool_call("get_time", city))
        result, answer = time_result(draw, city)
    if draw.chance(0.5):
        told = Document().add("Tool result: ", PROMPT).extend(result)
        turns += [("system", told), ("assistant", answer)]
    return turns


def story_turns(draw: Draw) -> list[Turn]:
    if draw.chance(0.5):
        animal, place = requested(draw)
        played = cast(draw, animal=animal, place=place)
        form = draw.rng.choice(STORY_REQUESTS)
    else:
        played = cast(draw)
        form = draw.rng.choice(SHORT_STORY_REQUESTS)
    question = Document().add(story_request(form, played), PROMPT)
    return exchange(question, Document().add(story(draw, played)))


def asked_story_turns(draw: Draw) -> list[Turn]:
    """A request that says what the story is about, and an answer with weight on these words."""
    animal, place = requested(draw)
    played = cast(draw, animal=animal, place=place)
    form = draw.rng.choice(STORY_REQUESTS * 3 + ANIMAL_REQUESTS)
    question = Document().add(story_request(form, played), PROMPT)
    return exchange(question, marked_story(story(draw, played), played))


def two_person_turns(draw: Draw) -> list[Turn]:
    """Any request for a story, and an answer with weight on its second name."""
    animal, place = requested(draw)
    played = cast(draw, animal=animal, place=place)
    form = draw.rng.choice(STORY_REQUESTS * 2 + SHORT_STORY_REQUESTS)
    question = Document().add(story_request(form, played), PROMPT)
    return exchange(question, marked_story(story(draw, played), played, newcomer=NEWCOMER))


def requested(draw: Draw) -> tuple[str, str]:
    def candidate() -> tuple[str, str]:
        return draw.rng.choice(ANIMALS), draw.rng.choice(PLACES)

    animal, place = drawn(draw.split, "request", candidate)
    return animal, place


def story_request(form: str, played: Cast) -> str:
    return form.format(
        a=with_article(played.hero.kind),
        h=played.hero.name,
        fa=with_article(played.friend.kind),
        place=played.place,
    )


def recall_turns(draw: Draw) -> list[Turn]:
    """Values in one message, and a question about them in the same message or after other turns."""
    table = pairs(draw, count=draw.rng.randint(1, 5))
    asked = draw.rng.sample(list(table), draw.rng.randint(1, len(table)))
    told = Document().add("Remember: ", PROMPT).extend(table_text(table)).add(".", PROMPT)
    if draw.chance(0.4):
        told.add(f" What is {asked[0]}?", PROMPT)
        turns = exchange(told, recalled(asked[0], table))
        asked = asked[1:]
    else:
        turns = exchange(told, Document().add("I will remember."))
    if draw.room > 250 and draw.chance(0.4):
        turns += story_turns(draw)
    for key in asked:
        question = Document().add("What is ", PROMPT).add(key, RANDOM).add("?", PROMPT)
        turns += exchange(question, recalled(key, table))
    return turns


def recalled(key: str, table: dict[str, str]) -> Document:
    return Document().add(f"{key}=").add(table[key], RECALLED)
