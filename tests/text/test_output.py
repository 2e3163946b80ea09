"""One sequence's output: text, tokens and logprobs end together, wherever the stream is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.scored import TokenLogprob
from aserve.text.detokenize import ByteStream, TokenTexts
from aserve.text.output import Released, SequenceText

WORDS = (b"", b"a", b"b", b"ab", b"ba", b"\xed", b"\x95", b"\x9c", b"\xed\x95\x9c", b"<end>")
END = WORDS.index(b"<end>")


def sequence(*stops: str, min_tokens: int = 0, shows_stop: bool = False) -> SequenceText:
    stream = ByteStream(TokenTexts(WORDS.__getitem__), skipped=())
    return SequenceText(
        stream, stops=stops, end_ids=(END,), min_tokens=min_tokens, shows_stop=shows_stop
    )


def logprob(token_id: int, sequence_text: SequenceText) -> TokenLogprob:
    return TokenLogprob(token_id, "", b"", -1.0, text_offset=sequence_text.text_len)


def run(
    output: SequenceText, token_ids: list[int], *, takes: set[int] | None = None
) -> list[Released]:
    """Feeds tokens up to a stop; takes what is certain after the tokens named, and at the end."""
    released = []
    for i, token_id in enumerate(token_ids):
        output.feed(token_id, logprob(token_id, output))
        if takes is None or i in takes:
            released.append(output.take())
        if output.stop is not None:
            break
    output.finish()
    return [*released, output.take()]


def joined(parts: list[Released]) -> Released:
    return Released(
        "".join(part.text for part in parts),
        b"".join(part.token_ids for part in parts),
        tuple(entry for part in parts for entry in part.logprobs),
    )


def ids_of(released: Released) -> list[int]:
    return array_i32(released.token_ids).tolist()


def words(*names: bytes) -> list[int]:
    return [WORDS.index(name) for name in names]


STOPS = st.lists(st.sampled_from(["a", "ab", "bb", "aba", "한", "b한a", "\ufffd"]), max_size=3)
TOKENS = st.lists(st.integers(0, len(WORDS) - 2), max_size=25)


@given(TOKENS, STOPS, st.sets(st.integers(0, 25)), st.integers(0, 4), st.booleans())
def test_the_released_output_does_not_depend_on_when_it_is_taken(
    token_ids: list[int], stops: list[str], takes: set[int], min_tokens: int, shows_stop: bool
) -> None:
    first, second = (
        sequence(*stops, min_tokens=min_tokens, shows_stop=shows_stop) for _ in range(2)
    )
    now_and_then = joined(run(first, token_ids, takes=takes))
    assert now_and_then == joined(run(second, token_ids, takes=set()))


@given(TOKENS, STOPS)
def test_a_stop_string_that_is_shown_is_released_at_once(
    token_ids: list[int], stops: list[str]
) -> None:
    hidden, shown = sequence(*stops), sequence(*stops, shows_stop=True)
    without = joined(run(hidden, token_ids))
    parts = run(shown, token_ids)
    released = joined(parts)
    assert shown.stop == hidden.stop
    assert released.text == without.text + (shown.stop or "")
    assert ids_of(released) == token_ids[: shown.num_kept]
    assert shown.num_kept == shown.num_tokens, "the token that completes a stop has some of it"
    assert all(part.token_ids for part in parts[:-1]), "nothing is held back"


@given(TOKENS, STOPS)
def test_text_tokens_and_logprobs_end_at_the_same_token(
    token_ids: list[int], stops: list[str]
) -> None:
    output = sequence(*stops)
    released = joined(run(output, token_ids))
    assert ids_of(released) == token_ids[: output.num_kept]
    assert [entry.token_id for entry in released.logprobs] == ids_of(released)
    if output.stop is not None:
        assert all(entry.text_offset < len(released.text) for entry in released.logprobs)
        full = b"".join(map(WORDS.__getitem__, token_ids)).decode("utf-8", "replace")
        assert full.startswith(released.text + output.stop)


def test_text_that_may_become_a_stop_string_is_held_back_with_its_tokens() -> None:
    """Trap 15: a stop string split over tokens never shows its beginning."""
    output = sequence("abba")
    parts = [(part.text, ids_of(part)) for part in run(output, words(b"b", b"ab", b"ba"))]
    assert parts == [("b", words(b"b")), ("", []), ("", []), ("", [])]
    assert (output.stop, output.num_kept) == ("abba", 1)


def test_held_text_comes_with_its_tokens_once_it_cannot_become_a_stop() -> None:
    parts = [(part.text, ids_of(part)) for part in run(sequence("abb"), words(b"ab", b"a", b"a"))]
    letter = ("a", words(b"a"))
    assert parts == [("", []), ("ab", words(b"ab")), letter, letter]


def test_a_stop_counts_only_after_min_tokens() -> None:
    output = sequence("a", min_tokens=2)
    parts = joined(run(output, words(b"a", b"a", b"b", b"a", b"b")))
    assert (parts.text, ids_of(parts)) == ("aab", words(b"a", b"a", b"b"))


@given(
    st.lists(st.lists(st.integers(0, len(WORDS) - 1), max_size=4), max_size=8),
    STOPS,
    st.sets(st.integers(0, 8)),
    st.integers(0, 9),
)
def test_tokens_that_are_fed_together_are_those_that_are_fed_alone(
    runs: list[list[int]], stops: list[str], takes: set[int], stops_from: int
) -> None:
    """Also before and after stop strings that come while the sequence runs."""
    alone, together = sequence(), sequence()
    parts: list[tuple[Released, Released]] = []
    for number, token_ids in enumerate(runs):
        if number == stops_from:
            parts.append((alone.take(), together.take()))
            alone.add_stops(tuple(stops))
            together.add_stops(tuple(stops))
        for token_id in token_ids:
            if alone.stop is None:
                alone.feed(token_id)
        together.feed_all(pack_i32(token_ids))
        if number in takes:
            parts.append((alone.take(), together.take()))
        if alone.stop is not None:
            break
    for each in (alone, together):
        each.finish()
    parts.append((alone.take(), together.take()))
    assert [one for one, _ in parts] == [other for _, other in parts]
    assert (alone.stop, alone.num_kept, alone.num_tokens, alone.text_len) == (
        *(together.stop, together.num_kept, together.num_tokens, together.text_len),
    )
