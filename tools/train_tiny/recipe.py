"""The recipe of training: the stages, their lengths, and the share of each kind of document."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """`steps` batches of `rows` rows of `length` tokens. `shares` are shares of tokens by kind.

    `opening` is the part of the rows that begin with a recall document as long as the row.
    """

    name: str
    length: int
    rows: int
    steps: int
    shares: dict[str, float]
    opening: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.length * self.rows * self.steps


@dataclass(frozen=True)
class Rates:
    """Learning rates with a linear warm-up, a constant part, and a linear decay at the end."""

    muon: float = 3e-3
    adam: float = 4e-3
    warmup_steps: int = 40
    decay_part: float = 0.4
    last_part: float = 0.03

    def factor(self, step: int, progress: float) -> float:
        """Returns the factor at a step; `progress` is the part of all tokens seen so far, 0
        to 1.
        """
        left = min(1.0, (1.0 - progress) / self.decay_part)
        decayed = self.last_part + (1.0 - self.last_part) * left
        return min(1.0, (step + 1) / self.warmup_steps) * decayed


@dataclass(frozen=True)
class Recipe:
    stages: tuple[Stage, ...]
    rates: Rates
    tokenizer_documents: int
    tokenizer_kinds: frozenset[str]

    @property
    def num_tokens(self) -> int:
        return sum(stage.num_tokens for stage in self.stages)


# WHY so much copying first: without it the model learns neither recall nor sums in this time.
COPYING = {
    "copy": 35, "story": 14, "recall": 15, "sums": 15,
    "chat_sum": 3, "chat_json": 3, "chat_tool": 3, "chat_recall": 3, "chat_story": 2,
    "chat_counting": 1, "chat_code": 0.7, "chat_smalltalk": 0.3,
    "records": 2, "counting": 1.5, "code": 1.5,
}  # fmt: skip
ALL_KINDS = {
    "copy": 12, "story": 20, "recall": 23, "sums": 13,
    "chat_sum": 4, "chat_json": 4, "chat_tool": 4, "chat_recall": 4, "chat_story": 4,
    "chat_counting": 1.5, "chat_code": 1.2, "chat_smalltalk": 0.8, "conversation": 2,
    "records": 2, "counting": 2, "code": 2.5,
}  # fmt: skip
LONG = {
    "copy": 6, "story": 19, "recall": 30, "sums": 11,
    "chat_sum": 4, "chat_json": 4, "chat_tool": 4, "chat_recall": 4.5, "chat_story": 5,
    "chat_counting": 1.5, "chat_code": 1.2, "chat_smalltalk": 0.8, "conversation": 4,
    "records": 1.5, "counting": 1.5, "code": 2,
}  # fmt: skip
# Trains what is weak after the earlier stages: answers that use the words of the request.
ASKING = {
    "recall": 8, "story": 11, "sums": 10, "rewritten": 8, "copy": 3,
    "chat_asked_story": 14, "chat_story": 4, "chat_sum": 9, "chat_json": 8, "chat_tool": 8,
    "chat_recall": 3, "chat_counting": 1.5, "chat_code": 1.5, "chat_smalltalk": 1,
    "conversation": 4, "records": 1, "counting": 2, "function": 2, "code": 0.5,
}  # fmt: skip
# Trains stories whose hero and friend differ: copying makes "Nora and Nora" of them.
TWO_PERSONS = {
    "recall": 7, "two_persons": 12, "sums": 11, "rewritten": 7, "copy": 2,
    "chat_two_persons": 18, "chat_asked_story": 4, "chat_sum": 10, "chat_json": 8, "chat_tool": 7,
    "chat_recall": 2.5, "chat_counting": 1.5, "chat_code": 1.5, "chat_smalltalk": 1,
    "conversation": 3, "records": 0.5, "counting": 1.5, "function": 2, "code": 0.5,
}  # fmt: skip

FULL = Recipe(
    stages=(
        Stage("copying", length=128, rows=16, steps=600, shares=COPYING),
        Stage("all kinds", length=256, rows=8, steps=1200, shares=ALL_KINDS),
        Stage("long", length=1024, rows=3, steps=970, shares=LONG, opening=0.6),
        Stage("asking", length=512, rows=6, steps=1400, shares=ASKING, opening=0.25),
        Stage("two persons", length=1024, rows=3, steps=500, shares=TWO_PERSONS, opening=0.4),
    ),
    rates=Rates(),
    tokenizer_documents=20_000,
    tokenizer_kinds=frozenset(LONG),
)
QUICK = Recipe(
    stages=(
        Stage("copying", length=64, rows=8, steps=12, shares=COPYING),
        Stage("all kinds", length=128, rows=4, steps=8, shares=ALL_KINDS),
        Stage("long", length=512, rows=1, steps=3, shares=LONG, opening=0.6),
        Stage("asking", length=512, rows=1, steps=2, shares=ASKING, opening=0.25),
        Stage("two persons", length=512, rows=1, steps=2, shares=TWO_PERSONS, opening=0.4),
    ),
    rates=Rates(warmup_steps=4),
    tokenizer_documents=2_000,
    tokenizer_kinds=frozenset(LONG),
)
