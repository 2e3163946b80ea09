"""A training document: pieces of text, each with the weight of its loss."""

from dataclasses import dataclass
from random import Random
from typing import Self

from tools.train_tiny.corpus.split import Split

# Loss weights. What cannot be known (a random digit) should not shout, what must be looked up
# or computed should.
RANDOM = 0.1
PROMPT = 0.4
PLAIN = 1.0
RECALLED = 2.0
COMPUTED = 2.5
ASKED = 4.0  # words of a request that the answer must use
NEWCOMER = 8.0  # a name that must differ from those before it


@dataclass(frozen=True)
class Draw:
    """The input of a generator: its random numbers, its side of the split, and its room in
    tokens.
    """

    rng: Random
    split: Split
    room: int

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability


class Document:
    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: list[tuple[str, float]] = []

    def add(self, text: str, weight: float = PLAIN) -> Self:
        if text:
            self.pieces.append((text, weight))
        return self

    def extend(self, other: "Document") -> Self:
        self.pieces.extend(other.pieces)
        return self

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)
