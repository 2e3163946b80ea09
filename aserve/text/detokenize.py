"""Incremental detokenization: the text does not depend on how the tokens were batched.

A character that spans tokens is returned with its last token, so U+FFFD means only bytes that are
not UTF-8. Each stream's state is written by its own `feed` and `finish`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from typing import Protocol

Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextStream(Protocol):
    """Converts the tokens of one output to text."""

    def feed(self, token_id: int) -> str:
        """Adds a token and returns the text that it completes."""

    def finish(self) -> str:
        """Returns the rest of the text, which is not empty if the last character is incomplete."""


class TokenTexts(dict[int, str | bytes]):
    """The text of each token that was asked for, or its bytes if they are not whole characters."""

    __slots__ = ("_bytes_of",)

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> str | bytes:
        data = self._bytes_of(token_id)
        try:
            text: str | bytes = data.decode()
        except UnicodeDecodeError:
            text = data
        self[token_id] = text
        return text


class ByteStream:
    """Joins the tokens' bytes, and decodes them once they are whole characters. It takes O(1) per
    token. PERF: between two characters, the text of a token is looked up.
    """

    __slots__ = ("_decoder", "_skipped", "_texts")

    def __init__(self, texts: TokenTexts, *, skipped: Collection[int]) -> None:
        self._texts = texts
        self._skipped = skipped
        # Has the first bytes of a character; None between two characters.
        self._decoder: codecs.IncrementalDecoder | None = None

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._texts[token_id]
        if self._decoder is None:
            if isinstance(piece, str):
                return piece
            self._decoder = Utf8Decoder("replace")
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        if not self._decoder.getstate()[0]:
            self._decoder = None
        return text

    def finish(self) -> str:
        return "" if self._decoder is None else self._decoder.decode(b"", True)
