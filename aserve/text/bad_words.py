"""Converts bad words to the token sequences that must not be sampled."""

from __future__ import annotations

from collections.abc import Iterable

from aserve.errors import InvalidRequest
from aserve.text.tokenizer import TextTokenizer

MAX_IDS = 2048  # token ids of all words of a request together


def bad_word_ids(words: Iterable[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Encodes each word as at the start of a text and as after a space, like vLLM. The second form
    is left out if it ends in the tokens of the first.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = _encode(word.lstrip(), tokenizer)
        if not plain:
            raise InvalidRequest(
                "Invalid 'bad_words': a word is empty.",
                param="bad_words",
                code="string_below_min_length",
            )
        found[plain] = None
        spaced = _encode(f" {word.lstrip()}", tokenizer)
        if spaced[-len(plain) :] != plain:
            found[spaced] = None
    num_ids = sum(map(len, found))
    if num_ids > MAX_IDS:
        raise InvalidRequest(
            f"Invalid 'bad_words': they have {num_ids} tokens in total, more than {MAX_IDS}.",
            param="bad_words",
            code="array_above_max_length",
        )
    return tuple(found)


def _encode(text: str, tokenizer: TextTokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, with_special=False))
