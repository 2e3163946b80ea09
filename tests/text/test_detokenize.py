"""Tokens to text: no cut of the stream, and no split of a character, changes what comes out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.text.detokenize import ByteStream, TokenTexts
from aserve.text.tokenizer import TextTokenizer
from aserve.text.window_stream import MAX_WINDOW, REPLACEMENT, WindowStream
from tests.text.vocabularies import byte_level_backend, byte_level_tokenizer, word_backend

TOKENIZER = byte_level_tokenizer()
BACKEND = byte_level_backend()
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
ANY_IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60)


def window_stream() -> WindowStream:
    return WindowStream(BACKEND.decode, skipped=TOKENIZER.special_ids)


def deltas(token_ids: list[int]) -> list[str]:
    stream = TOKENIZER.stream()
    return [*map(stream.feed, token_ids), stream.finish()]


@given(UNICODE)
def test_streamed_text_is_a_growing_prefix_of_the_text_at_once(text: str) -> None:
    """Trap 15: a character split over tokens comes whole, with its last token."""
    so_far = ""
    for delta in deltas(TOKENIZER.encode(text, with_special=False)):
        so_far += delta
        assert text.startswith(so_far)
    assert so_far == text


@given(ANY_IDS)
def test_any_token_ids_give_the_text_of_their_joined_bytes(token_ids: list[int]) -> None:
    visible = [i for i in token_ids if i not in TOKENIZER.special_ids]
    at_once = b"".join(map(TOKENIZER.token_bytes, visible)).decode("utf-8", "replace")
    assert "".join(deltas(token_ids)) == at_once


def test_each_token_is_looked_at_once() -> None:
    seen: list[int] = []

    def token_bytes(token_id: int) -> bytes:
        seen.append(token_id)
        return b"\xf0"

    stream = ByteStream(TokenTexts(token_bytes), skipped=())
    for token_id in range(1000):
        stream.feed(token_id)
    assert seen == list(range(1000))


@given(UNICODE)
def test_a_window_gives_the_same_text_as_bytes(text: str) -> None:
    token_ids = TOKENIZER.encode(text.replace(REPLACEMENT, ""), with_special=False)
    stream = window_stream()
    streamed = "".join([*map(stream.feed, token_ids), stream.finish()])
    assert streamed == text.replace(REPLACEMENT, "")


@pytest.mark.parametrize("text", ["hello world", "playing, played!", "world 日本 play"])
def test_a_decoder_that_looks_at_neighbours_streams_the_text_it_decodes_at_once(text: str) -> None:
    backend = word_backend()
    token_ids = backend.encode(text, add_special_tokens=False).ids
    assert TextTokenizer(backend).decode(token_ids) == backend.decode(token_ids)


def test_a_window_stays_small_when_the_bytes_never_become_text() -> None:
    sizes: list[int] = []

    def decode(token_ids: list[int]) -> str:
        sizes.append(len(token_ids))
        return REPLACEMENT * len(token_ids)

    stream = WindowStream(decode, skipped=())
    text = "".join(map(stream.feed, range(1000))) + stream.finish()
    assert text == REPLACEMENT * 1000
    assert max(sizes) <= 2 * MAX_WINDOW
