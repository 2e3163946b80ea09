"""Makes prompts: windows of the token ids of real text, no two of which begin alike in a run.

The text is source code of Python's standard library; a
tokenizer that has no words for it (one of a model with random weights) gets random ids instead.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

from aserve.text.tokenizer import TextTokenizer

SOURCES = ("argparse", "inspect", "tarfile", "typing")
HEAD = 8  # ids that tell two windows apart: less than a page of a prefix cache usually holds
MIN_DISTINCT = 256  # ids that a text has at least if the tokenizer knows it
NUM_RANDOM = 1 << 17
DRAWS = 100  # tries to find a text that the tokenizer reads as it was cut


class TokenWindows:
    """`seed` decides all windows. Written by `ids` alone: how those that were given begin."""

    def __init__(self, tokenizer: TextTokenizer, *, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._heads: set[tuple[int, ...]] = set()
        self._text = tokenizer.encode(_source_text(), with_special=False)
        if len(set(self._text)) < MIN_DISTINCT:
            self._text = self._random.choices(range(tokenizer.vocab_size), k=NUM_RANDOM)

    def ids(self, length: int) -> list[int]:
        """A window shorter than a head may come again; one longer than the text goes round."""
        while len(self._text) <= length:
            self._text += self._text
        while True:
            start = self._random.randrange(len(self._text) - length)
            window = self._text[start : start + length]
            head = tuple(window[:HEAD])
            if length < HEAD or head not in self._heads:
                self._heads.add(head)
                return window

    def text(self, length: int) -> str:
        """Of exactly `length` tokens where there is such a window, else of about as many."""
        for _ in range(DRAWS):
            text = self._tokenizer.decode(self.ids(length))
            if len(self._tokenizer.encode(text, with_special=False)) == length:
                return text
        return text


def _source_text() -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    return "".join((root / f"{name}.py").read_text(encoding="utf-8") for name in SOURCES)
