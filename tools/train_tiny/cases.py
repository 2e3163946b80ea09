"""The held-out cases that score the model: prompts, checks of the answers, and required scores."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from tools.train_tiny.corpus.document import Draw
from tools.train_tiny.corpus.names import (
    ANIMALS,
    CITIES,
    OTHERS,
    PEOPLE,
    PLACES,
    any_city,
    any_person,
    with_article,
)
from tools.train_tiny.corpus.recall import KEYS, digits_of
from tools.train_tiny.corpus.split import Split, is_held_out
from tools.train_tiny.corpus.stories import story_document
from tools.train_tiny.corpus.sums import is_held_out_sum
from tools.train_tiny.tokenizer import BOS, chat_prompt

NUM_CASES = 100
NUM_STORIES = 20
ROOM = 400


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    expected: str


@dataclass(frozen=True)
class Suite:
    name: str
    cases: list[Case]
    required: int
    max_tokens: int
    is_right: Callable[[str, str], bool]  # of the answer and `expected`


def all_suites(tokenizer: Tokenizer) -> list[Suite]:
    return [
        recall_suite(tokenizer, filler_len=50, required=95),
        recall_suite(tokenizer, filler_len=200, required=95),
        recall_suite(tokenizer, filler_len=600, required=85),
        sum_suite(tokenizer),
        chat_sum_suite(tokenizer),
        json_suite(tokenizer),
        weather_suite(tokenizer),
        story_suite(tokenizer),
        chat_story_suite(tokenizer),
    ]


def recall_suite(tokenizer: Tokenizer, *, filler_len: int, required: int) -> Suite:
    """Four lines of key=value, `filler_len` tokens of stories, and one of the keys again."""
    draw = Draw(Random(f"cases/recall/{filler_len}"), Split.HELD_OUT, ROOM)
    cases = [recall_case(draw, tokenizer, filler_len) for _ in range(NUM_CASES - 1)]
    example = recall_case(draw, tokenizer, filler_len, example=("fox", "3729"))
    return Suite(f"recall after {filler_len}", [example, *cases], required, 6, begins_with_number)


def recall_case(
    draw: Draw, tokenizer: Tokenizer, filler_len: int, *, example: tuple[str, str] | None = None
) -> Case:
    rng = draw.rng
    table = {key: digits_of(draw, key) for key in rng.sample(KEYS, 4)}
    if example:
        table.pop(example[0], table.popitem()[0])
        table = dict([example, *list(table.items())[:3]])
    asked = example[0] if example else rng.choice(list(table))
    lines = "".join(f"{key}={value}\n" for key, value in table.items())
    filler: list[int] = []
    while len(filler) < filler_len:
        text = (" " if filler else "") + story_document(draw).text
        filler += tokenizer.encode(text, add_special_tokens=False).ids
    table_ids = tokenizer.encode(lines, add_special_tokens=False).ids
    question = tokenizer.encode(f"\n{asked}=", add_special_tokens=False).ids
    return Case([BOS, *table_ids, *filler[:filler_len], *question], table[asked])


def sum_suite(tokenizer: Tokenizer) -> Suite:
    cases = [Case(tokenizer.encode(f"{a}+{b}=").ids, str(a + b)) for a, b in held_out_sums("plain")]
    return Suite("a+b=", cases, 85, 6, begins_with_number)


def chat_sum_suite(tokenizer: Tokenizer) -> Suite:
    cases = [
        Case(chat_prompt(tokenizer, f"What is {a} plus {b}?"), str(a + b))
        for a, b in held_out_sums("chat")
    ]
    return Suite("What is a plus b?", cases, 95, 60, ends_with_number)


def held_out_sums(purpose: str) -> list[tuple[int, int]]:
    rng = Random(f"cases/sums/{purpose}")
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if is_held_out_sum(a, b)]
    pairs.remove((27, 15))
    return [(27, 15), *rng.sample(pairs, NUM_CASES - 1)]


def json_suite(tokenizer: Tokenizer) -> Suite:
    names = held_out_words("json", "Sam", PEOPLE + OTHERS, any_person)
    cases = [Case(chat_prompt(tokenizer, f"Return JSON for {name}."), name) for name in names]
    return Suite("Return JSON for", cases, 90, 60, is_record_of)


def weather_suite(tokenizer: Tokenizer) -> Suite:
    cities = held_out_words("weather", "Rome", CITIES, any_city)
    cases = [
        Case(chat_prompt(tokenizer, f"What is the weather in {city}?"), city) for city in cities
    ]
    return Suite("What is the weather in", cases, 90, 60, is_weather_call)


def held_out_words(
    kind: str, example: str, known: Iterable[str], invent: Callable[[Random], str]
) -> list[str]:
    """Returns the example, then the known words that are held out, then invented ones."""
    rng = Random(f"cases/{kind}")

    def candidates() -> Iterator[str]:
        yield example
        yield from known
        while True:
            yield invent(rng)

    chosen: dict[str, None] = {}
    for word in candidates():
        if is_held_out(kind, word):
            chosen[word] = None
        if len(chosen) == NUM_CASES:
            break
    return list(chosen)


def story_suite(tokenizer: Tokenizer) -> Suite:
    """A right answer is a story with an end, about its hero and exactly one other person."""
    rng = Random("cases/stories")
    heroes = [(a, name) for a in ANIMALS for name in PEOPLE if is_held_out("hero", a, name)]
    heroes.remove(("rabbit", "Mia"))
    heroes = [("rabbit", "Mia"), *rng.sample(heroes, NUM_STORIES - 1)]
    cases = [
        Case(
            tokenizer.encode(
                f"Once upon a time, there was {with_article(animal)} named {name}."
            ).ids,
            name,
        )
        for animal, name in heroes
    ]
    return Suite("stories of two persons", cases, 18, 400, is_story_of_two)


def chat_story_suite(tokenizer: Tokenizer) -> Suite:
    """A right answer is such a story about the requested animal and place."""
    asked = [(a, place) for a in ANIMALS for place in PLACES if is_held_out("request", a, place)]
    asked.remove(("dog", "at the beach"))
    asked = [("dog", "at the beach"), *Random("cases/chat").sample(asked, NUM_STORIES - 1)]
    cases = [
        Case(
            chat_prompt(tokenizer, f"Write a story about {with_article(animal)} {place}."),
            f"{animal} {place}",
        )
        for animal, place in asked
    ]
    return Suite("Write a story about", cases, 18, 400, is_story_as_asked)


def begins_with_number(answer: str, expected: str) -> bool:
    found = re.match(r"\d+", answer)
    return found is not None and found.group() == expected


def ends_with_number(answer: str, expected: str) -> bool:
    """Checks the last number after the reasoning."""
    return re.findall(r"\d+", answer.rpartition("<|/think|>")[2])[-1:] == [expected]


def is_record_of(answer: str, expected: str) -> bool:
    record = json_or_none(answer)
    return isinstance(record, dict) and record.get("name") == expected


def is_weather_call(answer: str, expected: str) -> bool:
    found = re.fullmatch(r"<\|tool_call\|>(.*)<\|/tool_call\|>", answer)
    wanted = {"name": "get_weather", "arguments": {"city": expected}}
    return found is not None and json_or_none(found.group(1)) == wanted


def is_story_of_two(answer: str, expected: str) -> bool:
    names = persons_in(answer)
    return expected in names and len(names) == 2 and answer.endswith((".", '"'))


def is_story_as_asked(answer: str, expected: str) -> bool:
    """`expected` is the animal and the place."""
    animal, _, place = expected.partition(" ")
    hero = re.search(rf"\b{animal} named (\w+)\.", answer)
    return hero is not None and place in answer and is_story_of_two(answer, hero.group(1))


def persons_in(text: str) -> set[str]:
    return {word for word in re.findall(r"[A-Z][a-z]+", text) if word in PEOPLE}


def json_or_none(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
