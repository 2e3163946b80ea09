"""Ids and bytes of every kind of vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, processors

from aserve.errors import InvalidRequest
from aserve.text.tokenizer import Spelling, TextTokenizer, spelling_of
from tests.text.vocabularies import (
    EOS,
    byte_level_backend,
    byte_level_tokenizer,
    piece_backend,
    word_backend,
)

UNICODE = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=30
)


def unknown_backend() -> Tokenizer:
    """Its decoder has a replacement that no vocabulary is known for."""
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])
    return backend


@pytest.mark.parametrize(
    ("backend", "spelling"),
    [
        (byte_level_backend(), Spelling.BYTE_LEVEL),
        (piece_backend(), Spelling.PIECES),
        (word_backend(), Spelling.CONTEXTUAL),
        (unknown_backend(), Spelling.CONTEXTUAL),
    ],
)
def test_vocabularies_are_told_apart_by_their_decoder(
    backend: Tokenizer, spelling: Spelling
) -> None:
    assert spelling_of(backend) is spelling


@given(UNICODE)
def test_the_bytes_of_byte_level_ids_are_the_text(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = tokenizer.encode(text, with_special=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


@given(UNICODE)
def test_the_bytes_of_pieces_are_the_text_behind_a_space(text: str) -> None:
    tokenizer = TextTokenizer(piece_backend())
    token_ids = tokenizer.encode(f"a{text}", with_special=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == f" a{text}".encode()


def test_an_output_keeps_the_space_of_its_first_word() -> None:
    tokenizer = TextTokenizer(piece_backend())
    token_ids = tokenizer.encode("hello world", with_special=False)
    assert tokenizer.decode(token_ids[1:]) == " world"


def test_special_tokens_have_bytes_but_no_text_and_added_ones_have_both() -> None:
    tokenizer = byte_level_tokenizer()
    (eos_id,) = tokenizer.eos_ids
    assert tokenizer.token_bytes(eos_id) == EOS.encode()
    token_ids = tokenizer.encode(f"a<mark>{EOS}b", with_special=False)
    assert eos_id in token_ids
    assert tokenizer.decode(token_ids) == "a<mark>b"


@pytest.mark.parametrize(
    ("backend", "special"),
    [(byte_level_backend(), EOS), (piece_backend(), "</s>"), (word_backend(), "[SEP]")],
)
def test_special_tokens_have_text_on_request(backend: Tokenizer, special: str) -> None:
    tokenizer = TextTokenizer(backend)
    token_ids = tokenizer.encode(f"hello{special}", with_special=False)
    assert tokenizer.decode(token_ids).strip() == "hello"
    text = tokenizer.decode(token_ids, skip_special=False)
    assert text.replace(" ", "") == f"hello{special}"


def test_an_id_beyond_the_vocabulary_has_no_bytes() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_bos_is_added_once() -> None:
    backend = byte_level_backend()
    eos_id = backend.token_to_id(EOS)
    bare = TextTokenizer(backend, bos_id=eos_id)
    assert bare.encode("ab", with_special=True)[0] == eos_id
    assert bare.encode("ab", with_special=False)[0] != eos_id
    backend.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A", special_tokens=[(EOS, eos_id)]
    )
    assert TextTokenizer(backend, bos_id=eos_id).encode("ab", with_special=True).count(eos_id) == 1


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0}, unk_token="?"),
        models.WordPiece({"a": 0}, unk_token="?"),
        models.Unigram([("a", -1.0)], None, False),
        models.BPE({"a": 0}, [], unk_token="?"),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_text_that_the_vocabulary_cannot_spell_is_refused(model: models.Model) -> None:
    """It was a bare Exception, which clients saw as an unexpected error of the server."""
    tokenizer = TextTokenizer(Tokenizer(model))
    assert tokenizer.encode("a", with_special=True) == [0]
    with pytest.raises(InvalidRequest, match="no token for unknown text") as caught:
        tokenizer.encode("z", with_special=True)
    assert caught.value.info().code == "no_token_for_text"
