"""Stop strings against the naive reading: the first place where the text ends in a stop."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.text.stop import StopHit, StopMatcher

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


@given(TEXT, STOPS, STOPS, st.integers(0, 40))
def test_stops_that_are_added_later_count_where_they_begin_later(
    text: str, stops: tuple[str, ...], added: tuple[str, ...], start: int
) -> None:
    before, after = text[:start], text[start:]
    matcher = StopMatcher(stops)
    if matcher.feed(before) is None:
        matcher.add(added)
        late = StopMatcher(added, num_seen=len(before)).feed(after)
        both = [hit for hit in (naive_hit(text, stops), late) if hit is not None]
        expected = min(both, key=lambda hit: (hit.end, hit.start), default=None)
        assert matcher.feed(after) == expected


def test_a_stop_that_has_begun_goes_on_when_others_are_added() -> None:
    matcher = StopMatcher(("abc", "z"))
    assert matcher.feed("xab") is None
    matcher.add(("abcd", "z", "q"))
    assert matcher.num_held == 2
    assert matcher.feed("c") == StopHit("abc", 1)


@pytest.mark.parametrize(
    ("stop", "unarmed", "armed", "start"), [("ab", "aba", "b", 2), ("aa", "aa", "a", 1)]
)
def test_a_stop_string_that_ends_unarmed_is_ignored_and_one_that_begins_there_counts(
    stop: str, unarmed: str, armed: str, start: int
) -> None:
    matcher = StopMatcher((stop,))
    assert matcher.feed(unarmed, is_armed=False) is None
    assert matcher.feed(armed) == StopHit(stop, start)
