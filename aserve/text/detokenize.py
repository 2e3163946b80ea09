"""Incremental detokenization: the text does not depend on how the tokens were batched.

Each stream's state is written by its own `feed` and `finish`. A character that spans tokens comes
with its last token, so U+FFFD stands only for bytes that are not UTF-8.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_WINDOW = 64  # tokens; longer than any character takes, so beyond it the bytes are truly invalid


class TextStream(Protocol):
    def feed(self, token_id: int) -> str:
        """The text that this token completes, often all of its own."""

    def finish(self) -> str:
        """What an end in the middle of a character leaves."""


class ByteStream:
    """Joins the tokens' bytes and decodes them as they become whole characters: O(1) per token."""

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
    """For a decoder that looks at neighbours: the new text is what new tokens add to the last."""

    __slots__ = ("_decode", "_num_context", "_skipped", "_window")

    def __init__(self, decode: Callable[[list[int]], str], *, skipped: Collection[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._num_context = 0  # tokens at the window's head whose text was given out

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
