"""Keeps special tokens in a client's content plain text, so that no message can begin another
role's turn.

A chat template renders one text. The special tokens of the template must be encoded as such, and
those of the client must not. So every special token in the client's values is broken by a mark,
which is a private-use character that the values do not contain. The rendered text is split at the
marks, and the pieces are encoded one by one: no piece has a whole special token from the client. A
prompt without marks is encoded in one piece, so ordinary prompts have the same ids as in
transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from aserve.errors import InvalidRequest
from aserve.text.tokenizer import TextTokenizer

PRIVATE_USE = range(0xE000, 0xF900)
# If the tokenizer puts a space in front of a text, a piece is encoded after one of these texts.
ANCHORS = ("\n", "x", ".", "0")
# PERF: a search by regular expression holds the interpreter lock until it ends. It takes 16 ns per
# character, so a search of 8 MB at once would stop all other threads for 130 ms.
SLICE_CHARS = 1 << 16


class Marked(NamedTuple):
    """A client's values with their special tokens broken by `mark`, which is None if there are no
    special tokens.
    """

    value: Any
    mark: str | None


class PlainContent:
    """Breaks special tokens in the values of chats, and encodes the rendered texts."""

    __slots__ = ("_longest", "_pattern", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        texts = sorted(map(re.escape, tokenizer.special_texts), key=len, reverse=True)
        self._longest = max(map(len, tokenizer.special_texts), default=0)
        # WHY: a lookahead also finds tokens that overlap. Its matches are empty.
        self._pattern = re.compile(f"(?={'|'.join(texts)})") if texts else None

    def break_special(self, value: Any) -> Marked:
        """Breaks the special tokens in all texts of a JSON value, keys included."""
        if not any(map(self._has_special, texts_in(value))):
            return Marked(value, None)
        used = set().union(*map(_characters, texts_in(value)))
        mark = next((char for char in map(chr, PRIVATE_USE) if char not in used), None)
        if mark is None:
            raise InvalidRequest(
                "the messages have special tokens and every private-use character; leave out one "
                "of both",
                param="messages",
                code="invalid_value",
            )
        return Marked(self._with_marks(value, mark), mark)

    def encode(self, text: str, mark: str, *, with_special: bool) -> list[int]:
        """Encodes a rendered text piece by piece. `with_special` adds BOS and the like."""
        first, *others = text.split(mark)
        ids = self._tokenizer.encode(first, with_special=False)
        before, after = self._special_around(first, ids) if with_special else ([], [])
        for piece in others:
            ids += self._encode_inside(piece)
        return [*before, *ids, *after]

    def _has_special(self, text: str) -> bool:
        return next(self._special_starts(text), None) is not None

    def _special_starts(self, text: str) -> Iterator[int]:
        """Yields the starts of special tokens. It searches slice by slice; a token may extend into
        the next slice.
        """
        if self._pattern is None:
            return
        for start in range(0, len(text), SLICE_CHARS):
            end = start + SLICE_CHARS
            for match in self._pattern.finditer(text, start, end + self._longest):
                if match.start() < end:
                    yield match.start()

    def _with_marks(self, value: Any, mark: str) -> Any:
        match value:
            case str():
                return self._break_text(value, mark)
            case list():
                return [self._with_marks(item, mark) for item in value]
            case dict():
                return {
                    self._break_text(key, mark): self._with_marks(item, mark)
                    for key, item in value.items()
                }
            case _:
                return value

    def _break_text(self, text: str, mark: str) -> str:
        """Inserts a mark after the first character of every special token."""
        ends = [start + 1 for start in self._special_starts(text)]
        starts = [0, *ends]
        return mark.join(text[i:j] for i, j in zip(starts, [*ends, len(text)], strict=True))

    def _special_around(self, text: str, ids: list[int]) -> tuple[list[int], list[int]]:
        """Returns the special ids that the tokenizer adds before and after a text."""
        whole = self._tokenizer.encode(text, with_special=True)
        num_added = len(whole) - len(ids)
        for start in range(num_added + 1):
            if whole[start : start + len(ids)] == ids:
                return whole[:start], whole[start + len(ids) :]
        return whole[:num_added], []

    def _encode_inside(self, piece: str) -> list[int]:
        """Encodes a piece that continues a word, without the space that the tokenizer would put in
        front of a text.
        """
        ids = self._tokenizer.encode(piece, with_special=False)
        if piece.startswith(" ") or not self._spelled(ids).startswith(b" "):
            return ids
        for anchor in ANCHORS:
            longer = self._tokenizer.encode(anchor + piece, with_special=False)
            for end in range(1, len(anchor) + 3):
                if self._spelled(longer[:end]).strip(b" ") == anchor.encode():
                    return longer[end:]
        return ids

    def _spelled(self, ids: list[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, ids))


def _characters(text: str) -> set[str]:
    slices = (text[start : start + SLICE_CHARS] for start in range(0, len(text), SLICE_CHARS))
    return set().union(*map(set, slices))


def texts_in(value: Any) -> Iterator[str]:
    """Yields all texts of a JSON value, keys included."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            yield from item
            waiting += item.values()
