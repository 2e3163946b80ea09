"""Incremental detokenization for tokenizers whose decoder depends on neighbouring tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection

REPLACEMENT = "\ufffd"
MAX_WINDOW = 64  # tokens: no character takes so many, so a full window has invalid bytes


class WindowStream:
    """Decodes a window of the last tokens. The new text is what the new tokens add to the text of
    the window.
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
