"""Counting: the first numbers give the start and the step, and the end is a multiple of ten."""

from tools.train_tiny.corpus.document import COMPUTED, PROMPT, RANDOM, Document, Draw

NUM_GIVEN = 4
NUM_TENS = {1: 1, 2: 2, 5: 5, 10: 10}  # by step: the sequence covers at least that many tens


def counting_document(draw: Draw) -> Document:
    """One count per document, as plain text."""
    given, rest = count(draw)
    document = Document().add("Count: ").add(joined(given), RANDOM)
    return document.add(" " + joined(rest), COMPUTED / 2)


def counting_exchange(draw: Draw) -> tuple[Document, Document]:
    given, rest = count(draw)
    question = Document().add("Count: ", PROMPT).add(joined(given), RANDOM)
    return question, Document().add(joined(rest), COMPUTED / 2)


def count(draw: Draw) -> tuple[list[int], list[int]]:
    step = draw.rng.choice((1, 1, 1, 1, 1, 2, 5, 10))
    start = draw.rng.randint(0, 9) * step if step > 2 else draw.rng.randint(0, 89)
    num_given = draw.rng.randint(3, 5) if draw.chance(0.5) else NUM_GIVEN
    given = [start + step * index for index in range(num_given)]
    rest = [given[-1] + step]
    while rest[-1] < last_number(start, step) and rest[-1] + step <= 200:
        rest.append(rest[-1] + step)
    return given, rest


def last_number(start: int, step: int) -> int:
    """Returns the first multiple of ten that is at least NUM_TENS[step] tens after the start."""
    distance = 10 * NUM_TENS[step]
    return -(-(start + distance) // 10) * 10


def joined(numbers: list[int]) -> str:
    return " ".join(str(number) for number in numbers)
