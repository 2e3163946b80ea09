"""Bounds the tokens of a text by its bytes, so that long texts are refused without encoding them.

A token stands for a bounded number of bytes, so a text with more bytes than `max_model_len` such
tokens is too long. Encoding it first would take seconds and gigabytes.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Encoding, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from aserve.errors import ContextTooLong, InvalidRequest

# The largest factor by which a normalizer shrinks a text in bytes. NFC composes up to three
# characters of three bytes to one of three bytes. NFKC turns a character of four bytes into one of
# one byte.
SHRINKS = {"NFC": 3, "NFKC": 4}
# The factor for tokenizers that can shrink a text without bound: to them an unknown word of any
# length is one token, or white space is none.
UNBOUNDED = 16
KEEPS_TEXT = frozenset({"Prepend", "Replace"})  # for example SentencePiece's marks for spaces
DROPS_TEXT = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})


def bytes_per_token(backend: Tokenizer) -> int:
    """Returns the largest number of a text's bytes that one token can stand for."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    is_byte_level = "ByteLevel" in _kinds(backend.pre_tokenizer)
    longest = 1
    for token in backend.get_vocab(with_added_tokens=True):
        # A byte-level vocabulary spells each byte as one character.
        size = len(token) if is_byte_level and token not in added else len(token.encode())
        longest = max(longest, size)
    return longest * _shrink(backend)


def check_bytes(text: str, limit: int, *, where: str, max_model_len: int) -> None:
    """Raises if a text has more than `limit` bytes. PERF: the bytes are counted only if the number
    of characters does not decide.
    """
    if len(text) <= limit // 4:
        return
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes <= limit:
        return
    raise ContextTooLong(
        f"This model's maximum context length is {max_model_len} tokens. However, there are "
        f"{num_bytes} bytes in the {where}, and at most {limit} are allowed. Please reduce the "
        f"length of the {where}.",
        param=where,
    )


def _shrink(backend: Tokenizer) -> int:
    """Returns the largest factor by which the tokenizer shrinks a text before it is split."""
    takes_spaces = any(
        token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
    )
    steps = _steps(backend.pre_tokenizer)
    drops = any(step["type"] in DROPS_TEXT or step.get("behavior") == "Removed" for step in steps)
    if takes_spaces or drops or not _has_all_bytes(backend):
        return UNBOUNDED
    factor = 1
    for kind in _kinds(backend.normalizer) - KEEPS_TEXT:
        factor *= SHRINKS.get(kind, UNBOUNDED)
    return min(factor, UNBOUNDED)


def _has_all_bytes(backend: Tokenizer) -> bool:
    """Returns whether the vocabulary covers all bytes. If not, an unknown word of any length may be
    one token or none.
    """
    if isinstance(backend.model, BPE) and backend.model.byte_fallback:
        return True
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    is_byte_level = "ByteLevel" in _kinds(backend.pre_tokenizer)
    return is_byte_level and all(backend.token_to_id(letter) is not None for letter in alphabet)


def _kinds(part: Any) -> set[str]:
    return {step["type"] for step in _steps(part)}


def _steps(part: Any) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer, which may be a sequence."""
    if part is None:
        return []
    state: dict[str, Any] = json.loads(part.__getstate__())
    if state["type"] != "Sequence":
        return [state]
    return state.get("pretokenizers") or state.get("normalizers") or []


def encodings(backend: Tokenizer, texts: list[str], *, with_special: bool) -> list[Encoding]:
    """WHY: tokenizers raises a bare Exception for what the vocabulary cannot spell, if it has no
    unknown token. PERF: the batch call releases the GIL, the plain one holds it (3.6 MB took 0.6
    and 1.7 s).
    """
    try:
        return backend.encode_batch_fast(texts, add_special_tokens=with_special)
    except Exception as error:
        raise InvalidRequest(
            "the model's vocabulary has no token for a part of the text, and the tokenizer has no "
            f"token for unknown text ({error}); leave that part out, or send token ids",
            param="prompt",
            code="no_token_for_text",
        ) from error
