"""Prompts of the benches: right lengths, no two alike, whatever the tokenizer knows."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from aserve.bench.windows import HEAD, TokenWindows
from aserve.text.load import load_tokenizer
from aserve.text.tokenizer import TextTokenizer
from aserve.tiny import MODEL_DIR


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(MODEL_DIR)


def test_no_two_windows_begin_alike_so_that_no_prefix_cache_can_help(
    tokenizer: TextTokenizer,
) -> None:
    windows = TokenWindows(tokenizer, seed=0)
    heads = [tuple(windows.ids(length)[:HEAD]) for length in [16, 64] * 500]
    assert len(set(heads)) == len(heads)


def test_the_seed_decides_the_windows(tokenizer: TextTokenizer) -> None:
    first, same, other = (TokenWindows(tokenizer, seed=seed).ids(32) for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_a_window_may_be_longer_than_the_text(tokenizer: TextTokenizer) -> None:
    assert len(TokenWindows(tokenizer, seed=0).ids(1 << 20)) == 1 << 20


def test_a_text_has_exactly_the_asked_number_of_tokens(tokenizer: TextTokenizer) -> None:
    windows = TokenWindows(tokenizer, seed=0)
    for length in (1, 3, 64, 100):
        text = windows.text(length)
        assert len(tokenizer.encode(text, with_special=False)) == length


def test_a_tokenizer_without_words_for_the_text_gets_random_ids() -> None:
    words = {str(number): number for number in range(1000)}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    windows = TokenWindows(TextTokenizer(backend), seed=0)
    ids = set(itertools.chain.from_iterable(windows.ids(64) for _ in range(8)))
    assert len(ids) > 256
    assert max(ids) < 1000
