"""Finds stop strings: where the first one ends, and how much text could still become one.

The text is matched character by character, so the result does not depend on how it was split.
"""

from __future__ import annotations

from typing import NamedTuple


class StopHit(NamedTuple):
    stop: str
    start: int  # character of the whole text at which the stop string begins

    @property
    def end(self) -> int:
        return self.start + len(self.stop)


class StopMatcher:
    """Matches several stop strings. The one that ends first wins, and the longest of those that end
    together.

    WHY Knuth-Morris-Pratt: its state is the length of the longest suffix of the text that begins a
    stop string, which is exactly the text to hold back.
    """

    __slots__ = ("_borders", "_matched", "_num_seen", "_stops")

    def __init__(self, stops: tuple[str, ...], *, num_seen: int = 0) -> None:
        """`num_seen` characters of the text came before."""
        self._stops: list[str] = []
        self._borders: list[list[int]] = []
        # The length of the longest prefix of each stop with which the text ends.
        self._matched: list[int] = []
        self._num_seen = num_seen
        self.add(stops)

    @property
    def num_held(self) -> int:
        return max(self._matched, default=0)

    def add(self, stops: tuple[str, ...]) -> None:
        """Adds stop strings. The text so far does not begin one of them."""
        assert all(stops), "an empty stop string would end every text at once"
        known = dict(zip(self._stops, self._matched, strict=True))
        self._stops = sorted({*known, *stops}, key=len, reverse=True)
        self._borders = [borders_of(stop) for stop in self._stops]
        self._matched = [known.get(stop, 0) for stop in self._stops]

    def feed(self, text: str, *, is_armed: bool = True) -> StopHit | None:
        """Adds text, and returns the stop string that ends in it. If `is_armed` is False, stop
        strings that end in this text are ignored.
        """
        for character in text:
            self._num_seen += 1
            hit = self._advance(character)
            if hit is not None and is_armed:
                return hit
        return None

    def _advance(self, character: str) -> StopHit | None:
        hit = None
        for i, stop in enumerate(self._stops):
            borders, matched = self._borders[i], self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                hit = hit or StopHit(stop, self._num_seen - len(stop))
                matched = borders[-1]
            self._matched[i] = matched
        return hit


def borders_of(word: str) -> list[int]:
    """Returns, for each prefix of `word`, the length of its longest proper suffix that is also a
    prefix of `word`.
    """
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        length += word[i] == word[length]
        borders[i] = length
    return borders
