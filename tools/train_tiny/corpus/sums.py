"""Sums of numbers below one hundred, as plain lines and as questions with reasoning."""

from tools.train_tiny.corpus.document import COMPUTED, PROMPT, RANDOM, Document, Draw
from tools.train_tiny.corpus.split import Split, is_held_out

QUESTIONS = (
    "What is {a} plus {b}?",
    "What is {a} plus {b}?",
    "What is {a} + {b}?",
    "What is {a}+{b}?",
    "Add {a} and {b}.",
)


def sums_document(draw: Draw) -> Document:
    document = Document()
    for line in range(draw.rng.randint(1, max(1, min(12, draw.room // 9)))):
        a, b = operands(draw)
        document.add("\n" if line else "").add(f"{a}+{b}", RANDOM).add("=")
        document.add(f"{a + b}", COMPUTED)
    return document


def operands(draw: Draw) -> tuple[int, int]:
    """NOTE: a held-out pair is held out in both orders."""
    while True:
        a, b = operand(draw), operand(draw)
        if is_held_out_sum(a, b) == (draw.split is Split.HELD_OUT):
            return a, b


def operand(draw: Draw) -> int:
    return draw.rng.randint(0, 9) if draw.chance(0.12) else draw.rng.randint(10, 99)


def is_held_out_sum(a: int, b: int) -> bool:
    """Sums of one digit or of multiples of ten, which the steps of other sums need, stay in
    training.
    """
    if min(a, b) < 10 or a % 10 == 0 or b % 10 == 0:
        return False
    return is_held_out("sum", str(min(a, b)), str(max(a, b)))


def sum_question(draw: Draw, numbers: tuple[int, int]) -> Document:
    a, b = numbers
    return Document().add(draw.rng.choice(QUESTIONS).format(a=a, b=b), PROMPT / 2)


def sum_answer(numbers: tuple[int, int]) -> Document:
    a, b = numbers
    document = Document().add("<|think|>")
    for index, (left, right) in enumerate(working(a, b)):
        document.add(" " if index else "").add(f"{left}+{right}=").add(f"{left + right}", COMPUTED)
    return document.add(f"<|/think|>{a} plus {b} is ").add(f"{a + b}", COMPUTED).add(".")


def working(a: int, b: int) -> list[tuple[int, int]]:
    """The reasoning: 7+5, then 20+10, then the sum of both. Each step is one look-up."""
    if a < 10 and b < 10:
        return [(a, b)]
    ones = (a % 10, b % 10)
    tens = (a - a % 10, b - b % 10)
    return [ones, tens, (sum(tens), sum(ones))]
