"""Copies of random words or digits, and tables that are asked again at once. They teach copying."""

import json

from tools.train_tiny.corpus.document import PROMPT, RANDOM, RECALLED, Document, Draw
from tools.train_tiny.corpus.names import CITIES, OTHERS, PEOPLE, made_word
from tools.train_tiny.corpus.recall import KEYS, pairs

DIGITS = tuple("0123456789")


def copy_document(draw: Draw) -> Document:
    return table_document(draw) if draw.chance(0.5) else repeated_document(draw)


def repeated_document(draw: Draw) -> Document:
    """A line, then its words once or twice more, unchanged or in another notation."""
    words = random_words(draw)
    document = Document().add(draw.rng.choice(MANNERS)(words), RANDOM)
    is_rewritten = draw.chance(0.5)
    line = document.text
    for _ in range(draw.rng.choice((1, 1, 2))):
        line = draw.rng.choice(MANNERS)(words) if is_rewritten else line
        document.add("\n").add(line, RECALLED / 2)
    return document


def rewritten_document(draw: Draw) -> Document:
    """Names in a sentence and then in JSON, or in the other order."""
    rng = draw.rng
    count = rng.randint(2, max(3, min(16, draw.room // 10)))
    pool = PEOPLE + OTHERS + CITIES
    words = [rng.choice(pool) for _ in range(count)]
    words = [made_word(rng).capitalize() if draw.chance(0.3) else word for word in words]
    manners = [quoted, rng.choice((spaced, listed))]
    rng.shuffle(manners)
    document = Document().add(manners[0](words), RANDOM).add("\n")
    return document.add(manners[1](words), RECALLED / 2)


def random_words(draw: Draw) -> list[str]:
    rng = draw.rng
    count = rng.randint(3, max(4, min(24, draw.room // 8)))
    pool = rng.choice((KEYS, PEOPLE + OTHERS, CITIES, PEOPLE + OTHERS + CITIES, DIGITS, None))
    if pool is not None:
        return rng.choices(pool, k=count)
    made = [made_word(rng) for _ in range(max(2, count // 3))]
    return [word.capitalize() for word in made] if draw.chance(0.5) else made


def spaced(words: list[str]) -> str:
    return " ".join(words)


def listed(words: list[str]) -> str:
    return ", ".join(words)


def quoted(words: list[str]) -> str:
    """A word has one token after a space and another after a quote. This pairs the two."""
    return json.dumps(words)


MANNERS = (spaced, listed, quoted)


def table_document(draw: Draw) -> Document:
    """A table, and right after it its keys in another order, some of them twice."""
    rng = draw.rng
    most = max(1, min(8, draw.room // 18))
    table = pairs(draw, count=rng.randint(1, most))
    document = Document()
    for key, value in table.items():
        document.add(f"{key}=").add(value, RANDOM).add("\n")
    asked = rng.sample(list(table), len(table))
    if draw.chance(0.3):
        asked += rng.sample(list(table), len(table))
    for key in asked:
        document.add(f"{key}=", PROMPT / 2).add(table[key], RECALLED).add("\n")
    return document
