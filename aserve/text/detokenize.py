"""Incremental detokenization: the text does not depend on how the tokens were batched.

A character that spans tokens is returned with its last token, so U+FFFD means only bytes that are
not UTF-8. Each stream's state is written by its own `feed` and `finish`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_WINDOW = 64  # tokens: no character takes so many, so a full window has invalid bytes


class TextStream(Protocol):
    """Converts the tokens of one output to text."""

    def feed(self, token_id: int) -> str:
        """Adds a token and returns the text that it completes."""

    def finish(self) -> str:
        """Returns the rest of the text, which is not empty if the last character is incomplete."""


class ByteStream:
    """Joins the tokens' bytes, and decodes them once they are whole characters. It takes O(1) per
    token.
    """

    __slots__ = ("_decode", "_skipped", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes], *, skipped: Collection[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowStream:
    """Decodes a window of the last tokens, for tokenizers whose decoder depends on neighbouring
    tokens. The new text is what the new tokens add to the window's text.
    """

    __slots__ = ("_decode", "_num_context", "_skipped", "_window")

    def __init__(self, decode: Callable[[list[int]], str], *, skipped: Collection[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._num_context = 0  # tokens at the window's start whose text was returned

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        is_partial = not text or text.endswith(REPLACEMENT)
        if is_partial and len(self._window) < MAX_WINDOW:
            return ""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        return text

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        context = self._decode(self._window[: self._num_context])
        return self._decode(self._window)[len(context) :]
