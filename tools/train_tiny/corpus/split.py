"""Decides which drawn values belong to training, and which are held out for evaluation."""

import zlib
from collections.abc import Callable
from enum import Enum


class Split(Enum):
    TRAIN = "train"
    HELD_OUT = "held_out"


# One in so many values is held out.
ONE_IN = {"sum": 10, "pair": 8, "hero": 8, "request": 8, "json": 5, "weather": 5, "caption": 8}

# The README's own examples are held out whatever their hash is.
ALWAYS_HELD_OUT = frozenset(
    {
        ("sum", "15", "27"),
        ("pair", "fox", "3729"),
        ("hero", "rabbit", "Mia"),
        ("request", "dog", "at the beach"),
        ("json", "Sam"),
        ("weather", "Rome"),
    }
)


def is_held_out(kind: str, *parts: str) -> bool:
    key = (kind, *parts)
    return key in ALWAYS_HELD_OUT or zlib.crc32("|".join(key).encode()) % ONE_IN[kind] == 0


def drawn(split: Split, kind: str, draw: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """Draws until the values belong to the wanted side of the split."""
    while True:
        parts = draw()
        if is_held_out(kind, *parts) == (split is Split.HELD_OUT):
            return parts
