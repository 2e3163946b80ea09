"""JSON about persons: lists of records, and answers to requests for a record."""

import json
from dataclasses import dataclass, replace

from tools.train_tiny.corpus.document import PLAIN, PROMPT, RANDOM, RECALLED, Document, Draw
from tools.train_tiny.corpus.names import CITIES, any_city, any_person
from tools.train_tiny.corpus.split import drawn


@dataclass(frozen=True)
class Record:
    name: str
    age: int
    city: str


def records_document(draw: Draw) -> Document:
    """A JSON array with random values and a fixed format."""
    document = Document().add("[")
    for index in range(draw.rng.randint(1, max(1, min(5, draw.room // 35)))):
        document.add(", " if index else "")
        document.extend(written(record(draw), known=frozenset()))
    return document.add("]")


def record(draw: Draw) -> Record:
    def candidate() -> tuple[str]:
        return (any_person(draw.rng),)

    name = drawn(draw.split, "json", candidate)[0]
    return Record(name, draw.rng.randint(5, 90), draw.rng.choice(CITIES))


def written(record: Record, *, known: frozenset[str]) -> Document:
    """A record. The `known` fields are copied from the request, and the others are invented."""
    document = Document().add("{")
    for index, (field, value) in enumerate(vars(record).items()):
        text = json.dumps(value)
        quote = '"' if text.startswith('"') else ""
        weight = RECALLED if field in known else RANDOM
        document.add(f'{", " if index else ""}"{field}": {quote}')
        document.add(text.strip('"'), weight).add(quote, PLAIN)
    return document.add("}")


def json_exchange(draw: Draw) -> tuple[Document, Document]:
    """The request names some fields; the bare form names only the person."""
    entry = record(draw)
    is_city_told = draw.chance(0.3)
    if is_city_told:
        entry = replace(entry, city=any_city(draw.rng))
    question = Document().add("Return JSON for ", PROMPT).add(entry.name, RANDOM)
    known = {"name"}
    if draw.chance(0.3):
        question.add(f", age {entry.age}", RANDOM)
        known.add("age")
    if is_city_told:
        question.add(f", from {entry.city}", RANDOM)
        known.add("city")
    return question.add(".", PROMPT), written(entry, known=frozenset(known))
