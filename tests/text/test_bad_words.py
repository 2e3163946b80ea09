"""Bad words in ids: as they begin a text and after a space, in every kind of vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.errors import InvalidRequest
from aserve.text.defaults import MAX_BAD_WORD_IDS, bad_word_ids
from aserve.text.tokenizer import TextTokenizer
from tests.text.vocabularies import byte_level_tokenizer, piece_backend

TOKENIZER = byte_level_tokenizer()
PIECES = TextTokenizer(piece_backend())


@given(st.text(st.characters(exclude_categories=["Cs", "Z", "Cc"]), min_size=1, max_size=8))
def test_every_spelling_says_the_word_and_none_ends_in_another(word: str) -> None:
    found = bad_word_ids([word], TOKENIZER)
    assert {TOKENIZER.decode(ids).lstrip() for ids in found} == {word}
    assert len(found) <= 2
    assert not any(a[-len(b) :] == b for a in found for b in found if a != b)
    for text in (word, f" {word}"):
        ids = TOKENIZER.encode(text, with_special=False)
        assert any(tuple(ids[-len(each) :]) == each for each in found)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, PIECES])
def test_a_word_of_one_token_is_banned_with_and_without_its_space(tokenizer: TextTokenizer) -> None:
    found = bad_word_ids(["hello"], tokenizer)
    assert {tokenizer.decode(ids).strip() for ids in found} == {"hello"}
    for text in ("hello", " hello"):
        ids = tuple(tokenizer.encode(text, with_special=False))
        assert any(ids[-len(each) :] == each for each in found)


def test_space_before_a_word_and_repetition_change_nothing() -> None:
    assert bad_word_ids(["  stop", "stop", " stop"], TOKENIZER) == bad_word_ids(["stop"], TOKENIZER)


@pytest.mark.parametrize("words", [[""], ["a", " \n"]])
def test_an_empty_word_is_refused(words: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        bad_word_ids(words, TOKENIZER)


def test_the_tokens_of_all_bad_words_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_BAD_WORD_IDS}"):
        bad_word_ids([f"{i}" + "字" * 40 for i in range(60)], TOKENIZER)
