"""Makes prompts: windows of the token ids of a real text, which all begin differently.

The text is source code of Python's standard library. A tokenizer that does not know its words, such
as the numeric one, gets random ids instead.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

from aserve.text.tokenizer import TextTokenizer

SOURCES = ("argparse", "inspect", "tarfile", "typing")
HEAD = 8  # the ids in which all windows differ: fewer than a page of a prefix cache usually has
MIN_DISTINCT = 256  # a tokenizer that knows the text makes at least so many distinct ids of it
NUM_RANDOM = 1 << 17
MAX_TRIES = 100  # tries to find a window whose text encodes to the same number of ids


class TokenWindows:
    """Draws windows. `seed` determines all of them. Only `ids` writes the heads seen so far."""

    def __init__(self, tokenizer: TextTokenizer, *, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._heads: set[tuple[int, ...]] = set()
        self._text = tokenizer.encode(_source_text(), with_special=False)
        if len(set(self._text)) < MIN_DISTINCT:
            self._text = self._random.choices(range(tokenizer.vocab_size), k=NUM_RANDOM)

    def ids(self, length: int) -> list[int]:
        """Returns a window. Windows shorter than HEAD may repeat, and long ones wrap around."""
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
        """Returns a text of `length` tokens, or of about as many if no such window is found."""
        for _ in range(MAX_TRIES):
            text = self._tokenizer.decode(self.ids(length))
            if len(self._tokenizer.encode(text, with_special=False)) == length:
                return text
        return text


def _source_text() -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    return "".join((root / f"{name}.py").read_text(encoding="utf-8") for name in SOURCES)
