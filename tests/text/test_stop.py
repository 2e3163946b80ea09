"""Stop strings against the naive reading: the first place where the text ends in a stop."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from aserve.text.stop import StopHit, StopMatcher, borders_of

TEXT = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def naive_hit(text: str, stops: tuple[str, ...]) -> StopHit | None:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return StopHit(longest, end - len(longest))
    return None


def naive_held(text: str, stops: tuple[str, ...]) -> int:
    """The longest suffix of the text that a stop begins with."""
    lengths = range(len(text), 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in stops)), 0)


@given(TEXT, STOPS, st.lists(st.integers(0, 40), max_size=5))
def test_the_first_stop_is_found_for_every_split_of_the_text(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    hits = [hit for piece in pieces if (hit := matcher.feed(piece)) is not None]
    assert (hits[0] if hits else None) == naive_hit(text, stops)


@given(TEXT, STOPS)
def test_exactly_the_longest_beginning_of_a_stop_is_held_back(
    text: str, stops: tuple[str, ...]
) -> None:
    matcher = StopMatcher(stops)
    for i, character in enumerate(text):
        if matcher.feed(character) is not None:
            return
        assert matcher.num_held == naive_held(text[: i + 1], stops)


def test_a_stop_is_found_behind_a_false_start() -> None:
    assert StopMatcher(("aab",)).feed("aaab") == StopHit("aab", 1)


def test_the_longer_of_two_stops_that_end_together_wins() -> None:
    assert StopMatcher(("c", "bc")).feed("abcd") == StopHit("bc", 1)


def test_a_stop_string_that_ends_unarmed_is_ignored_and_one_that_begins_there_counts() -> None:
    matcher = StopMatcher(("ab",))
    assert matcher.feed("aba", is_armed=False) is None
    assert matcher.feed("b") == StopHit("ab", 2)


def test_a_stop_string_may_begin_inside_one_that_was_ignored() -> None:
    matcher = StopMatcher(("aa",))
    assert matcher.feed("aa", is_armed=False) is None
    assert matcher.feed("a") == StopHit("aa", 1)


@given(st.text("ab", min_size=1, max_size=16))
def test_borders_are_the_longest_proper_suffixes_that_are_prefixes(word: str) -> None:
    for i, border in enumerate(borders_of(word)):
        prefix = word[: i + 1]
        assert border == max(n for n in range(i + 1) if prefix.endswith(word[:n]))
